"""Many saves, many resumes, clocks that jump, and checkpoints of other versions.

python -m tests.faults.endurance     the table of docs/measurements/endurance.md
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.faults.file_errors import build_library, fork_server_with
from tests.faults.fork_server import ForkServer

HERE = "tests.faults.endurance:"
LIMIT = 1800.0
DAY = 86400
JUMPS = (0, DAY, -DAY, 3650 * DAY, -20000 * DAY, 60000 * DAY, 1, -1)
"""Seconds by which the clock is wrong, one after the other: from 1971 to 2190."""


def many_saves(store: str, rank: int, size: int, folder: str, count: int) -> dict[str, Any]:
    """Save `count` steps; return the names that are left, and the seconds of the first and last saves."""
    from dstrain.batch import Progress
    from dstrain.training.checkpoints import CheckpointStore
    from tests.faults.save_steps import SAMPLES, Scene

    scene = Scene(store, rank, size, Path(folder))
    saving = scene.saving()
    saving.checkpoints = CheckpointStore(folder=saving.checkpoints.folder, world=scene.world, keep=5, keep_every=50)
    seconds, descriptors = list[float](), list[int]()
    for step in range(1, count + 1):
        scene.advance(step - 1, step)
        begin = time.perf_counter()
        saving.save(Progress(step, step * SAMPLES), 1.0 if step == 7 else 2.0)
        seconds.append(time.perf_counter() - begin)
        descriptors.append(len(os.listdir("/proc/self/fd")))
    left = sorted(os.listdir(saving.checkpoints.folder))
    return {"left": left, "seconds": seconds, "descriptors": max(descriptors[-10:]) - max(descriptors[:10])}


def check_many_saves(server: ForkServer, root: Path) -> tuple[int, str, list[str]]:
    count = 200
    told = server(f"{HERE}many_saves", 2, LIMIT, folder=str(root / "saves"), count=count)[0].answer
    steps = [7, 50, 100, 150, *range(196, 201)]
    wanted = ["best", *(f"step-{step:08d}" for step in steps)]
    early, late = (sorted(part)[10] * 1000 for part in (told["seconds"][:20], told["seconds"][-20:]))
    result = f"{len(steps)} left; a save took {early:.0f} ms at first and {late:.0f} ms at last"
    faults = [] if told["left"] == wanted else [f"left {told['left']}"]
    faults += [f"{told['descriptors']} more descriptors"] if told["descriptors"] > 0 else []
    return count, result, faults


def check_many_resumes(server: ForkServer, root: Path) -> tuple[int, str, list[str]]:
    """Resume again and again, a step and a save each time."""
    count, first = 50, 3
    folder = str(root / "resumes")
    states = server("tests.faults.save_steps:unbroken", 2, LIMIT, folder=folder, steps=first + count)[0].answer
    faults = list[str]()
    for number in range(count):
        started = server("tests.faults.save_steps:start_anew", 2, LIMIT, folder=folder, more=1)[0].answer
        step = first + number
        if isinstance(started, str) or (started.step, started.state) != (step, states[step]):
            faults.append(f"resume {number + 1}: {started}")
            break
        if started.passed_over or started.removed or started.later != {step + 1: states[step + 1]}:
            faults.append(f"resume {number + 1}: {started}")
    return count, "each state is that of a run without a stop, to the bit; no checkpoint was passed over", faults


def jumping_saves(store: str, rank: int, size: int, folder: str) -> list[str]:
    """Save with a clock that jumps between and within the saves; return what is wrong."""
    from dstrain.batch import Progress
    from dstrain.training import saver
    from dstrain.training.state.manifest import find_checkpoints
    from tests.faults.save_steps import SAMPLES, Scene

    jump = ctypes.CDLL(None).clock_jump
    jump.argtypes = [ctypes.c_long]
    scene = Scene(store, rank, size, Path(folder))
    saving, step, faults, years, write = scene.saving(), 0, list[str](), set[str](), saver.write_state
    for between in JUMPS:
        for within in JUMPS:

            def write_late(folder: Path, *rest: Any, seconds: int = within) -> Any:
                jump(seconds)
                return write(folder, *rest)

            saver.write_state = write_late
            jump(between)
            step += 1
            scene.advance(step - 1, step)
            saving.save(Progress(step, step * SAMPLES), float(-step))
            scene.world.barrier()
            whole = [info.step for info in find_checkpoints(scene.checkpoints.folder, True) if info.is_complete]
            years.add(json.loads((scene.checkpoints.folder / f"step-{step:08d}/run.json").read_text())["time"][:4])
            if whole != [step, step - 1][: min(step, 2)]:
                faults.append(f"after jumps of {between} and {within} s the whole steps are {whole}")
            scene.world.barrier()
    return faults if len(years) > 3 else [*faults, f"the years of the saves are {years}"]


def jumping_start(store: str, rank: int, size: int, folder: str, seconds: int) -> Any:
    from tests.faults.save_steps import start_anew

    jump = ctypes.CDLL(None).clock_jump
    jump.argtypes = [ctypes.c_long]
    jump(seconds)
    return start_anew(store, rank, size, folder, more=1)


def check_clock_jumps(server: ForkServer, root: Path) -> tuple[int, str, list[str]]:
    folder = str(root / "jumps")
    faults = list[str](server(f"{HERE}jumping_saves", 2, LIMIT, folder=folder)[0].answer)
    first = len(JUMPS) ** 2
    states = server(
        "tests.faults.save_steps:unbroken", 2, LIMIT, folder=str(root / "steady"), steps=first + len(JUMPS) + 1
    )[0].answer
    for number, seconds in enumerate(JUMPS):
        step = first + number
        started = server(f"{HERE}jumping_start", 2, LIMIT, folder=folder, seconds=seconds)[0].answer
        if isinstance(started, str) or (started.step, started.state) != (step, states[step]):
            faults.append(f"a resume with a clock that is wrong by {seconds} s: {started}")
    return (
        first + len(JUMPS),
        "each save is whole, each resume is that of a run with a steady clock, to the bit",
        faults,
    )


Change = Callable[[dict[str, Any]], object]
VERSIONS: Mapping[str, Change] = {
    "other versions of all libraries": lambda info: info.update(versions={"dstrain": "9.9", "torch": "1.0"}),
    "no versions": lambda info: info.pop("versions", None),
    "fields that this version does not know": lambda info: info.update(later={"a": [1, 2]}, run_id=7),
    "no early_stopping, no run_id, no preset": lambda info: [info.pop(k, 0) for k in ("early_stopping", "run_id", "preset")],
}  # fmt: skip


def _rewrite(checkpoint: Path, change: Change) -> None:
    """Change run.json as a version would have written it, with its hash in the manifest."""
    manifest, info = (json.loads((checkpoint / name).read_text()) for name in ("MANIFEST.json", "run.json"))
    change(info)
    content = json.dumps(info).encode()
    (checkpoint / "run.json").write_bytes(content)
    manifest["files"]["run.json"] = {"size": len(content), "sha256": [hashlib.sha256(content).hexdigest()]}
    (checkpoint / "MANIFEST.json").write_text(json.dumps(manifest))


def check_versions(server: ForkServer, root: Path) -> tuple[int, str, list[str]]:
    """A checkpoint that another version has written in the same format is resumed from."""
    faults = list[str]()
    for number, (title, change) in enumerate(VERSIONS.items()):
        folder = root / f"version-{number}"
        states = server("tests.faults.save_steps:unbroken", 2, LIMIT, folder=str(folder), steps=4)[0].answer
        _rewrite(folder / "checkpoints/step-00000003", change)
        started = server("tests.faults.save_steps:start_anew", 2, LIMIT, folder=str(folder), more=1)[0].answer
        if isinstance(started, str) or (started.step, started.later) != (3, {4: states[4]}):
            faults.append(f"{title}: {started}")
    return len(VERSIONS), f"resumed, to the bit: {'; '.join(VERSIONS)}", faults


CHECKS: Mapping[str, Callable[[ForkServer, Path], tuple[int, str, list[str]]]] = {
    "200 saves, `keep: 5`, `keep_every: 50`, the best is step 7": check_many_saves,
    "50 resumes in a row": check_many_resumes,
    "the clock jumps between and within saves, and before a resume, by up to 164 years": check_clock_jumps,
    "another version wrote `run.json`, in the same format": check_versions,
}


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        library = build_library(Path(scratch))
        with fork_server_with(library, "torch._dynamo", "tests.faults.save_steps") as server:
            print("| what | trials | result | faults |\n|---|---|---|---|")
            for title, check in CHECKS.items():
                trials, result, faults = check(server, Path(scratch))
                print(f"| {title} | {trials} | {result} | {len(faults)} |", *faults, sep="\n", flush=True)


if __name__ == "__main__":
    main()

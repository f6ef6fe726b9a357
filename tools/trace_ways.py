"""Count the files, functions and moves between files that five ways through dstrain take.

python -m tools.trace_ways [-v] [WAY...]

train: `dstrain train demo-rm`, the launching process as far as --dry-run goes, and a rank up to its first optimizer step.
record: DPO records with an image, from their lines to rows of the token store, to a batch, to the loss and its gradient.
"Each record" counts what is called for each of them on the way to its row, in any thread.
save: the first checkpoint of a run at ZeRO stage 1, in one process.
resume: the functions that a rank calls before its first step only when it resumes.
hosts: two launches with --no-ssh as two hosts, with a rank each, up to the first step.

Else calls in the main thread are counted. Not counted is what runs while a module is imported: its body, decorators, tables,
class bodies. Comprehensions and lambdas count as functions, and each value that a generator yields as a call. From Python
3.12 on most comprehensions are no functions of their own: the column after it counts functions without all of them. A
move is a call in another file than the call before it. -v names the files and the functions that are called most.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = f"{os.sep}dstrain{os.sep}"
FIRST_STEP = "DeepSpeedEngine.step"
SAVE = "CheckpointSaver.save"
ONE_PROCESS = ("--num-gpus", "1")
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


class Tracer:
    """Records the functions of dstrain that the main thread calls."""

    def __init__(self, until: str = "", inside: str = "") -> None:
        """Take the qualified name of the function whose call ends it, and of the one whose first call it is limited to."""
        self.calls: Counter[tuple[str, str]] = Counter()
        """(file, qualified name of a function) -> calls of it."""
        self.moves = 0
        self._last_file, self._until, self._inside = "", until, inside
        self._outer: FrameType | None = None
        """Call of the function that the tracer is limited to."""
        self._import: FrameType | None = None
        """Body of the module that is being imported; the outermost, where it imports others."""

    def record(self, frame: FrameType, event: str, argument: Any) -> None:
        """Take an event, as `sys.setprofile` gives it."""
        code = frame.f_code
        if event == "return":
            if frame is self._outer:
                sys.setprofile(None)
            if frame is self._import:
                self._import = None
            return
        if event != "call" or self._import is not None:
            return
        if code.co_name == "<module>" and frame.f_globals.get("__name__") != "__main__":
            self._import = frame
            return
        # Without the flag of functions (CO_NEWLOCALS) it is the body of a class, or of the module that Python was started with.
        if not code.co_flags & 0x2 or PACKAGE not in code.co_filename:
            return
        if code.co_qualname == self._until:
            sys.setprofile(None)
            return
        if self._inside and self._outer is None:
            if code.co_qualname != self._inside:
                return
            self._outer = frame
        file = code.co_filename.rpartition(PACKAGE)[2]
        self.calls[file, code.co_qualname] += 1
        self.moves += file != self._last_file
        self._last_file = file


def trace(work: Callable[[], object], threads: bool = False) -> Tracer:
    """Return what `work` calls; `threads`: also in the threads that it starts."""
    tracer = Tracer()
    if threads:
        threading.setprofile(tracer.record)
    sys.setprofile(tracer.record)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return tracer


def install(folder: str, until: str, inside: str) -> None:
    """Trace this process, and write what it called to a file of `folder` when it ends."""
    import atexit

    tracer = Tracer(until, inside)
    name = "rank" if "RANK" in os.environ else "launcher"
    path = Path(folder) / f"{name}-{os.getpid()}.json"

    def write() -> None:
        calls = [[file, name, count] for (file, name), count in tracer.calls.items()]
        path.write_text(json.dumps({"calls": calls, "moves": tracer.moves}), encoding="utf-8")

    atexit.register(write)
    sys.setprofile(tracer.record)


def start(arguments: list[str], folder: Path, until: str = "", inside: str = "") -> subprocess.Popen[bytes]:
    """Start `python -m dstrain ARGUMENTS` with every process of it traced into `folder`."""
    folder.mkdir()
    # Python imports this module at its start.
    (folder / "sitecustomize.py").write_text(
        f"import sys\nif '-m' in sys.orig_argv:\n    from tools.trace_ways import install\n"
        f"    install({str(folder)!r}, {until!r}, {inside!r})\n",
        encoding="utf-8",
    )
    places = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "DSTRAIN_CACHE": str(folder.parent / "cache")}
    env = {**os.environ, **places, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, "-m", "dstrain", *arguments], env=env, stdout=subprocess.DEVNULL)


def run(arguments: list[str], folder: Path, until: str = "", inside: str = "") -> None:
    """Run a command as `start` does. Raises CalledProcessError if it fails."""
    process = start(arguments, folder, until, inside)
    if code := process.wait():
        raise subprocess.CalledProcessError(code, process.args)


def read(folder: Path, processes: str) -> list[Tracer]:
    """Return what the processes of a command called: "rank-*", or "*" for all."""
    tracers = []
    for path in sorted(folder.glob(f"{processes}.json")):
        tracer = Tracer()
        trace = json.loads(path.read_text(encoding="utf-8"))
        tracer.calls = Counter({(file, name): count for file, name, count in trace["calls"]})
        tracer.moves = trace["moves"]
        tracers.append(tracer)
    return tracers


def train(run_dir: Path, steps: int = 4) -> list[str]:
    """Return the arguments of a run of a few steps."""
    overrides = (f"steps={steps}", "epochs=null", "save.every=2", "eval.every=1000")
    options = [text for override in overrides for text in ("--set", override)]
    return ["train", "demo-rm", *options, "--run-dir", str(run_dir)]


Parts = dict[str, list[Tracer]]
"""Name of a part of a way -> what the processes called in it."""


def trace_train(folder: Path) -> Parts:
    run([*train(folder / "run"), *ONE_PROCESS, "--dry-run"], folder / "dry")
    run([*train(folder / "run"), *ONE_PROCESS], folder / "trace", FIRST_STEP)
    launcher, rank = read(folder / "dry", "*"), read(folder / "trace", "rank-*")
    return {"launching process": launcher, "rank": rank, "train": launcher + rank}


def trace_record(folder: Path) -> Parts:
    from dstrain.config.schema import RunConfig
    from dstrain.tasks import make_task
    from dstrain.training.build_model import build_train_module
    from tests.vision_recipes import named_recipe

    os.environ["DSTRAIN_CACHE"] = f"{folder}/warm"
    _, values = named_recipe("dpo, with images", folder)
    task = make_task(RunConfig.model_validate(values))
    module = build_train_module(task)  # trains the tokenizer, which is not on the way
    os.environ["DSTRAIN_CACHE"] = f"{folder}/cold"
    results: dict[str, Any] = {}
    row = trace(lambda: results.update(examples=task.examples("train")))
    batch = trace(lambda: results.update(batch=task.collate([results["examples"][index] for index in (1, 2)])))
    loss = trace(lambda: module(results["batch"])[0].backward())
    os.environ["DSTRAIN_CACHE"] = f"{folder}/colder"
    each = trace(lambda: results.update(again=task.examples("train")), threads=True)
    # One of the records has no image.
    least = len(results["examples"]) - 1
    each.calls = Counter({call: count for call, count in each.calls.items() if count >= least})
    each.moves = 0  # of several threads it says nothing
    return {
        "line to row": [row],
        "each record": [each],
        "row to batch": [batch],
        "batch to gradient": [loss],
        "record": [row, batch, loss],
    }


def trace_save(folder: Path) -> Parts:
    run([*train(folder / "run"), *ONE_PROCESS, "--ds-config", "zero1"], folder / "trace", inside=SAVE)
    return {"save": read(folder / "trace", "rank-*")}


def trace_resume(folder: Path) -> Parts:
    run([*train(folder / "run"), *ONE_PROCESS], folder / "first", FIRST_STEP)
    run([*train(folder / "run", 6), *ONE_PROCESS, "--allow-change", "steps"], folder / "second", FIRST_STEP)
    (first,), (second,) = read(folder / "first", "rank-*"), read(folder / "second", "rank-*")
    for function in first.calls:
        second.calls.pop(function, None)
    second.moves = 0  # of these functions alone it says nothing
    return {"resume": [second]}


def trace_hosts(folder: Path) -> Parts:
    hostfile = folder / "hostfile"
    hostfile.write_text("127.0.0.1 slots=1\nlocalhost slots=1\n", encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        master = ["--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1])]
    shared = [*train(folder / "run"), "--hostfile", str(hostfile), "--no-ssh", *master]
    hosts = [start([*shared, "--node-rank", str(rank)], folder / f"host{rank}", FIRST_STEP) for rank in (0, 1)]
    if codes := [code for code in [process.wait() for process in hosts] if code]:
        raise subprocess.CalledProcessError(codes[0], hosts[0].args)
    return {"hosts": [*read(folder / "host0", "*"), *read(folder / "host1", "*")]}


WAYS = {"train": trace_train, "record": trace_record, "save": trace_save, "resume": trace_resume, "hosts": trace_hosts}


def main(arguments: list[str]) -> None:
    print(
        "| way | files | functions | without comprehensions | calls | moves between files |\n|---|---|---|---|---|---|"
    )
    for name in [name for name in arguments if name != "-v"] or WAYS:
        with tempfile.TemporaryDirectory() as folder:
            parts = WAYS[name](Path(folder))
        for part, tracers in parts.items():
            calls = sum((tracer.calls for tracer in tracers), Counter())
            files = {file for file, _ in calls}
            moves = sum(tracer.moves for tracer in tracers)
            written = [name for _, name in calls if not name.endswith(COMPREHENSIONS)]
            print(f"| {part} | {len(files)} | {len(calls)} | {len(written)} | {calls.total()} | {moves or ''} |")
            if "-v" in arguments:
                print("\n".join(f"  {file}" for file in sorted(files)))
                print("\n".join(f"  {count} {file}: {function}" for (file, function), count in calls.most_common(20)))


if __name__ == "__main__":
    main(sys.argv[1:])

"""Errors of file calls: each call of a save fails in turn. The run goes on, or ends with what was whole before.

python -m tests.faults.file_errors [EVERY]     the table of docs/measurements/file-errors.md; of every n-th call
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.fork_server import ForkServer

SOURCE = Path(__file__).with_suffix(".c")
ONCE, FROM_HERE_ON, DONE_BUT_REPORTED, SHORT = range(4)
"""The modes of file_errors.c."""
PASSING = ("ESTALE", "EIO", "ENOENT", "EAGAIN", "ETIMEDOUT")
ERRORS = (
    *((name, ONCE) for name in (*PASSING, "EACCES")),
    *((name, FROM_HERE_ON) for name in ("ENOSPC", "EDQUOT", "EROFS", "EMFILE")),
)
"""(error, mode) of each sweep."""
MORE_ERRORS = (("EIO", DONE_BUT_REPORTED), ("EINTR", ONCE), ("EIO", FROM_HERE_ON), ("short", SHORT))
"""`short`: a read or write of half of the bytes, without an error."""
WORDS = ("once", "from here on", "once, but done", "once")
LIMIT = 30.0
"""Seconds for one trial."""


def build_library(folder: Path) -> Path:
    """Compile file_errors.c."""
    library = folder / "file_errors.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


@contextmanager
def fork_server_with(library: Path, *modules: str) -> Iterator[ForkServer]:
    """Yield a fork server whose file calls can fail."""
    os.environ["LD_PRELOAD"] = str(library)
    try:
        server = ForkServer(*modules)
        server.start()
    finally:
        del os.environ["LD_PRELOAD"]
    try:
        yield server
    finally:
        with suppress(subprocess.TimeoutExpired):  # its modules take long to free on a busy machine
            server.close()


def arm(folder: Path | str, at: int, error: int = 0, mode: int = ONCE, log: Path | str = "") -> None:
    """Let the `at`-th file call below a folder fail; 0: none, and all are logged. No folder: nothing is counted."""
    call = ctypes.CDLL(None).file_errors_arm
    call.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
    call(os.fsencode(folder), at, error, mode, os.fsencode(log))


@dataclass(frozen=True)
class Sweep:
    """What became of a save with each call failing in turn, by one error."""

    error: str
    mode: int
    outcomes: Counter[str]
    faults: list[str]
    """Calls with a lost or changed checkpoint, a wrong sentence, a hang or an unexpected error."""

    @property
    def name(self) -> str:
        return f"{self.error}, {WORDS[self.mode]}"


UNHARMED, SECOND_TRY, CLEANUP_LATER, ENDED = "went on", "second try", "cleanup later", "ended"


def sweep_save(
    store: str, rank: int, size: int, folder: str, sign: int, every: int, errors: list[tuple[str, int]]
) -> tuple[int, list[Sweep]]:
    """Let every n-th file call of a save fail, in forks of this process; `sign`: of the change of the metric.

    Returns the number of calls, and the sweeps.
    """
    from dstrain.training import checkpoints
    from tests.faults import save_steps

    checkpoints.RETRY_SECONDS = 0
    trials = _SaveTrials(save_steps.Scene(store, rank, size, Path(folder)), Path(folder), sign)
    return len(trials.calls), [trials.sweep(name, mode, every) for name, mode in errors]


class _SaveTrials:
    """A run that was saved at each step up to BEFORE, and forks of it that save the next one."""

    def __init__(self, scene: Any, folder: Path, sign: int) -> None:
        from dstrain.batch import Progress
        from tests.faults.save_steps import BEFORE, SAMPLES

        self._scene, self._folder, self._sign = scene, folder / "checkpoints", sign
        self._saving, self._samples, self._step = scene.saving(), SAMPLES, BEFORE + 1
        self._states = {}
        for step in range(1, BEFORE + 1):
            scene.advance(step - 1, step)
            self._states[step] = scene.state()
            self._saving.save(Progress(step, step * SAMPLES), float(sign * step))
        scene.advance(BEFORE, self._step)
        self._states[self._step] = scene.state()
        self._kept = folder / "kept"
        shutil.copytree(self._folder, self._kept, symlinks=True)
        self._older = _digest(self._folder)
        log = folder / "calls"
        done = _in_fork(lambda: self._save(0, 0, ONCE, log))
        assert done == {"events": []}, done
        self.calls = [line.split(" ", 1)[1] for line in log.read_text().splitlines()]
        self._names = sorted(os.listdir(self._folder))

    def sweep(self, name: str, mode: int, every: int) -> Sweep:
        outcomes, faults = Counter[str](), list[str]()
        number = 0 if name == "short" else getattr(errno, name)
        for at in range(1, len(self.calls) + 1, every):
            shutil.rmtree(self._folder)
            shutil.copytree(self._kept, self._folder, symlinks=True)
            outcome, fault = self._try(at, number, mode)
            outcomes[outcome] += 1
            if mode == ONCE and name in PASSING and outcome == ENDED:
                fault = fault or "an error that passes ended the run"
            if fault:
                faults.append(f"{name} at call {at} ({self.calls[at - 1].replace(str(self._folder), '.')}): {fault}")
        return Sweep(name, mode, outcomes, faults)

    def _try(self, at: int, number: int, mode: int) -> tuple[str, str]:
        """Return what became of a save and of the start after it, and what is wrong with it."""
        from dstrain.training.state.manifest import find_checkpoints

        done = _in_fork(lambda: self._save(at, number, mode))
        if not isinstance(done, dict):
            return "hung or killed", str(done)
        whole = [info.step for info in find_checkpoints(self._folder, check_hashes=True) if info.is_complete]
        newest = whole[0] if whole else 0
        if newest < self._step - 1 or (self._sign > 0 and 1 not in whole):
            return "lost", f"the whole steps are {whole} after {done}"
        events = [event for event, _ in done.get("events", [])]
        outcome, fault = UNHARMED, ""
        if "error" in done:
            outcome, fault = ENDED, self._judge_error(done, newest)
        elif newest != self._step:
            fault = f"it went on without a checkpoint: {done}"
        elif "cleanup_failed" in events:
            outcome = CLEANUP_LATER
        elif "save_retried" in events:
            outcome = SECOND_TRY
        elif sorted(os.listdir(self._folder)) != self._names:
            outcome = CLEANUP_LATER  # an error of reading or removing an older one
        again = _in_fork(lambda: self._start_again(newest))
        return outcome, fault or ("" if again is None else f"the next start: {again}")

    def _judge_error(self, done: dict[str, Any], newest: int) -> str:
        """Return what is wrong with the sentence that ended a run."""
        error = done["error"]
        if not done["is_own"] or "\n" in error:
            return f"unexpected: {error}"
        if newest == self._step:
            return f"the checkpoint is whole: {error}"
        changed = {name for name, digest in self._older.items() if _digest(self._folder).get(name) != digest}
        return f"{sorted(changed)} changed, but: {error}" if "are unchanged" in error and changed else ""

    def _save(self, at: int, number: int, mode: int, log: Path | str = "") -> dict[str, Any]:
        from dstrain.batch import Progress
        from dstrain.errors import DstrainError

        events: list[Any] = []
        self._saving.log_event = lambda event, **fields: events.append((event, fields))
        arm(self._folder, at, number, mode, log)
        try:
            self._saving.save(Progress(self._step, self._step * self._samples), float(self._sign * self._step))
        except Exception as error:
            arm("", 0)
            return {"error": f"{type(error).__name__}: {error}", "is_own": isinstance(error, DstrainError)}
        arm("", 0)
        return {"events": [event for event in events if event[0] != "saved"]}

    def _start_again(self, newest: int) -> str | None:
        """Continue from the newest checkpoint as a new start does, and save the next step; return what is wrong."""
        from dstrain.batch import Progress
        from dstrain.training.state.engine_state import open_checkpoint

        scene = self._scene
        start, passed_over = scene.checkpoints.find_latest_valid()
        if start is None or start.step != newest or passed_over:
            return f"found {start}, passed over {passed_over}"
        scene.checkpoints.remove_incomplete()
        scene.engine.load(open_checkpoint(start.path, scene.world))
        if scene.state() != self._states[newest]:
            return "another state"
        step = newest + 1
        scene.advance(newest, step)
        scene.saving().save(Progress(step, step * self._samples), float(self._sign * step))
        kept = {step, newest, *([1] if self._sign > 0 else [])}
        left, wanted = sorted(os.listdir(self._folder)), ["best", *(f"step-{number:08d}" for number in sorted(kept))]
        best = os.readlink(self._folder / "best")
        is_right = best == f"step-{1 if self._sign > 0 else step:08d}"
        return None if left == wanted and is_right else f"left {left}, best {best}"


def _digest(folder: Path) -> dict[str, str]:
    """Return path -> hash of the files of the checkpoints."""
    files = [path for path in sorted(folder.glob("step-*/**/*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _in_fork(function: Callable[[], Any]) -> Any:
    """Return what the function returns in a fork of this process, as JSON; a text if it raised, hung or was killed."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            answer = json.dumps(function())
        except BaseException as error:
            answer = json.dumps(f"{type(error).__name__}: {error}")
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    end = time.monotonic() + LIMIT
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        if time.monotonic() > end:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            os.close(reader)
            return f"took longer than {LIMIT:g} s"
        time.sleep(0.001)
    with os.fdopen(reader, "rb") as pipe:
        content = pipe.read()
    return json.loads(content) if content else "killed"


def sweep_all(every: int, errors: tuple[tuple[str, int], ...] = ERRORS, sign: int = 1) -> tuple[int, list[Sweep]]:
    """Return the number of file calls of a save, and the sweeps of these errors."""
    with tempfile.TemporaryDirectory() as scratch:
        library = build_library(Path(scratch))
        with fork_server_with(library, "torch._dynamo", "tests.faults.save_steps") as server:
            how = {"folder": f"{scratch}/run", "sign": sign, "every": every, "errors": [*errors]}
            (ended,) = server("tests.faults.file_errors:sweep_save", 1, 7200.0, **how)
    calls, sweeps = ended.answer
    return calls, sweeps


PARTS = (
    ("The best checkpoint is the first one.", 1, 1, ERRORS),
    ("The same with other faults, of every fifth call.", 1, 5, MORE_ERRORS),
    ("Each checkpoint is the best; every fifth call.", -1, 5, ERRORS[:7]),
)
"""(title, sign, every, errors)."""


def main() -> None:
    stride = int(sys.argv[1]) if sys.argv[1:] else 1
    kinds, trials, faults = (UNHARMED, SECOND_TRY, CLEANUP_LATER, ENDED), 0, list[str]()
    for title, sign, every, errors in PARTS:
        print(f"{title}\n\n| error | calls | trials | {' | '.join(kinds)} | faults |\n|{'---|' * (len(kinds) + 4)}")
        for error in errors:
            calls, (sweep,) = sweep_all(every * stride, (error,), sign)
            total = sum(sweep.outcomes.values())
            cells = (sweep.name, calls, total, *(sweep.outcomes[kind] for kind in kinds), len(sweep.faults))
            print(f"| {' | '.join(map(str, cells))} |", flush=True)
            trials += total
            faults += sweep.faults
        print()
    print(f"{trials} trials, {len(faults)} faults", *faults, sep="\n")


if __name__ == "__main__":
    main()

"""Faults of a save, and what a new start finds after each.

Whatever happens, a new start must find on all ranks the newest checkpoint that is whole, its state that of one step,
say what it passed over and removed, lose no more than one save interval, go on as if nothing had happened, and leave
nothing half done behind. `Faults.judge` holds that; here is only what may go wrong.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.training.state.manifest import MANIFEST_FORMAT, find_checkpoints
from tests.faults.fork_server import Ended, ForkServer
from tests.faults.save_steps import BEFORE, SAMPLES, Saved, Started
from tests.vocabulary import read_jsonl

SCENE = "tests.faults.save_steps:"
WARM = ("torch._dynamo", "tests.faults.save_steps")
"""Modules that a save needs, imported before the fork."""
LIMIT = 30.0
"""Seconds for a fault and for the start after it."""
MORE = 40
"""Steps after those that are known."""
NEW = f"step-{BEFORE + 1:08d}"
LAST = f"step-{BEFORE:08d}"
COMMITTED = f"rename {NEW}.partial"
"""The change that makes the checkpoint under the fault exist."""


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    what: str
    whom: str
    found: int
    """Step that the new start went on from."""
    said: str
    lost: int
    """Steps of training; one save interval is one step."""
    seconds: float


class Faults:
    """A run that was saved at every step up to BEFORE, and copies of it that suffer faults in the next save."""

    def __init__(self, fork_server: ForkServer, root: Path, engine: str = "torch") -> None:
        self._call, self._root, self._engine = fork_server, root, engine
        self._numbers = itertools.count()
        ended = fork_server(f"{SCENE}unbroken", folder=str(root / "healthy"), steps=BEFORE + MORE, engine=engine)
        self.states: dict[int, str] = ended[0].answer
        """Step -> hash of what all ranks hold after it, in a run that nothing happened to."""

    def copy(self) -> Path:
        """The run, before the fault."""
        folder = self._root / f"fault-{next(self._numbers)}"
        shutil.copytree(self._root / "healthy", folder, symlinks=True)
        return folder

    def points(self, **how: Any) -> list[list[str]]:
        """The points of a save that nothing happens to, by rank."""
        ended = self._save(self.copy(), **how)
        assert [one.answer.error for one in ended] == [None, None]
        return [one.answer.points for one in ended]

    def kill(self, rank: int, points: list[str], at: int, **how: Any) -> Outcome:
        """SIGKILL at a point. The rank that is left ends with an error that says what happened."""
        begin, folder = time.monotonic(), self.copy()
        ended = self._save(folder, at=(rank, at), **how)
        assert ended[rank].code == -9, f"rank {rank} outlived {points[at]}"
        left: Saved = ended[1 - rank].answer
        assert left.ours, left.error
        assert "another process has ended" in (left.error or ""), left.error
        found = BEFORE + 1 if COMMITTED in points[:at] or how.get("again") else BEFORE
        started = self.judge(folder, found)
        assert not started.passed_over
        return Outcome(
            f"SIGKILL: {points[at]}", f"rank {rank}", found, _said(started), BEFORE + 1 - found, _since(begin)
        )

    def kill_both(self, delay: float) -> Outcome:
        """SIGALRM, which nothing handles, so many seconds after both began to save, step after step."""
        begin, folder = time.monotonic(), self.copy()
        ended = self._call(f"{SCENE}save_on", folder=str(folder), engine=self._engine, limit=LIMIT, delay=delay)
        assert [one.code for one in ended] == [-14, -14]
        whole = [info.step for info in find_checkpoints(folder / "checkpoints", check_hashes=True) if info.is_complete]
        started = self.judge(folder, whole[0])
        return Outcome(
            f"killed after {delay * 1000:.0f} ms of saving", "both", whole[0], _said(started), 1, _since(begin)
        )

    def full_disk(self, disk: Path, act: str, rank: int, point: str | None) -> Outcome:
        """The disk is full from a point of one rank on. All ranks raise alike, and what is half written is removed."""
        begin = time.monotonic()
        shutil.copytree(self._root / "healthy", disk, symlinks=True, dirs_exist_ok=True)
        at = -1 if point is None else self.points()[rank].index(point)
        ended = self._save(disk, at=(rank, at), act=act)
        errors = {one.answer.error for one in ended}
        (error,) = errors  # the same on both
        assert error.startswith("CheckpointError: "), error
        assert "the older checkpoints in" in error, error
        assert not list((disk / "checkpoints").glob("*.partial"))
        (disk / "ballast").unlink(missing_ok=True)
        started = self.judge(disk, BEFORE)
        assert (started.passed_over, started.removed) == ({}, [])
        where = "before the save" if point is None else point
        said = error.removeprefix("CheckpointError: ").replace(str(disk / "checkpoints"), "checkpoints")
        return Outcome(f"{_disk(act)}: {where}", f"rank {rank}", BEFORE, said.split(";")[0], 1, _since(begin))

    def pass_by(self, number: int, rank: int, points: list[str], point: str) -> Outcome:
        """A call of one rank fails once, by an error that may pass. Both ranks write the checkpoint again."""
        begin, folder = time.monotonic(), self.copy()
        ended = self._save(folder, at=(rank, points.index(point)), act=f"raise {number}")
        assert [one.answer.error for one in ended] == [None, None]
        assert any(row["event"] == "save_retried" for row in read_jsonl(folder / "events.jsonl"))
        started = self.judge(folder, BEFORE + 1)
        assert (started.passed_over, started.removed) == ({}, [])
        return Outcome(f"{errno.errorcode[number]}: {point}", f"rank {rank}", BEFORE + 1, "nothing", 0, _since(begin))

    def damage(self, what: str, harm: Callable[[Path], None], found: int, passed_over: str | None = None) -> Outcome:
        """A whole checkpoint is damaged. `passed_over`: how the reason begins; None where none is passed over."""
        begin, folder = time.monotonic(), self.copy()
        harm(folder / "checkpoints" / LAST)
        started = self.judge(folder, found)
        assert list(started.passed_over) == ([] if passed_over is None else [LAST]), started.passed_over
        for why in started.passed_over.values():
            assert why.removeprefix("damaged: ").startswith(passed_over or ""), why
        return Outcome(what, "the newest", found, _said(started), BEFORE - found, _since(begin))

    def judge(self, folder: Path, found: int) -> Started:
        """A new start finds this step on all ranks and goes on as a run that nothing happened to."""
        ended = self._call(f"{SCENE}start_anew", folder=str(folder), engine=self._engine, limit=LIMIT)
        first, second = (one.answer for one in ended)
        assert isinstance(first, Started), first
        assert [one.code for one in ended] == [0, 0]
        assert (first.step, first.samples, first.state) == (second.step, second.samples, second.state)
        assert (first.step, first.samples, first.state) == (found, found * SAMPLES, self.states[found])
        assert first.later == {step: self.states[step] for step in first.later}, "later steps differ"
        lasting = [name for name in first.left if not name.startswith("superseded-")]
        assert lasting == ["best", *(f"step-{step:08d}" for step in sorted(first.later))], lasting
        shutil.rmtree(folder, ignore_errors=True)
        return first

    def _save(self, folder: Path, **how: Any) -> list[Ended]:
        return self._call(f"{SCENE}save", folder=str(folder), engine=self._engine, limit=LIMIT, **how)


def _said(started: Started) -> str:
    told = [f"removed {name}" for name in started.removed]
    told += [f"passed over {name}: {why.removeprefix('damaged: ')}" for name, why in started.passed_over.items()]
    return ", ".join(told) or "nothing"


def _since(begin: float) -> float:
    return round(time.monotonic() - begin, 2)


def _disk(act: str) -> str:
    kind, _, size = act.partition(" ")
    return f"disk full but for {size} bytes" if kind == "fill" else f"no file over {size} bytes"


@contextmanager
def small_disk(folder: Path, options: str = "size=2m") -> Iterator[Path]:
    """A file system of its own that is easily filled. Raises PermissionError where none may be mounted."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise PermissionError(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


SHARDS = tuple(f"state/rank-{rank:05d}-000.safetensors" for rank in (0, 1))
KINDS = (
    *SHARDS,
    "state/about.json",
    "state/index.json",
    "state/index.npy",
    "progress.json",
    "run.json",
    "MANIFEST.json",
)
"""A file of each kind."""


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    """One bit, in a digit where there is one that counts."""
    content = bytearray(path.read_bytes())
    counted = re.search(rb'"samples": \d+', content)
    content[counted.end() - 1 if counted else -7] ^= 1
    path.write_bytes(content)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def _empty(path: Path) -> None:
    os.truncate(path, 0)


WAYS: dict[str, Callable[[Path], None]] = {
    "cut in half": _cut, "emptied": _empty, "a bit flipped": _flip, "a byte added": _grow, "removed": Path.unlink,
}  # fmt: skip


def reason(name: str, way: str) -> str:
    """How the reason begins for a file and what happened to it."""
    if name == "MANIFEST.json":
        return {"removed": "MANIFEST.json is missing", "a bit flipped": "MANIFEST.json and run.json differ"}.get(
            way, "MANIFEST.json is not readable"
        )
    return {"removed": f"{name} is missing", "a bit flipped": f"{name} is not what was written"}.get(
        way, f"{name} has "
    )


def _swap(name: str) -> Callable[[Path], None]:
    """The file of the checkpoint before, in place of its own."""

    def act(path: Path) -> None:
        (path / name).write_bytes((path.with_name(f"step-{BEFORE - 1:08d}") / name).read_bytes())

    return act


def _rename_older(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name(f"step-{BEFORE - 1:08d}"), path)


def _link(name: str, to: str) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        (path.parent / name).unlink(missing_ok=True)
        (path.parent / name).symlink_to(to)

    return act


def _half_removed(path: Path) -> None:
    shutil.copytree(path, path.with_name(f"{NEW}.partial"))


def _old(path: Path) -> None:
    path.rename(path.with_suffix(".old"))


def _state_is_gone(path: Path) -> None:
    shutil.rmtree(path / "state")
    (path / "state").symlink_to("nowhere")


def _is_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_bytes(b"")


def _manifest(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        manifest = json.loads((path / "MANIFEST.json").read_text())
        change(manifest)
        (path / "MANIFEST.json").write_text(json.dumps(manifest))

    return harm


OTHERS: dict[str, tuple[Callable[[Path], None], int, str | None]] = {
    "rank 0's shard is that of the step before": (_swap(SHARDS[0]), BEFORE - 1, SHARDS[0]),
    "rank 1's shard is that of the step before": (_swap(SHARDS[1]), BEFORE - 1, SHARDS[1]),
    "MANIFEST.json is that of the step before": (_swap("MANIFEST.json"), BEFORE - 1, "MANIFEST.json is of step"),
    "MANIFEST.json without a format": (_manifest(lambda made: made.pop("format")), BEFORE - 1, "of an earlier version of dstrain"),
    "MANIFEST.json of an earlier format": (_manifest(lambda made: made.update(format=1)), BEFORE - 1, "of an earlier version of dstrain (format 1)"),
    "MANIFEST.json of a later format": (_manifest(lambda made: made.update(format=MANIFEST_FORMAT + 1)), BEFORE - 1, "of a later version of dstrain"),
    "the checkpoint before under its name": (_rename_older, BEFORE - 1, "MANIFEST.json is of step"),
    "state/ is a link to nowhere": (_state_is_gone, BEFORE - 1, "state/about.json is missing"),
    "its folder is a file": (_is_a_file, BEFORE - 1, ""),
    "its folder is empty": (lambda path: shutil.rmtree(path) or path.mkdir(), BEFORE - 1, "MANIFEST.json is missing"),
    "best leads nowhere": (_link("best", "step-00000099"), BEFORE, None),
    "best leads to itself": (_link("best", "best"), BEFORE, None),
    "best is missing": (lambda path: (path.parent / "best").unlink(), BEFORE, None),
    "best.new was left": (_link("best.new", LAST), BEFORE, None),
    "it is called .old, its successor never came": (_old, BEFORE, None),
    "a whole copy called .partial": (_half_removed, BEFORE, None),
}  # fmt: skip
"""What -> (harm, step found, how the reason begins)."""

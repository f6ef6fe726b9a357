"""All faults, one after the other."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.faults.faults import KINDS, LAST, NEW, OTHERS, SHARDS, WAYS, Faults, Outcome, reason, small_disk
from tests.faults.save_steps import BEFORE

Row = Callable[[], Outcome]

FULL: tuple[tuple[str, int, str | None], ...] = (
    ("fill 0", 0, None),
    ("fill 40000", 0, None),
    ("fill 0", 0, f"mkdir {NEW}.partial"),
    ("fill 8192", 0, f"open {NEW}.partial/{SHARDS[0]}"),
    ("fill 0", 0, f"open {NEW}.partial/state/about.json"),
    ("fill 0", 0, f"open {NEW}.partial/run.json"),
    ("fill 4096", 0, f"open {NEW}.partial/run.json"),
    ("fill 0", 0, f"open {NEW}.partial/MANIFEST.json"),
    ("fill 0", 1, f"open {NEW}.partial/{SHARDS[1]}"),
    ("fill 16384", 1, f"open {NEW}.partial/{SHARDS[1]}"),
    ("limit 1000", 0, f"open {NEW}.partial/{SHARDS[0]}"),
    ("limit 20000", 1, f"open {NEW}.partial/{SHARDS[1]}"),
    ("limit 100", 0, f"open {NEW}.partial/MANIFEST.json"),
)
"""(what, rank, point)."""


def kills(faults: Faults, **how: object) -> Iterator[Row]:
    """At every point of both ranks."""
    for rank, points in enumerate(faults.points(**how)):
        for at in range(len(points)):
            yield lambda rank=rank, points=points, at=at: faults.kill(rank, points, at, **how)


def some_kills(faults: Faults, labels: tuple[tuple[int, str], ...], **how: object) -> Iterator[Row]:
    """At these points, of (rank, label)."""
    points = faults.points(**how)
    for rank, label in labels:
        yield lambda rank=rank, label=label: faults.kill(rank, points[rank], points[rank].index(label), **how)


def replacing(faults: Faults) -> Iterator[Row]:
    """At the points that a save has only where its step is there already."""
    usual = {label for points in faults.points() for label in points}
    for rank, points in enumerate(faults.points(again=True)):
        for at, label in enumerate(points):
            if label not in usual or label.startswith("rename"):
                yield lambda rank=rank, points=points, at=at: faults.kill(rank, points, at, again=True)


FEW = (
    (0, f"half of write 2 to {NEW}.partial/{SHARDS[0]}"),
    (0, f"fsync {NEW}.partial/MANIFEST.json"),
    (0, f"rename {NEW}.partial"),
    (0, "fsync ."),
    (1, f"half of write 1 to {NEW}.partial/{SHARDS[1]}"),
    (1, f"fsync {NEW}.partial/{SHARDS[1]}"),
)
"""Points that stand for the others."""


def full_disks(faults: Faults, root: Path) -> Iterator[Row]:
    """Raises PermissionError where no file system may be mounted."""
    for number, (act, rank, point) in enumerate(FULL):

        def row(number: int = number, act: str = act, rank: int = rank, point: str | None = point) -> Outcome:
            with small_disk(root / f"disk-{number}") as disk:
                return faults.full_disk(disk, act, rank, point)

        yield row


PASSING: tuple[tuple[int, int, str], ...] = (
    (errno.ESTALE, 1, f"open {NEW}.partial/{SHARDS[1]}"),
    (errno.EIO, 0, f"fsync {NEW}.partial/{SHARDS[0]}"),
    (errno.ETIMEDOUT, 0, f"open {NEW}.partial/MANIFEST.json"),
    (errno.EAGAIN, 0, f"rename {NEW}.partial"),
)
"""(error, rank, point)."""


def passing_errors(faults: Faults) -> Iterator[Row]:
    """Of one call each."""
    points = faults.points()
    for number, rank, point in PASSING:
        yield lambda number=number, rank=rank, point=point: faults.pass_by(number, rank, points[rank], point)


def damages(faults: Faults) -> Iterator[Row]:
    """Of a file of each kind in each way, and some of folders and links."""
    for name in KINDS:
        for way, harm in WAYS.items():
            yield lambda name=name, way=way, harm=harm: faults.damage(
                f"{name}: {way}", lambda path: harm(path / name), BEFORE - 1, reason(name, way)
            )
    for what, (harm, found, why) in OTHERS.items():
        yield lambda what=what, harm=harm, found=found, why=why: faults.damage(what, harm, found, why)


__all__ = ["FEW", "LAST", "damages", "full_disks", "kills", "passing_errors", "replacing", "some_kills"]

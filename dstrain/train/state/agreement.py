"""Agreement of all ranks on errors: an exception on one rank is raised on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from dstrain.distributed.world import Ranks
from dstrain.errors import CheckpointError, RunFolderLockedError

T = TypeVar("T")


def gather_or_raise(
    world: Ranks, value: T, error: Exception | None, summarize: Callable[[list[str]], str] = lambda faults: faults[0]
) -> list[T]:
    """Return every rank's value, by rank; or raise on all ranks if one has an error, which they would wait for. Collective.

    Raises RunFolderLockedError if that is the error of any rank, else CheckpointError with `summarize(faults)`, of
    faults such as `rank 3: OSError: ...`.
    """
    kind = "" if error is None or isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    fault = None if error is None else f"{kind}{error}"
    taken = str(error) if isinstance(error, RunFolderLockedError) else ""
    outcomes = world.gather((value, fault, taken))
    if taken := next((text for _, _, text in outcomes if text), ""):
        raise RunFolderLockedError(taken) from error
    faults = [f"rank {rank}: {text}" for rank, (_, text, _) in enumerate(outcomes) if text is not None]
    if faults:
        raise CheckpointError(summarize(faults)) from error
    return [value for value, _, _ in outcomes]


@contextmanager
def raise_on_all_ranks(world: Ranks) -> Iterator[None]:
    """Raise CheckpointError on all ranks if the body fails on one. Collective."""
    error = None
    try:
        yield
    except Exception as caught:  # of any kind: the other ranks must learn of it
        error = caught
    gather_or_raise(world, None, error)

"""Message of a command that ran out of memory, with what to change on its command line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dstrain.errors import OutOfMemoryError
from dstrain.report.allocation_errors import find_allocation_failure

SMALLER_PASSES = {"generate": "ask for fewer prompts per pass (--batch 1)"}
"""Command -> what makes its passes smaller; the others take the recipe's micro-batch."""


@contextlib.contextmanager
def explain_out_of_memory(command: str) -> Iterator[None]:
    """Raise OutOfMemoryError, with what helps `dstrain COMMAND`, for a failed allocation inside."""
    try:
        yield
    except Exception as error:
        failure = find_allocation_failure(error)
        if failure is None or isinstance(error, OutOfMemoryError):
            raise
        smaller = SMALLER_PASSES.get(command, "make its passes smaller (--set batch.micro=1)")
        shards = "or divide the weights among processes (--ds-config zero3 --num-gpus N)"
        if failure.place == "host":
            shards = "or start fewer processes on this host (--num-gpus N)"
        raise OutOfMemoryError(
            f"dstrain {command}: {failure.describe()} could not be allocated; {smaller}, {shards}"
        ) from error

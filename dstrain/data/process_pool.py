"""Pool of processes that encode records; results are ordered as from a single process."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from dstrain.data.records import BadRow, ColumnReport, Example
from dstrain.data.token_store import to_stored
from dstrain.errors import DstrainError, RunError, find_user_frame
from dstrain.process_setup import set_parent_death_signal

_PARALLELISM_VARIABLE = "TOKENIZERS_PARALLELISM"


@dataclass
class EncodedChunk:
    """The encoded examples and the faults of consecutive records."""

    examples: list[Example] = field(default_factory=list)
    bad: list[BadRow] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    """Name of a cut -> examples that were cut that way."""
    columns: dict[str, ColumnReport] = field(default_factory=dict)
    """File -> its columns, counted over these records."""


RecordRanges = Sequence[tuple[int, int]]


def map_chunks(
    encode: Callable[[int, int], EncodedChunk], ranges: RecordRanges, processes: int
) -> Iterator[EncodedChunk]:
    """Yield `encode(start, stop)` of each range, in order; process k of n takes ranges k, k + n, k + 2n, ...

    The processes are forked here: a fork inherits what cannot be pickled. Each has its own pipe, so that its death
    is noticed even while it writes; with one queue for all, as in concurrent.futures, an incomplete message blocks
    the reader forever. Raises what `encode` raises, and RunError where a process is killed.
    """
    count = min(processes, len(ranges))
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        with _disable_tokenizer_threads():
            for which in range(count):
                workers.append(_start_worker(encode, ranges[which::count]))
        for at in range(len(ranges)):
            worker, results = workers[at % count]
            try:
                # The kernel closes a dead worker's end, which ends the wait.
                found = results.recv()
            except (EOFError, OSError) as fault:
                raise RunError(_describe_exit(worker, count)) from fault
            if isinstance(found, BaseException):
                raise found
            yield found
    finally:
        for worker, results in workers:
            worker.kill()  # a no-op where it has ended; nothing of it is needed any more
            results.close()
        for worker, _ in workers:
            worker.join(10.0)


def _start_worker(encode: Callable[[int, int], EncodedChunk], ranges: RecordRanges) -> tuple[BaseProcess, Connection]:
    """Fork a worker. Returns it with the read end of its pipe; only the worker holds the write end."""
    # Closures and open readers reach the worker by the fork; spawn would have to pickle them.
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    worker = context.Process(target=_worker_main, args=(encode, ranges, writer, os.getpid()), daemon=True)
    worker.start()
    # With a write end open here too, the reader would never see the end of the pipe.
    writer.close()
    return worker, reader


@contextmanager
def _disable_tokenizer_threads() -> Iterator[None]:
    """Context that disables the threads of the tokenizers library in processes forked inside it, where they would not run."""
    before = os.environ.get(_PARALLELISM_VARIABLE)
    os.environ[_PARALLELISM_VARIABLE] = "false"
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork in a process with threads; the children take no lock that a thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM_VARIABLE]
        else:
            os.environ[_PARALLELISM_VARIABLE] = before


def _worker_main(
    encode: Callable[[int, int], EncodedChunk], ranges: RecordRanges, results: Connection, parent: int
) -> None:
    """Encode ranges in a forked process, without the parent's signal handlers: SIGINT is ignored, the parent kills it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    set_parent_death_signal()
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
    try:
        for span in ranges:
            chunk = encode(*span)
            # As arrays, which are fast to pickle.
            results.send(replace(chunk, examples=to_stored(chunk.examples)))
    except Exception as fault:
        if not isinstance(fault, DstrainError):
            fault.add_note(traceback.format_exc())
            fault.user_frame = find_user_frame(fault)  # type: ignore[attr-defined]  # the traceback stays here
        try:
            results.send(fault)
        except (TypeError, AttributeError, pickle.PicklingError):  # the exception holds objects that cannot be pickled
            results.send(RuntimeError(f"{fault!r}\n" + "\n".join(getattr(fault, "__notes__", ()))))


def _describe_exit(worker: BaseProcess, count: int) -> str:
    """Return the error message for a worker that ended before its results were complete."""
    worker.join(5.0)
    code = worker.exitcode
    how = "its pipe broke" if code is None else f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    fix = "if memory ran out, free some, or encode with one process: `taskset -c 0 dstrain prepare RECIPE`"
    return f"process {worker.pid}, one of {count} that encode records, was killed ({how}); {fix}"

"""Records encoded by several processes of this host: in order, and the same to the byte as one process makes them."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

from dstrain.errors import DstrainError, RunError

FEWEST = 4000
"""Records below which one process is as soon ready as several."""
AHEAD = 4
"""Results of each process that may wait to be read."""
_PARALLEL = "TOKENIZERS_PARALLELISM"

Example = Mapping[str, Any]


@dataclass
class Piece:
    """What became of some records that follow one another."""

    examples: list[Example] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)
    """Index of a record, and why it cannot be used."""
    cuts: dict[str, int] = field(default_factory=dict)
    """Name of a cut -> examples that were cut that way."""


@dataclass(frozen=True)
class Processes:
    """How many processes encode, and what each of them does first."""

    count: int = 1
    begin: Callable[[], None] | None = None
    """Such as asking the kernel to end it with its parent."""

    def for_records(self, records: int) -> int:
        """How many are worth it. A fork keeps what cannot be pickled, and is safe on Linux alone."""
        can = sys.platform == "linux" and not multiprocessing.current_process().daemon  # which may have no children
        return self.count if can and records >= FEWEST else 1


ALONE = Processes()
Packed = tuple[dict[str, Any], list[tuple[int, str]], dict[str, int]]
"""Columns of a piece's examples, its bad records and its cuts."""
Spans = Sequence[tuple[int, int]]


def map_pieces(encode: Callable[[int, int], Piece], spans: Spans, processes: Processes) -> Iterator[Piece]:
    """`encode(start, stop)` of each span, in order; process k of n, forked here, takes spans k, k + n, k + 2n ...

    Each process has a pipe of its own, so that its death is seen even while it writes: behind one queue for all, as
    concurrent.futures has it, a message that breaks off blocks its reader for ever. Raises what `encode` raises, and
    RunError where a process is ended from outside.
    """
    count = min(processes.count, len(spans))
    workers: list[tuple[BaseProcess, Connection]] = []
    try:
        with _forking():
            for which in range(count):
                workers.append(_start(encode, spans[which::count], processes.begin))
        for at in range(len(spans)):
            worker, results = workers[at % count]
            try:
                found = results.recv()
            except (EOFError, OSError) as fault:
                raise RunError(_how_it_ended(worker, count)) from fault
            if isinstance(found, BaseException):
                raise found
            yield _unpacked(found)
    finally:
        for worker, results in workers:
            worker.kill()  # which has nothing more to say
            results.close()
        for worker, _ in workers:
            worker.join(10.0)


def _start(
    encode: Callable[[int, int], Piece], spans: Spans, begin: Callable[[], None] | None
) -> tuple[BaseProcess, Connection]:
    """A process and the end of its pipe that is read; the other end is the process's alone."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(encode, spans, begin, (writer, os.getpid())), daemon=True)
    worker.start()
    writer.close()
    return worker, reader


@contextmanager
def _forking() -> Iterator[None]:
    """The tokenizers library is told that its threads are not wanted in what is forked now, where none of them would run."""
    before = os.environ.get(_PARALLEL)
    os.environ[_PARALLEL] = "false"
    try:
        with warnings.catch_warnings():
            # Python 3.12 warns of a fork beside threads; the children tokenise, and take no lock that a thread may hold.
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if before is None:
            del os.environ[_PARALLEL]
        else:
            os.environ[_PARALLEL] = before


def _work(
    encode: Callable[[int, int], Piece], spans: Spans, begin: Callable[[], None] | None, towards: tuple[Connection, int]
) -> None:
    """What a forked process does. The handlers of signals are the parent's, which ends this process by itself."""
    results, parent = towards
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if begin is not None:
        begin()
    if os.getppid() != parent:
        os._exit(1)
    waiting: queue.Queue[Packed | BaseException | None] = queue.Queue(AHEAD)
    sender = threading.Thread(target=_send, args=(waiting, results), daemon=True)
    sender.start()
    try:
        for span in spans:
            waiting.put(_packed(encode(*span)))
    except Exception as fault:
        if not isinstance(fault, DstrainError):
            fault.add_note(traceback.format_exc())
        waiting.put(fault)
    waiting.put(None)
    sender.join()


def _send(waiting: queue.Queue[Packed | BaseException | None], results: Connection) -> None:
    while (found := waiting.get()) is not None:
        try:
            results.send(found)
        except (TypeError, AttributeError, pickle.PicklingError):  # an exception that holds what cannot be sent
            results.send(RuntimeError(f"{found!r}\n" + "\n".join(getattr(found, "__notes__", ()))))


def _packed(piece: Piece) -> Packed:
    """A piece as few arrays: a column of sequences as their values and lengths."""
    columns: dict[str, Any] = {}
    for name, value in (piece.examples[0] if piece.examples else {}).items():
        values = [example[name] for example in piece.examples]
        if isinstance(value, list | tuple | np.ndarray):
            rows = [np.asarray(row, dtype=np.int32) for row in values]
            columns[name] = np.concatenate(rows), np.cumsum([len(row) for row in rows])[:-1]
        else:
            columns[name] = values
    odd = next((at for at, example in enumerate(piece.examples) if example.keys() != columns.keys()), None)
    assert odd is None, (
        f"every example has the same columns: {sorted(columns.keys() ^ piece.examples[odd or 0].keys())}"
    )
    return columns, piece.bad, piece.cuts


def _unpacked(packed: Packed) -> Piece:
    columns, bad, cuts = packed
    each = {name: np.split(*value) if isinstance(value, tuple) else value for name, value in columns.items()}
    return Piece([dict(zip(each, row, strict=True)) for row in zip(*each.values(), strict=True)], bad, cuts)


def _how_it_ended(worker: BaseProcess, count: int) -> str:
    """Why a process has no more results."""
    worker.join(5.0)
    code = worker.exitcode
    how = "its pipe broke" if code is None else f"exit code {code}" if code >= 0 else signal.Signals(-code).name
    mend = "where memory ran out, free some, or have one process make them: `taskset -c 0 dstrain prepare RECIPE`"
    return f"process {worker.pid}, one of {count} that make tokens, was ended ({how}); {mend}"

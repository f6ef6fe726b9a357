"""The roll call: each rank leaves a word in the run folder when one of them is missed, and the missing one is named.

    .workers/roll-TOKEN              grows by a byte with each call; TOKEN is this launch's
    .workers/word-TOKEN-00000.json   what a rank last said of itself

A rank answers from a thread of its own (`Watchdog`), also while it waits in a collective. Where one does not answer,
it has ended, is stopped, or its host is out of reach."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from dstrain.distributed.collective_log import LEDGER
from dstrain.distributed.world import World
from dstrain.launch.processes import process_state
from dstrain.launch.worker import LAUNCH_ID, read_records, record_folder
from dstrain.train.health.diagnosis import FINAL, Roll, Verdict, Word, judge

T = TypeVar("T")

PATIENCE_SECONDS = 5.0
"""How long the words of the others are waited for; a rank known to have ended is not."""
_READ_SECONDS = 0.1
_SURE_SECONDS = {"gone": _READ_SECONDS, "T": 1.0}
"""By the kernel's word for a process of this host that gives none itself."""


class RollCall:
    """Call the roll of a launch's ranks, answer it, and judge what came. Files that cannot be used end nothing."""

    def __init__(self, run_dir: Path, world: World) -> None:
        """Collective."""
        self.rank, self.size, self._run_dir = world.rank, world.size, run_dir
        self._folder = record_folder(run_dir)
        self._seen, self._last, self._lock = 0, ("ready", ""), threading.Lock()
        token = secrets.token_hex(4)
        if world.rank == 0:
            with contextlib.suppress(OSError):
                self._clear()
                self._folder.joinpath(f"roll-{token}").write_bytes(b"")
        self._token = str(world.broadcast(token))
        self._roll = self._folder / f"roll-{self._token}"
        own = (socket.gethostname(), _place(), os.getpid())
        self._ranks = {self.rank: Word(rank=self.rank, host=own[0], place=own[1], pid=own[2])}
        with contextlib.suppress(OSError):
            self._say("ready", "")  # a network file system may hide a file that was looked for before it was there
        self._ranks |= {
            rank: Word(rank=rank, host=host, place=place, pid=pid)
            for rank, (host, place, pid) in enumerate(world.gather(own))
        }

    def _clear(self) -> None:
        """Remove what earlier launches left."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for old in (*self._folder.glob("word-*"), *self._folder.glob("roll-*")):
            old.unlink(missing_ok=True)

    def leave(self, kind: Literal["lost", "failed", "stopped", "done"], text: str = "") -> None:
        """Say a last word, with which the others need not wait for another."""
        within(lambda: self._say(kind, text), None, PATIENCE_SECONDS)

    def answer(self) -> None:
        """Say where this rank is, if the roll was called since it last did."""
        with contextlib.suppress(OSError):
            size = self._size()
            if size > self._seen:
                self._seen = size
                self._say(*self._last)

    def name(self, why: str, patience: float = PATIENCE_SECONDS) -> Verdict:
        """Call the roll and say who is missing; `why`: what the error said. Never raises, and never hangs."""
        return within(lambda: judge(self._call(why, patience)), Verdict((), unnamed(why)), patience + PATIENCE_SECONDS)

    def lowest(self, missing: tuple[int, ...]) -> bool:
        """Whether this rank is the one to speak for all."""
        return self.rank == min(set(range(self.size)) - set(missing), default=self.rank)

    def _call(self, why: str, patience: float) -> Roll:
        descriptor = os.open(self._roll, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, b".")
        self._seen = calls = os.fstat(descriptor).st_size
        os.close(descriptor)
        self._say("lost" if why else self._last[0], why)
        words, answered, states = dict(self._ranks), frozenset[int](), dict[int, str]()
        began = time.monotonic()
        while True:
            words |= {rank: word for rank in words if rank not in answered and (word := self._read(rank)) is not None}
            answered = frozenset(rank for rank, word in words.items() if word.kind in FINAL or word.seen >= calls)
            states = {rank: self._state(words[rank]) for rank in words if rank not in answered}
            waited = time.monotonic() - began
            sure = max((_SURE_SECONDS.get(state, patience) for state in states.values()), default=0.0)
            if waited > min(sure, patience) or not states:
                return Roll(words=words, answered=answered, states=states, why=why)
            time.sleep(_READ_SECONDS)

    def _state(self, word: Word) -> str:
        """What the kernel says of the rank's process; empty where it is another host's. A zombie has ended."""
        state = process_state(word.pid) if word.place == _place() else ""
        return "gone" if state == "Z" else state

    def _say(self, kind: Any, text: str) -> None:
        with self._lock:
            if self._last[0] in FINAL:
                kind, text = self._last
            self._last = (kind if kind in FINAL else "alive", text)
            now = {
                "quiet": round(LEDGER.quiet(), 3),
                "doing": LEDGER.doing,
                "step": LEDGER.step,
                "lines": LEDGER.told(),
            }
            said = {"kind": self._last[0], "seen": self._seen, "text": text}
            path = self._path(self.rank)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(asdict(self._ranks[self.rank]) | said | now), encoding="utf-8")
            os.replace(partial, path)

    def _read(self, rank: int) -> Word | None:
        """What a rank said; where it said nothing, what its record says of how it ended."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Word(**json.loads(self._path(rank).read_text(encoding="utf-8")))
        record = read_records(self._run_dir, os.environ.get(LAUNCH_ID, "")).get(rank)
        if record is None or record.pid != self._ranks[rank].pid or not record.exit:
            return None
        return replace(self._ranks[rank], kind="failed", text=record.error or f"it ended with code {record.exit}")

    def _size(self) -> int:
        """Opened, so that a network file system asks its server."""
        with self._roll.open("rb") as file:
            return os.fstat(file.fileno()).st_size

    def _path(self, rank: int) -> Path:
        return self._folder / f"word-{self._token}-{rank:05d}.json"


def within(act: Callable[[], T], otherwise: T, seconds: float) -> T:
    """What `act` gives; `otherwise` where it raises or takes longer: a file system may hang as well."""
    result = [otherwise]

    def run() -> None:
        with contextlib.suppress(Exception):
            result[0] = act()

    thread = threading.Thread(target=run, name="roll-call", daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0]


def unnamed(why: str) -> str:
    """What can be said where nobody can be asked."""
    return f"another process has ended or does not answer ({why}), its log says why"


@cache
def _place() -> str:
    """This host and pid namespace, where a pid means something."""
    try:
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()} {secrets.token_hex(4)}"  # no /proc: a pid says nothing

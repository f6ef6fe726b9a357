"""Rendezvous of all ranks over a store, with heartbeats while each prepares its data."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dstrain.cache import cache_root, check_once
from dstrain.distributed.store import find_connection_error, rendezvous_over_store, sign, verify
from dstrain.errors import (
    EXIT_FAILED,
    EXIT_USAGE,
    DstrainError,
    PeerFailureError,
    RunError,
    UsageError,
    escape_controls,
    first_names,
    one_line,
)
from dstrain.files import get_host_id
from dstrain.launch.command import PORT_FILE_ENV, describe_port_owner
from dstrain.launch.multihost.probe import hash_source_tree, iter_version_diffs, read_package_versions
from dstrain.launch.topology import Worker
from dstrain.train.health.diagnosis import call_with_timeout
from dstrain.train.health.signals import StoppedBySignal

# Keys of the store, after `dstrain/preparing/`:
#
#     beat/RANK       a number that grows while a rank is alive    failures   number of ranks that failed
#     data/RANK       names of the cache entries that it checked   failed     which rank failed first, and why
#     gather/N/RANK   a rank's value of the N-th `gather`          heard      number of ranks that know of it
#     ready           number of ranks that have prepared all
#
# Preparing may take minutes: tokenizing with a cold cache, or hashing weights. A collective would end
# with the run's timeout. Here a thread of each rank sends heartbeats, and only a rank without one for
# that long is given up.
ACTION = "preparing the data"
FIX_HINT = "fix the cause and start again: prepared data stays in the cache"
CODE_DIGEST_KEY = "code of dstrain, digest"
HEARTBEAT_SECONDS = 1.0
POLL_SECONDS = 0.2
FAILURE_WAIT_SECONDS = 5.0
"""Time for the others to learn of a rank's failure before it exits; the store ends with rank 0."""


class Rendezvous:
    """Context in which this rank prepares its data; it ends when all ranks have. A single process waits for nobody.

    Raises PeerFailureError if another rank does not connect, ends or stops sending heartbeats. If its
    preparation fails, raises UsageError or StoppedBySignal like that rank, else PeerFailureError.
    """

    def __init__(self, worker: Worker, timeout: timedelta) -> None:
        """Does not connect yet. Entering the context needs MASTER_ADDR and MASTER_PORT in the environment."""
        self.rank, self.size = worker.rank, worker.world_size
        self._num_gathers = 0
        self._timeout = timeout
        self._store: Any = None
        self._members: list[dict[str, Any]] = []
        self._failure: dict[str, Any] | None = None
        """Error that ended the preparation of another rank."""
        self._stop_event = threading.Event()
        self._heartbeat_thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    @property
    def store(self) -> Any:
        """Store to start the process group with; None for a single process."""
        return self._store

    def __enter__(self) -> Self:
        if self.size == 1:
            return self
        own: dict[str, Any] = {
            "host": socket.gethostname(),
            "place": f"{get_host_id()} {os.path.realpath(cache_root())}",
        }
        own["software"] = read_package_versions() | {CODE_DIGEST_KEY: hash_source_tree()}
        self._store, words = self._exchange_info(json.dumps(own))
        self._members = [_parse_member(word) for word in words]
        self._heartbeat_thread.start()
        try:
            self._check_versions()
        except BaseException as cause:
            self._report_failure(cause)
            self._stop_event.set()
            raise
        return self

    def _exchange_info(self, info: str) -> tuple[Any, list[str]]:
        """Call `rendezvous_over_store`; if rank 0's port is taken, name the process that holds it."""
        place = os.environ.get(PORT_FILE_ENV)
        try:
            return rendezvous_over_store(self._timeout, info, Path(place) if place else None)
        except PeerFailureError as error:
            port = os.environ.get("MASTER_PORT", "")
            if self.rank == 0 and "EADDRINUSE" in str(error.__cause__) and port.isdecimal():
                owner = describe_port_owner(int(port))
                what = f"the rendezvous port {port} of {socket.gethostname()} is already in use{owner}"
                fix = "rerun the command, with another --master-port if you gave one, or end that process"
                raise PeerFailureError(error.phase, what, fix) from error
            raise

    def _check_versions(self) -> None:
        """Raise UsageError, the same on every rank, if a rank on another host has other versions than rank 0."""
        first = self._members[0]
        for rank, member in enumerate(self._members):
            # Ranks of one host share an installation; another host may have an older one.
            if member["host"] != first["host"] and (
                differ := [*iter_version_diffs(first["software"], member["software"])]
            ):
                name, wanted, found = differ[0]
                raise UsageError(
                    f"{self._describe_rank(rank)} has {name} {found}, and {self._describe_rank(0)} has {wanted}; "
                    "install the same versions on every host"
                )

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        try:
            if exc is not None:
                self._report_failure(exc)
                return
            with self._translate_store_errors():
                self._store.add(_store_key("ready"), 1)
                self._wait_until(lambda: self._store.add(_store_key("ready"), 0) >= self.size)
        except BaseException as cause:
            self._report_failure(cause)
            raise
        finally:
            self._stop_event.set()

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Context that one process per host and cache enters first; the others do not check its entries again."""
        if self._store is None:
            with check_once():
                yield
            return
        places = [member["place"] for member in self._members]
        # The lowest rank of those with the same host and cache.
        first = places.index(places[self.rank])
        known: list[str] = []
        if first != self.rank:
            with self._translate_store_errors():
                self._wait_until(lambda: self._store.check([_store_key(f"data/{first}")]))
                known = _decode(self._store.get(_store_key(f"data/{first}")), list)
                with _foreign_values():
                    known = [os.fspath(folder) for folder in known]
        with check_once(known) as checked:
            yield
        if first == self.rank:
            with self._translate_store_errors():
                self._set_value(f"data/{self.rank}", sorted(checked))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank, on every rank. Collective.

        A rank that is still busy is waited for while its heartbeat counts. Raises PeerFailureError.
        """
        if self._store is None:
            return [value]
        kind, self._num_gathers = f"gather/{self._num_gathers}", self._num_gathers + 1
        with self._translate_store_errors():
            self._set_value(f"{kind}/{self.rank}", value)
            self._wait_until(lambda: self._store.check(self._rank_keys(kind)))
            return [_decode(content) for content in self._store.multi_get(self._rank_keys(kind))]

    def _send_heartbeats(self) -> None:
        """Send heartbeats and listen for the failure of another rank. Runs in a thread."""
        count = 0
        while not self._stop_event.is_set():
            count += 1
            try:
                self._store.set(_store_key(f"beat/{self.rank}"), str(count))
                if self._failure is None and self._store.add(_store_key("failures"), 0):
                    self._failure = _read_failure(self._store.get(_store_key("failed")))
                    self._store.add(_store_key("heard"), 1)
            except RuntimeError:  # rank 0 has ended, and the store with it: the main thread raises on its next request
                return
            self._stop_event.wait(self._heartbeat_interval())

    def _heartbeat_interval(self) -> float:
        return min(HEARTBEAT_SECONDS, self._timeout.total_seconds() / 10)

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for `is_done`. Raises if another rank failed or stopped sending heartbeats."""
        limit, look_at = self._timeout.total_seconds(), 0.0
        seen = [(b"", time.monotonic())] * self.size
        while not is_done():
            if self._failure is not None:
                raise self._to_exception(self._failure)
            if (now := time.monotonic()) >= look_at:
                if now - look_at > limit / 2:  # this process was suspended, and maybe the others with it
                    seen = [(beat, now) for beat, _ in seen]
                look_at = now + self._heartbeat_interval()
                beats = self._read_heartbeats()
                # Only this host's clock is used: a rank is alive while its count changes.
                seen = [(beat, now if beat != last else since) for beat, (last, since) in zip(beats, seen, strict=True)]
                silent = [self._describe_rank(rank) for rank, (_, since) in enumerate(seen) if now - since > limit]
                if silent:
                    names = first_names(silent, 8)
                    raise PeerFailureError(
                        ACTION, f"{names} sent no heartbeat for {limit:g} s (timeout_minutes)", FIX_HINT
                    )
            # Polled, not waited for with `store.wait`: that would not notice a failure of another rank.
            time.sleep(min(POLL_SECONDS, limit / 20))

    def _read_heartbeats(self) -> list[bytes]:
        """Return every rank's heartbeat; empty for a rank that has sent none, since `get` would block on it."""
        keys = self._rank_keys("beat")
        if self._store.check(keys):
            return list(self._store.multi_get(keys))
        return [self._store.get(key) if self._store.check([key]) else b"" for key in keys]

    def _report_failure(self, error: BaseException) -> None:
        """Publish why this rank ends, and give the others time to read it. Never raises."""
        if self._failure is not None:  # all ranks know of a failure already
            return
        known = isinstance(error, DstrainError)
        text = str(error) if known else one_line(f"{type(error).__name__}: {error}")
        failure = {"rank": self.rank, "exit": getattr(error, "exit_code", EXIT_FAILED), "error": text[:4000]}
        if isinstance(error, PeerFailureError):
            failure["error"] = text.removeprefix(f"{error.phase}: ").removesuffix(f"; {error.fix}")
        if isinstance(error, StoppedBySignal):
            failure["stopped"] = error.signal_name

        def publish() -> None:
            self._failure = failure
            self._set_value("failed", failure | {"lost": isinstance(error, PeerFailureError)})
            self._store.add(_store_key("failures"), 1)
            while not self._stop_event.is_set():
                if self._store.add(_store_key("heard"), 0) + self._store.add(_store_key("failures"), 0) >= self.size:
                    return
                time.sleep(0.05)

        call_with_timeout(publish, None, FAILURE_WAIT_SECONDS)

    def _to_exception(self, failure: Mapping[str, Any]) -> BaseException:
        """Return the failure of another rank as an exception with the same exit code."""
        if failure.get("stopped"):
            return StoppedBySignal(failure["stopped"])
        what = (
            failure["error"]
            if failure.get("lost")
            else f"{self._describe_rank(failure['rank'])} failed: {failure['error']}"
        )
        return UsageError(what) if failure["exit"] == EXIT_USAGE else PeerFailureError(ACTION, what, FIX_HINT)

    def _describe_rank(self, rank: int) -> str:
        return f"rank {rank} on {self._members[rank]['host']}" if 0 <= rank < self.size else f"rank {rank}"

    def _rank_keys(self, kind: str) -> list[str]:
        return [_store_key(f"{kind}/{rank}") for rank in range(self.size)]

    def _set_value(self, name: str, value: Any) -> None:
        self._store.set(_store_key(name), sign(json.dumps(value).encode()))

    @contextlib.contextmanager
    def _translate_store_errors(self) -> Iterator[None]:
        """Context for requests to the store. Raises PeerFailureError if it does not answer."""
        try:
            yield
        except RuntimeError as error:
            if self._failure is not None:  # read before rank 0 ended, and the store with it
                raise self._to_exception(self._failure) from error
            if (why := find_connection_error(error)) is None:
                raise
            at = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
            raise PeerFailureError(ACTION, f"rank 0 at {at} does not answer ({why}); see its log", FIX_HINT) from error


def _decode(content: bytes, kind: type = object) -> Any:
    """Return the JSON value, of type `kind`, of a rank. Raises RunError: the store has no authentication."""
    content = verify(content)
    with _foreign_values():
        if not isinstance(value := json.loads(content), kind):
            raise TypeError(type(value).__name__)
        return value


@contextlib.contextmanager
def _foreign_values() -> Iterator[None]:
    """Raise PeerFailureError for a value that no rank can have written: without a key, everyone can sign."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as fault:
        problem = "the rendezvous store holds a value that no rank wrote"
        raise PeerFailureError(ACTION, problem, "see docs/launch.md, Trust") from fault


def _parse_member(word: str) -> dict[str, Any]:
    """Return {"host", "place", "software"} of a rank."""
    with _foreign_values():
        found = json.loads(word)
        software = {str(name): one_line(version) for name, version in found["software"].items()}
        return {"host": one_line(found["host"]), "place": str(found["place"]), "software": software}


def _read_failure(content: bytes) -> dict[str, Any]:
    """Return {"rank", "exit", "error", ...} of a rank's failure."""
    try:
        found = _decode(content, dict)
        with _foreign_values():
            texts = {name: escape_controls(found[name]) for name in ("error", "stopped") if name in found}
            return {**found, **texts, "rank": int(found["rank"]), "exit": int(found["exit"]), "error": texts["error"]}
    except RunError as fault:
        return {"rank": 0, "exit": EXIT_FAILED, "error": str(fault), "lost": True}


def _store_key(name: str) -> str:
    return f"dstrain/preparing/{name}"

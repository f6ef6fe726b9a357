"""Rendezvous of all ranks over a store, which then lives as long as the run, and the preparation of their data."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

from dstrain.cache import cache_root, check_once
from dstrain.distributed.store import connect_store, find_connection_error, rendezvous_errors
from dstrain.errors import EXIT_FAILED, DstrainError, PeerFailureError, UsageError, first_names, one_line
from dstrain.files import get_host_id
from dstrain.launch.probe import describe_port_owner, hash_source_tree, iter_version_diffs, read_package_versions
from dstrain.launch.topology import Worker
from dstrain.training.health.diagnosis import Failure
from dstrain.training.health.liveness import Liveness, decode, foreign_values, get_value, set_value
from dstrain.training.health.signals import StoppedBySignal

# Keys of the store, after `dstrain/` (those of Liveness are in its module):
#
#     hello/RANK      a rank's host, cache and versions     gather/N/RANK, gather/N/count   values of the N-th `gather`
#     members         what rank 0 made of all of them       gather/N                        all of them, from rank 0
#     data/RANK       names of the cache entries that it checked
#
# Preparing may take minutes: tokenizing with a cold cache, or hashing weights. A collective would end with the run's
# timeout. Here only a rank without a heartbeat for that long is given up: rank 0 watches all, and all watch rank 0.
# Each rank sends and reads a constant number of messages a second, so that one store serves thousands of ranks.
ACTION = "preparing the data"
FIX_HINT = "fix the cause and start again: prepared data stays in the cache"
CODE_DIGEST_KEY = "code of dstrain, digest"
POLL_SECONDS = 0.2
POLLS_PER_SECOND = 5000
"""Polls of all ranks together; those of many ranks are further apart than POLL_SECONDS."""


class Rendezvous:
    """Context in which this rank prepares its data; it ends when all ranks have. A single process waits for nobody.

    Raises PeerFailureError if another rank does not connect, ends or stops sending heartbeats. If its preparation
    fails, raises UsageError or StoppedBySignal like that rank, else PeerFailureError.
    """

    liveness: Liveness
    """Heartbeats and failures of the ranks, from entering the context on; `peer_watchdog` ends them."""

    def __init__(self, worker: Worker, timeout: timedelta) -> None:
        """Does not connect yet. Entering the context needs MASTER_ADDR and MASTER_PORT in the environment."""
        self.rank, self.size = worker.rank, worker.world_size
        self._num_gathers = 0
        self._timeout = timeout
        self.store: Any = None
        """Store to start the process group with; None for a single process."""
        self._store: Any = None
        self._first_with_cache: list[int] = []
        """By rank: the lowest rank with the same host and cache."""

    def __enter__(self) -> Self:
        from torch.distributed import HashStore, PrefixStore

        if self.size == 1:
            self.liveness = Liveness(HashStore(), 0, [socket.gethostname()], self._timeout)
            self.liveness.start()
            return self
        try:
            self.store = connect_store(self._timeout)
        except OSError as error:  # on rank 0 alone: nobody else listens
            port, host = int(os.environ["MASTER_PORT"]), socket.gethostname()
            problem = f"rank 0 cannot listen on port {port} of {host} ({error.strerror or error})"
            if error.errno == errno.EADDRINUSE:
                problem = f"the rendezvous port {port} of {host} is already in use{describe_port_owner(port)}"
            fix = "rerun the command, with another --master-port if you gave one, or end that process"
            raise PeerFailureError("meeting the other processes", problem, fix) from error
        self._store = PrefixStore("dstrain", self.store)
        with rendezvous_errors(self._timeout), foreign_values():
            fault = self._exchange_members()
        if fault:
            raise UsageError(fault)
        return self

    def _exchange_members(self) -> str:
        """Tell rank 0 where this rank runs and with which versions, and read what it made of those of all ranks.

        Returns the message on versions that differ, '' if none do.
        """
        this_rank = {
            "host": socket.gethostname(),
            "machine": get_host_id(),
            "cache": os.path.realpath(cache_root()),
            "software": read_package_versions() | {CODE_DIGEST_KEY: hash_source_tree()},
        }
        # Before the others may look for it: reading a key that is missing blocks.
        self._store.set(f"heartbeat/{self.rank}", "0")
        set_value(self._store, f"hello/{self.rank}", this_rank)
        if self.rank == 0:
            hellos = [_parse_hello(content) for content in self._store.multi_get(self._rank_keys("hello"))]
            places, hosts = [hello["place"] for hello in hellos], [hello["host"] for hello in hellos]
            first = dict(reversed([(place, rank) for rank, place in enumerate(places)]))
            members = {
                "hosts": (names := sorted(set(hosts))),
                "host": [names.index(host) for host in hosts],
                "first": [first[place] for place in places],
                "fault": _find_version_fault(hellos),
            }
            set_value(self._store, "members", members)
        members = get_value(self._store, "members", dict)
        hosts = [one_line(members["hosts"][index]) for index in members["host"]]
        self._first_with_cache = [int(first) for first in members["first"]]
        if not len(hosts) == len(self._first_with_cache) == self.size:
            raise ValueError(len(hosts))
        self.liveness = Liveness(self._store, self.rank, hosts, self._timeout)
        self.liveness.start()
        return one_line(str(members["fault"]))

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._store is None:
            return
        try:
            if exc is not None:
                raise exc
            self.gather(None)
        except BaseException as cause:
            self._report_failure(cause)
            self.liveness.close()
            if cause is not exc:
                raise

    @contextlib.contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Context that one process per host and cache enters first; the others do not check its entries again."""
        if self._store is None:
            with check_once():
                yield
            return
        first = self._first_with_cache[self.rank]
        known: list[str] = []
        if first != self.rank:
            with self._translate_store_errors():
                self._wait_until(lambda: self._store.check([f"data/{first}"]))
                known = get_value(self._store, f"data/{first}", list)
                with foreign_values():
                    known = [os.fspath(folder) for folder in known]
        with check_once(known) as checked:
            yield
        if first == self.rank:
            with self._translate_store_errors():
                set_value(self._store, f"data/{self.rank}", sorted(checked))

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's JSON value, by rank, on every rank. Collective.

        A rank that is still busy is waited for while its heartbeat counts. Raises PeerFailureError.
        """
        if self._store is None:
            return [value]
        name, self._num_gathers = f"gather/{self._num_gathers}", self._num_gathers + 1
        with self._translate_store_errors():
            set_value(self._store, f"{name}/{self.rank}", value)
            self._store.add(f"{name}/count", 1)
            if self.rank == 0:
                self._wait_until(lambda: self._store.add(f"{name}/count", 0) >= self.size)
                set_value(
                    self._store, name, [decode(content) for content in self._store.multi_get(self._rank_keys(name))]
                )
            self._wait_until(lambda: self._store.check([name]))
            values: list[Any] = get_value(self._store, name, list)
        with foreign_values():
            if len(values) != self.size:
                raise ValueError(len(values))
        return values

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Wait for `is_done`. Raises if another rank failed or stopped sending heartbeats."""
        limit, look_at = self._timeout.total_seconds(), 0.0
        watched = range(self.size) if self.rank == 0 else [0]
        seen = [(b"", time.monotonic())] * len(watched)
        # Polled, not waited for with `store.wait`: that would not notice a failure of another rank.
        pause = max(min(POLL_SECONDS, limit / 20), self.size / POLLS_PER_SECOND)
        while not is_done():
            if self.liveness.failure is not None:
                raise self.liveness.to_exception(self.liveness.failure, ACTION, FIX_HINT)
            if (now := time.monotonic()) >= look_at:
                if now - look_at > limit / 2:  # this process was suspended, and maybe the others with it
                    seen = [(beat, now) for beat, _ in seen]
                look_at = now + self.liveness.interval
                beats = self.liveness.read_heartbeats(watched)
                # Only this host's clock is used: a rank is alive while its count changes.
                seen = [(beat, now if beat != last else since) for beat, (last, since) in zip(beats, seen, strict=True)]
                silent = [rank for rank, (_, since) in zip(watched, seen, strict=True) if now - since > limit]
                if silent:
                    names = first_names([self.liveness.describe_rank(rank) for rank in silent], 8)
                    raise PeerFailureError(
                        ACTION, f"{names} sent no heartbeat for {limit:g} s (timeout_minutes)", FIX_HINT
                    )
            time.sleep(pause)

    def _report_failure(self, error: BaseException) -> None:
        """Publish why this rank ends, and give the others time to read it. Never raises."""
        known = isinstance(error, DstrainError)
        text = str(error) if known else one_line(f"{type(error).__name__}: {error}")
        if isinstance(error, PeerFailureError):
            text = text.removeprefix(f"{error.phase}: ").removesuffix(f"; {error.fix}")
        self.liveness.report_failure(
            Failure(
                rank=self.rank,
                error=text[:4000],
                exit_code=getattr(error, "exit_code", EXIT_FAILED),
                stop_signal=error.signal_name if isinstance(error, StoppedBySignal) else "",
                is_peer_lost=isinstance(error, PeerFailureError),
            )
        )

    def _rank_keys(self, kind: str) -> list[str]:
        return [f"{kind}/{rank}" for rank in range(self.size)]

    @contextlib.contextmanager
    def _translate_store_errors(self) -> Iterator[None]:
        """Context for requests to the store. Raises PeerFailureError if it does not answer."""
        try:
            yield
        except RuntimeError as error:
            if self.liveness.failure is not None:  # read before rank 0 ended, and the store with it
                raise self.liveness.to_exception(self.liveness.failure, ACTION, FIX_HINT) from error
            if (why := find_connection_error(error)) is None:
                raise
            at = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
            raise PeerFailureError(ACTION, f"rank 0 at {at} does not answer ({why}); see its log", FIX_HINT) from error


def _parse_hello(content: bytes) -> dict[str, Any]:
    """Return {"host", "place", "software"} of a rank."""
    hello = decode(content, dict)
    software = {str(name): one_line(version) for name, version in hello["software"].items()}
    return {"host": one_line(hello["host"]), "place": (hello["machine"], hello["cache"]), "software": software}


def _find_version_fault(hellos: list[dict[str, Any]]) -> str:
    """Return the message on the first rank of another host that has other versions than rank 0; '' if there is none."""
    first = hellos[0]
    for rank, hello in enumerate(hellos):
        # Ranks of one host share an installation; another host may have an older one.
        differs: Mapping[str, str] = hello["software"] if hello["host"] != first["host"] else first["software"]
        for name, wanted, version in iter_version_diffs(first["software"], differs):
            return (
                f"rank {rank} on {hello['host']} has {name} {version}, and rank 0 on {first['host']} has {wanted}; "
                "install the same versions on every host"
            )
    return ""

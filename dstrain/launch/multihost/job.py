"""A launch on several hosts: the hosts are asked first, then their ranks started, watched and ended through agents."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.launch.command import PORT_FILE, Launch
from dstrain.launch.job import Crew, LocalCrew, Program
from dstrain.launch.multihost.agent_client import END_SECONDS, Peer, opened, rest
from dstrain.launch.multihost.channel import BEATS
from dstrain.launch.multihost.cleanup import Cleanups
from dstrain.launch.multihost.heartbeat import MISSED
from dstrain.launch.multihost.plan import (
    HostsLaunch,
    Master,
    agent_command,
    check_starter,
    node_command,
    node_environment,
    starter_command,
    starter_environment,
)
from dstrain.launch.multihost.preflight import learn, meet
from dstrain.launch.worker import LAUNCH_ID, Record, forget_records, log_path, record_folder, start_copying

STARTER_SECONDS = 10.0
"""What started the ranks gets this long to end by itself once they have."""
STARTER_LOG = "launcher.log"
"""In the run folder's logs: what DeepSpeed's runner, pdsh and mpirun write."""


@contextlib.contextmanager
def gathered(launch: Launch | HostsLaunch, run_dir: Path) -> Iterator[Crew]:
    """The crew of a launch, ready to start. Raises UsageError where a host cannot take part."""
    if isinstance(launch, Launch):
        place = record_folder(run_dir) / f"port-{secrets.token_hex(8)}"
        environment = {name: value for name, value in launch.environment.items() if name != PORT_FILE}
        environment |= {PORT_FILE: str(place)} if launch.any_port else {}
        yield LocalCrew(Program(launch.argv, environment), run_dir, launch.ranks)
        return
    check_starter(launch, run_dir)
    logs = log_path(run_dir, 0).parent
    logs.mkdir(parents=True, exist_ok=True)
    with opened(
        launch.hosts, lambda host, nonce: agent_command(host, launch.silence, nonce, os.environ), logs, launch.silence
    ) as peers:
        learn(launch, peers, run_dir)
        crew = HostsCrew(launch, peers, meet(launch, peers), run_dir)
        with crew.beating():
            yield crew


class HostsCrew:
    """Ranks on several hosts, each host watched over by its agent."""

    def __init__(self, launch: HostsLaunch, peers: list[Peer], master: Master, run_dir: Path) -> None:
        self.run_dir, self.ranks = run_dir, launch.ranks
        self.alive: set[int] = set()
        self.ends: dict[int, int | None] = {}
        self.records: dict[int, Record] = {}
        self.lost = ""
        self._launch, self._peers, self._master = launch, peers, master
        folder, name = record_folder(run_dir), secrets.token_hex(8)
        self._file, self._hostfile = folder / f"launch-{name}.json", folder / f"hosts-{name}"
        self._starter: LocalCrew | None = None
        self._started = self._gave_up = False
        self._ended_at: float | None = None
        """When all ranks were first seen to have ended."""
        self._codes: dict[Peer, int] = {}
        self._left: dict[Peer, list[int]] = {}
        self._looked_at = time.monotonic()
        self._begun = threading.Event()
        self._beats: threading.Thread | None = None
        self._paused = 0.0
        """Seconds: the longest time in which this process itself did nothing."""

    @property
    def bf16(self) -> bool:
        """Whether every GPU computes in bf16, as far as hosts can tell."""
        return all(peer.facts["bf16"] is not False for peer in self._peers)

    @property
    def cpu(self) -> bool:
        """Whether no host has a GPU to use."""
        return not any(peer.facts["gpus"] for peer in self._peers)

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Inside, and until `start`, a thread tells the agents that we are there: data may be looked at before, for long."""
        every = self._launch.silence / (2 * BEATS)

        def beat() -> None:
            while not self._begun.wait(every):
                for peer in self._peers:
                    peer.line.beat()

        self._beats = threading.Thread(target=beat, name="beats", daemon=True)
        self._beats.start()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        """From here on the lines belong to this thread."""
        self._begun.set()
        if self._beats is not None:
            self._beats.join()

    def start(self) -> None:
        self._begin()
        forget_records(self.run_dir, self.ranks)
        remove_leftovers(self.run_dir)
        self._write_files()
        self._started = True
        log = log_path(self.run_dir, 0)
        with log.open("ab") as file:
            start_copying(log, file.tell())
        argv = starter_command(self._launch, self._hostfile, self._master, self._file)
        environment = {**self._launch.environment, **({"DS_ACCELERATOR": "cpu"} if self.cpu else {})}
        for index, peer in enumerate(self._peers):
            own = node_command(
                self._launch, index, self._master, ["dstrain.launch.multihost.rank_main", str(self._file)]
            )
            peer.line.send(
                start={
                    "launch": str(self._file),
                    "launch_id": self._launch.environment.get(LAUNCH_ID, ""),
                    "run_dir": str(self.run_dir),
                    "cwd": os.getcwd(),
                    "ranks": list(self._launch.ranks_of(index)),
                    "argv": own if argv is None else None,
                    "env": node_environment(self._launch, index),
                    "environment": environment,
                }
            )
        if argv is not None:
            env = starter_environment(self._launch, os.environ)
            with log.with_name(STARTER_LOG).open("wb") as output:
                # The runner has each host change to its folder, through a shell: / has the same name in all of them.
                self._starter = LocalCrew(Program(argv, env, "/", output), self.run_dir, ())
                self._starter.start()
        self._looked_at = time.monotonic()

    def _write_files(self) -> None:
        """What every rank reads, and DeepSpeed's runner. The environment, which may hold secrets, goes to the agents."""
        about = {
            "arguments": list(self._launch.arguments),
            "cwd": os.getcwd(),
            "silence": self._launch.silence,
            "master": [self._master.address, self._master.port],
            "hosts": {peer.facts["machine"]: _about(peer) for peer in self._peers},
        }
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())
        lines = (f"{host.name} slots={len(host.slots)}\n" for host in self._launch.hosts)
        if self._launch.options.launcher != "openmpi":  # DeepSpeed checks --include against it
            lines = (f"{host.name} slots={max(host.slots) + 1}\n" for host in self._launch.hosts)
        self._hostfile.write_text("".join(lines))

    def look(self, again: bool = False) -> None:
        self._paused = max(self._paused, time.monotonic() - self._looked_at)
        for peer in self._peers:
            for message in peer.line.receive():
                self._note(peer, message)
            if peer not in self._left and not self.lost and (why := peer.lost):
                paused = f"; this process itself did not run for {self._paused:.0f} s (SIGSTOP, Ctrl-Z, or a machine that slept)"
                self.lost = (
                    f"{why}{paused if self._paused > self._launch.silence else ''}; {self._ranks_of(peer)} ran there"
                )
                self._gave_up = True
            peer.line.beat()
        self._looked_at = time.monotonic()

    def _ranks_of(self, peer: Peer) -> str:
        return f"rank {', '.join(map(str, self._launch.ranks_of(self._peers.index(peer))))}"

    def _note(self, peer: Peer, message: Mapping[str, Any]) -> None:
        for name in ("started", "ended"):
            if name in message:
                rank, status, record = message[name]
                if record is not None:
                    self.records[rank] = Record(**record)
                if name == "started":
                    self.alive.add(rank)
                else:
                    self.alive.discard(rank)
                    self.ends[rank] = status
        if "launcher" in message:
            self._codes[peer] = message["launcher"]
        if "left" in message:
            self._left[peer] = message["left"]

    def over(self) -> int | None:
        if self._starter is not None:
            return self._starter_over()
        if len(self._codes) < len(self._peers):
            return None
        return next((code for code in self._codes.values() if code), 0)

    def _starter_over(self) -> int | None:
        """The starter's code; 1 where it stays although all ranks have ended: what a login script left running holds ssh open."""
        assert self._starter is not None
        code = self._starter.over()
        if code is not None or len(self.ends) < self._launch.processes:
            return code
        self._ended_at = self._ended_at or time.monotonic()
        return 1 if time.monotonic() - self._ended_at > STARTER_SECONDS else None

    def signal(self, number: int) -> int:
        for peer in self._peers:
            peer.line.send(signal=number)
        return len(self.alive)

    def left(self) -> bool:
        return bool(self.alive) or (self._starter is not None and self._starter.left())

    def end(self) -> list[str]:
        """SIGKILL what is left on every host; where the agent does not answer over another ssh session, once.

        Where that fails too, the agent does it when its line is dead, or its ranks when it no longer beats.
        """
        self._begin()
        asked = [peer for peer in self._peers if not peer.lost]
        for peer in asked:
            peer.line.send(end=True)
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and any(peer not in self._left and not peer.lost for peer in asked):
            rest([peer.line.read for peer in asked if peer not in self._left and not peer.line.closed], 0.2)
            self.look()
        if self._starter is not None:
            self._starter.end()
        if self._started:  # after the starter, whose end is one of everything that was started since
            unheard = [peer for peer in self._peers if peer not in self._left]
            self._conclude(Cleanups(unheard, self._file, self._launch.silence).failed())
        for file in (self._file, self._hostfile):
            file.unlink(missing_ok=True)
        return [f"{pid} on {peer.host.name}" for peer, pids in self._left.items() for pid in pids]

    def _conclude(self, uncertain: Sequence[Peer]) -> None:
        """Say of a lost launch whether the same command can be started at once."""
        if not self._gave_up:
            return
        if not uncertain:
            self.lost += "; nothing of the launch is left there; start the same command again to go on"
            return
        there = " and ".join(f"{self._ranks_of(peer)} on {peer.host.name}" for peer in uncertain)
        seconds = (MISSED + 1) * self._launch.silence
        self.lost += (
            f"; {there} cannot be ended from here: where it still runs, it ends by itself within {seconds:g} s; "
            "wait for that, then start the same command again to go on"
        )

    def rest(self, seconds: float) -> None:
        rest([peer.line.read for peer in self._peers], seconds)

    def log_of(self, rank: int | None) -> Path | None:
        if self._starter is not None:
            return log_path(self.run_dir, 0).with_name(STARTER_LOG)
        of_rank = (peer.log for at, peer in enumerate(self._peers) if rank in (None, *self._launch.ranks_of(at)))
        return next(of_rank, None)


def remove_leftovers(run_dir: Path) -> None:
    """Remove the launch files of launches that were killed. Call it where no other launch can be in this folder."""
    for pattern in ("launch-*.json", "hosts-*", "seen-*"):
        for file in record_folder(run_dir).glob(pattern):
            file.unlink(missing_ok=True)


def _about(peer: Peer) -> dict[str, Any]:
    facts = peer.facts
    return {
        "hostname": facts["hostname"], "agent": facts["pid"], "heartbeat": facts["heartbeat"], "token": facts["token"],
        "interface": peer.interface, "slots": peer.host.slots,
    }  # fmt: skip

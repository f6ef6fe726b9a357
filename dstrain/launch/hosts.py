"""A launch on several hosts: the hosts are asked first, then their ranks started, watched and ended through agents."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dstrain import __version__
from dstrain.errors import Fault, UsageError
from dstrain.launch.command import Launch
from dstrain.launch.crew import Crew, LocalCrew, Program
from dstrain.launch.peers import END_SECONDS, Peer, ask, opened, rest
from dstrain.launch.several import (
    HostsLaunch,
    Master,
    agent_command,
    check_starter,
    node_command,
    node_environment,
    starter_command,
    starter_environment,
)
from dstrain.launch.worker import LAUNCH_ID, Record, forget_records, log_path, record_folder, start_copying

STARTER_LOG = "launcher.log"
"""In the run folder's logs: what DeepSpeed's runner, pdsh and mpirun write."""


@contextlib.contextmanager
def gathered(launch: Launch | HostsLaunch, run_dir: Path) -> Iterator[Crew]:
    """The crew of a launch, ready to start. Raises UsageError where a host cannot take part."""
    if isinstance(launch, Launch):
        yield LocalCrew(Program(launch.argv, launch.environment), run_dir, launch.ranks)
        return
    check_starter(launch, run_dir)
    logs = log_path(run_dir, 0).parent
    logs.mkdir(parents=True, exist_ok=True)
    with opened(
        launch.hosts, lambda host: agent_command(host, launch.silence, os.environ), logs, launch.silence
    ) as peers:
        learn(launch, peers, run_dir)
        yield HostsCrew(launch, peers, meet(launch, peers), run_dir)


def learn(launch: HostsLaunch, peers: list[Peer], run_dir: Path) -> None:
    """Ask every host for its facts. Raises UsageError for all that would keep a host from taking part."""
    token = record_folder(run_dir) / f"seen-{secrets.token_hex(8)}"
    token.parent.mkdir(parents=True, exist_ok=True)
    token.write_bytes(b"")
    try:
        answers = ask(peers, lambda _: {"hello": {"token": str(token), "cwd": os.getcwd(), "cpu": launch.cpu}}, "facts")
    finally:
        token.unlink(missing_ok=True)
    for peer in peers:
        peer.facts = answers[peer]
        peer.patient_no_more()
    if faults := list(_faults(peers, run_dir)):
        raise UsageError(faults)


def _faults(peers: list[Peer], run_dir: Path) -> Iterator[Fault]:
    first: dict[str, str] = {}
    with_gpus = any(peer.facts["gpus"] for peer in peers)
    for peer in peers:
        host, facts, where = peer.host, peer.facts, f"{peer.host.where} {peer.host.name}"
        if (other := first.setdefault(facts["machine"], host.name)) and other != host.name:
            yield Fault(where, f"it is the same machine as {other}", "name it once, with all its slots")
        if not facts["sees"]:
            yield Fault(
                where,
                f"does not see {run_dir}",
                "mount it there, or take a folder that all hosts share (--run-dir; TMPDIR for other commands than train)",
            )
        if not facts["has_cwd"]:
            yield Fault(where, f"has no folder {Path.cwd()}", "start from a folder that all hosts have")
        if facts["version"] != __version__:
            mend = "install the same version on every host"
            yield Fault(where, f"has dstrain {facts['version']}, this host has {__version__}", mend)
        if with_gpus and facts["gpus"] <= max(host.slots):
            mend = "write as many slots as it has, or choose with --include"
            yield Fault(where, f"has {facts['gpus']} GPUs, and slot {max(host.slots)} is asked for", mend)


def meet(launch: HostsLaunch, peers: list[Peer]) -> Master:
    """Choose where the ranks meet, on the first host, and see that the others reach it. Raises UsageError."""
    first, others = peers[0], peers[1:]
    address = launch.options.master_addr or first.facts["reached_at"] or next(iter(first.facts["addresses"]), "")
    if not address and others:
        raise UsageError(f"{first.host.name} has no address that others could reach; say one with --master-addr")
    asked = {"address": address or "127.0.0.1", "port": launch.options.master_port or 0}
    opening = ask([first], lambda _: {"open": asked}, "opened")[first]
    if "fault" in opening:
        raise UsageError(f"{first.host.name}: {opening['fault']}")
    first.interface = opening["interface"] if others else ""
    port = opening["port"]
    reached = ask(others, lambda _: {"reach": {"address": address, "port": port}}, "reached")
    for peer in others:
        peer.interface = reached[peer].get("interface", "")
    if faults := [
        Fault(
            f"{peer.host.where} {peer.host.name}",
            f"does not reach {first.host.name} at {address}, port {port} ({found['fault']})",
            "open the network between the hosts, or say with --master-addr which of its addresses they reach",
        )
        for peer, found in reached.items()
        if "fault" in found
    ]:
        raise UsageError(faults)
    return Master(address or "127.0.0.1", port)


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
        self._codes: dict[Peer, int] = {}
        self._left: dict[Peer, list[int]] = {}

    @property
    def bf16(self) -> bool:
        """Whether every GPU computes in bf16, as far as hosts can tell."""
        return all(peer.facts["bf16"] is not False for peer in self._peers)

    @property
    def cpu(self) -> bool:
        """Whether no host has a GPU to use."""
        return not any(peer.facts["gpus"] for peer in self._peers)

    def start(self) -> None:
        forget_records(self.run_dir, self.ranks)
        self._write_files()
        log = log_path(self.run_dir, 0)
        with log.open("ab") as file:
            start_copying(log, file.tell())
        argv = starter_command(self._launch, self._hostfile, self._master, self._file)
        for index, peer in enumerate(self._peers):
            own = node_command(self._launch, index, self._master, ["dstrain.launch.rank", str(self._file)])
            peer.line.send(
                start={
                    "launch": str(self._file),
                    "launch_id": self._launch.environment.get(LAUNCH_ID, ""),
                    "run_dir": str(self.run_dir),
                    "cwd": os.getcwd(),
                    "ranks": list(self._launch.ranks_of(index)),
                    "argv": own if argv is None else None,
                    "env": node_environment(self._launch, index),
                }
            )
        if argv is not None:
            env = starter_environment(self._launch, os.environ)
            with log.with_name(STARTER_LOG).open("wb") as output:
                # The runner has each host change to its folder, through a shell: / has the same name in all of them.
                self._starter = LocalCrew(Program(argv, env, "/", output), self.run_dir, ())
                self._starter.start()

    def _write_files(self) -> None:
        """What every rank reads; the environment may hold secrets."""
        cpu = {"DS_ACCELERATOR": "cpu"} if self.cpu else {}
        about = {
            "arguments": list(self._launch.arguments),
            "cwd": os.getcwd(),
            "environment": {**self._launch.environment, **cpu},
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
        for peer in self._peers:
            for message in peer.line.receive():
                self._note(peer, message)
            if peer not in self._left and not self.lost and (why := peer.lost):
                there = ", ".join(map(str, self._launch.ranks_of(self._peers.index(peer))))
                self.lost = f"{why}; rank {there} ran there; start the same command again to go on"
            peer.line.beat()

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
            return self._starter.over()
        if len(self._codes) < len(self._peers):
            return None
        return next((code for code in self._codes.values() if code), 0)

    def signal(self, number: int) -> int:
        for peer in self._peers:
            peer.line.send(signal=number)
        return len(self.alive)

    def left(self) -> bool:
        return bool(self.alive) or (self._starter is not None and self._starter.left())

    def end(self) -> list[str]:
        """SIGKILL what is left on every host that answers; the agents of the others do it when their line is dead."""
        asked = [peer for peer in self._peers if not peer.lost]
        for peer in asked:
            peer.line.send(end=True)
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline and any(peer not in self._left and not peer.lost for peer in asked):
            rest([peer.line.read for peer in asked if peer not in self._left and not peer.line.closed], 0.2)
            self.look()
        if self._starter is not None:
            self._starter.end()
        for file in (self._file, self._hostfile):
            file.unlink(missing_ok=True)
        return [f"{pid} on {peer.host.name}" for peer, pids in self._left.items() for pid in pids]

    def rest(self, seconds: float) -> None:
        rest([peer.line.read for peer in self._peers], seconds)

    def log_of(self, rank: int | None) -> Path | None:
        if self._starter is not None:
            return log_path(self.run_dir, 0).with_name(STARTER_LOG)
        of_rank = (peer.log for at, peer in enumerate(self._peers) if rank in (None, *self._launch.ranks_of(at)))
        return next(of_rank, None)


def _about(peer: Peer) -> dict[str, Any]:
    facts = peer.facts
    return {
        "hostname": facts["hostname"], "agent": facts["pid"], "interface": peer.interface, "slots": peer.host.slots,
    }  # fmt: skip

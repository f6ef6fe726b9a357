"""Worker group on several hosts: one agent per host starts, polls and kills the ranks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dstrain.launch.command import Launch
from dstrain.launch.multihost.agent_client import (
    AgentClient,
    check_hosts,
    close_sessions,
    open_agents,
    request_replies,
)
from dstrain.launch.spawn import LocalWorkerGroup, RankEnd, WorkerGroup, wait_readable
from dstrain.launch.worker import STOPPED_TIMEOUT_FACTOR, RankRecord, log_path, start_log_copy

KILL_TIMEOUT_SECONDS = 12.0
"""Limit for a host to kill its processes: it tries for 10 s."""
CLEANUP_TIMEOUT_SECONDS = 15.0
"""The same over a new ssh session; ssh reports an unreachable host sooner."""
CLEANUP_CONNECT_SECONDS = 4


@contextlib.contextmanager
def open_worker_group(launch: Launch, run_dir: Path) -> Iterator[WorkerGroup]:
    """Yield the worker group of a launch, ready to start. Raises UsageError if a host cannot take part."""
    if not launch.hosts:
        yield LocalWorkerGroup(launch, run_dir)
        return
    logs = log_path(run_dir, 0).parent
    logs.mkdir(parents=True, exist_ok=True)
    with open_agents(launch.hosts, logs, launch.heartbeat_timeout) as clients:
        yield MultiHostWorkerGroup(check_hosts(launch, clients, run_dir), clients, run_dir)


class MultiHostWorkerGroup(WorkerGroup):
    """Ranks on several hosts; an agent on each host starts, watches and kills them."""

    def __init__(self, launch: Launch, clients: list[AgentClient], run_dir: Path) -> None:
        super().__init__(launch, run_dir)
        self._clients = clients
        self._has_started = self._has_failed_host = False
        self._remaining_pids: dict[AgentClient, list[int]] = {}
        self._last_poll_at = time.monotonic()
        self._longest_pause = 0.0
        """Longest time in seconds between two polls: this process may have been suspended."""

    @property
    def alive_ranks(self) -> set[int]:
        return set(self.launch.ranks) - self.ends.keys() if self._has_started else set()

    @property
    def supports_bf16(self) -> bool:
        """True unless a host reports a GPU without bf16."""
        return all(client.host_info["bf16"] is not False for client in self._clients)

    @property
    def use_cpu(self) -> bool:
        """True if no host has a GPU to use."""
        return not any(client.host_info["gpus"] for client in self._clients)

    def start(self) -> None:
        self._has_started = True
        log = log_path(self.run_dir, 0)
        # From its present end: the output of earlier launches is not shown again.
        with log.open("ab") as file:
            start_log_copy(log, file.tell())
        environment = {**self.launch.environment, **({"DS_ACCELERATOR": "cpu"} if self.use_cpu else {})}
        for index, client in enumerate(self._clients):
            ranks, devices = self.launch.ranks_of(index), tuple(map(str, client.host.slots))
            own = asdict(replace(self.launch, environment=environment, devices=devices, hosts=()))
            own["ranks"] = [ranks.start, ranks.stop]
            client.channel.send(start={"launch": own, "run_dir": str(self.run_dir), "cwd": os.getcwd()})
        self._last_poll_at = time.monotonic()

    def poll(self) -> None:
        self._longest_pause = max(self._longest_pause, time.monotonic() - self._last_poll_at)
        for client in self._clients:
            for message in client.channel.read_messages():
                self._handle_message(client, message)
            if client not in self._remaining_pids and not self.abort_reason and (reason := client.close_reason):
                if self._longest_pause > self.launch.heartbeat_timeout:
                    cause = "SIGSTOP, Ctrl-Z, or a machine that slept"
                    reason += f"; this process itself did not run for {self._longest_pause:.0f} s ({cause})"
                self.abort_reason = f"{reason}; {self._format_ranks(client)} ran there"
                self._has_failed_host = True
        self._last_poll_at = time.monotonic()

    def _format_ranks(self, client: AgentClient) -> str:
        return f"rank {', '.join(map(str, self.launch.ranks_of(self._clients.index(client))))}"

    def _handle_message(self, client: AgentClient, message: Mapping[str, Any]) -> None:
        if "ended" in message:
            rank, end = message["ended"]
            record = None if end["record"] is None else RankRecord(**end["record"])
            self.ends[rank] = RankEnd(**end | {"record": record})
        if "remaining_pids" in message:
            self._remaining_pids[client] = message["remaining_pids"]

    def send_signal(self, signum: int) -> int:
        for client in self._clients:
            client.channel.send(signal=signum)
        return len(self.alive_ranks)

    def is_alive(self) -> bool:
        return bool(self.alive_ranks)

    def kill(self) -> list[str]:
        """SIGKILL all processes on every host; if an agent does not answer, once over a separate ssh session.

        If that fails too, the agent kills its ranks when its channel is closed, and ranks kill themselves when their
        agent is stopped.
        """
        asked = [client for client in self._clients if not client.close_reason]
        for client in asked:
            client.channel.send(end=True)
        # All hosts at once: they kill at the same time, and one deadline counts for all.
        deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
        while time.monotonic() < deadline and any(
            client not in self._remaining_pids and not client.close_reason for client in asked
        ):
            open_clients = [one for one in asked if one not in self._remaining_pids and not one.channel.closed]
            wait_readable([client.channel.read_fd for client in open_clients], 0.2)
            self.poll()
        if self._has_started:
            self._kill_over_new_sessions([client for client in self._clients if client not in self._remaining_pids])
        return [f"{pid} on {client.host.name}" for client, pids in self._remaining_pids.items() for pid in pids]

    def _kill_over_new_sessions(self, clients: Sequence[AgentClient]) -> None:
        """Kill the agents that do not answer, and their ranks; add to the abort reason whether that worked."""
        timeout = self.launch.heartbeat_timeout
        sessions = {
            AgentClient(
                client.host, client.log_path, timeout, CLEANUP_TIMEOUT_SECONDS, connect_timeout=CLEANUP_CONNECT_SECONDS
            ): client.host_info
            for client in clients
        }  # fmt: skip
        replies = request_replies(
            sessions,
            lambda session: {"kill": {"pid": sessions[session]["pid"], "started_at": sessions[session]["started"]}},
            "remaining_pids",
        )
        close_sessions([*sessions])
        if not self._has_failed_host:
            return
        failed = [client for client, session in zip(clients, sessions, strict=True) if replies.get(session) != []]
        if not failed:
            self.abort_reason += "; nothing of the launch is left there; start the same command again to resume"
            return
        there = " and ".join(f"{self._format_ranks(client)} on {client.host.name}" for client in failed)
        self.abort_reason += (
            f"; {there} cannot be ended from here: where it still runs, it ends by itself within "
            f"{(STOPPED_TIMEOUT_FACTOR + 1) * timeout:g} s; wait for that, then start the same command again to resume"
        )

    def wait_for_event(self, timeout: float) -> None:
        wait_readable([client.channel.read_fd for client in self._clients], timeout)

    def find_output(self, rank: int | None) -> Path | None:
        of_rank = (
            client.log_path for at, client in enumerate(self._clients) if rank in (None, *self.launch.ranks_of(at))
        )
        return next(of_rank, None)

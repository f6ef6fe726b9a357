"""Worker group on several hosts: one agent per host starts, polls and kills the ranks."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.launch.command import LocalLaunch
from dstrain.launch.multihost.agent_client import KILL_TIMEOUT_SECONDS, AgentClient, open_agents, start_session
from dstrain.launch.multihost.channel import BEATS_PER_TIMEOUT
from dstrain.launch.multihost.plan import (
    AGENT_MODULE,
    MasterEndpoint,
    MultiHostLaunch,
    agent_command,
    choose_master,
    probe_hosts,
    remote_command,
)
from dstrain.launch.spawn import WorkerGroup, make_local_group, rank_command, wait_readable
from dstrain.launch.worker import (
    STOPPED_TIMEOUT_FACTOR,
    RankRecord,
    log_path,
    remove_rank_records,
    start_log_copy,
)


@contextlib.contextmanager
def open_worker_group(launch: LocalLaunch | MultiHostLaunch, run_dir: Path) -> Iterator[WorkerGroup]:
    """Yield the worker group of a launch, ready to start.

    Raises UsageError if a host cannot take part.
    """
    if isinstance(launch, LocalLaunch):
        yield make_local_group(launch, run_dir)
        return
    logs = log_path(run_dir, 0).parent
    logs.mkdir(parents=True, exist_ok=True)
    with open_agents(
        launch.hosts,
        lambda host, nonce: agent_command(host, launch.heartbeat_timeout, nonce, os.environ),
        logs,
        launch.heartbeat_timeout,
    ) as clients:
        probe_hosts(launch, clients, run_dir)
        group = MultiHostWorkerGroup(launch, clients, choose_master(launch, clients), run_dir)
        with group.keep_alive():
            yield group


class MultiHostWorkerGroup:
    """Ranks on several hosts; an agent on each host starts, watches and kills them."""

    def __init__(
        self, launch: MultiHostLaunch, clients: list[AgentClient], master: MasterEndpoint, run_dir: Path
    ) -> None:
        self.run_dir, self.ranks = run_dir, launch.ranks
        self.exit_codes: dict[int, int | None] = {}
        self.kill_reasons: dict[int, str] = {}
        self.records: dict[int, RankRecord] = {}
        self.abort_reason = ""
        self._launch, self._clients, self._master = launch, clients, master
        self._has_started = self._has_failed_host = False
        self._remaining_pids: dict[AgentClient, list[str]] = {}
        self._last_poll_at = time.monotonic()
        self._heartbeat_stop = threading.Event()
        self._heartbeat_thread: threading.Thread | None = None
        self._longest_pause = 0.0
        """Longest time in seconds between two polls: this process may have been suspended."""

    @property
    def alive_ranks(self) -> set[int]:
        return set(self.ranks) - self.exit_codes.keys() if self._has_started else set()

    @property
    def supports_bf16(self) -> bool:
        """True unless a host reports a GPU without bf16."""
        return all(client.host_info["bf16"] is not False for client in self._clients)

    @property
    def use_cpu(self) -> bool:
        """True if no host has a GPU to use."""
        return not any(client.host_info["gpus"] for client in self._clients)

    @contextlib.contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Send heartbeats to the agents from a thread until `start`: checking the data may take
        long.
        """
        interval = self._launch.heartbeat_timeout / (2 * BEATS_PER_TIMEOUT)

        def send_heartbeats() -> None:
            while not self._heartbeat_stop.wait(interval):
                for client in self._clients:
                    client.channel.send_heartbeat()

        self._heartbeat_thread = threading.Thread(target=send_heartbeats, name="heartbeats", daemon=True)
        self._heartbeat_thread.start()
        try:
            yield
        finally:
            self._stop_heartbeats()

    def _stop_heartbeats(self) -> None:
        """Stop the thread: from here on only the calling thread uses the channels."""
        self._heartbeat_stop.set()
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.join()

    def start(self) -> None:
        self._stop_heartbeats()
        remove_rank_records(self.run_dir, self.ranks)
        self._has_started = True
        log = log_path(self.run_dir, 0)
        # From its present end: the output of earlier launches is not shown again.
        with log.open("ab") as file:
            start_log_copy(log, file.tell())
        environment = {**self._launch.environment, **({"DS_ACCELERATOR": "cpu"} if self.use_cpu else {})}
        for index, client in enumerate(self._clients):
            ranks = self._launch.ranks_of(index)
            client.channel.send(
                start={
                    "argv": rank_command(self._launch.arguments),
                    "environment": environment,
                    "run_dir": str(self.run_dir),
                    "cwd": os.getcwd(),
                    "ranks": [ranks.start, ranks.stop],
                    "slots": client.host.slots,
                    "world_size": self._launch.world_size,
                    "master": [self._master.address, self._master.port],
                    "interface": client.interface,
                }
            )
        self._last_poll_at = time.monotonic()

    def poll(self) -> None:
        self._longest_pause = max(self._longest_pause, time.monotonic() - self._last_poll_at)
        for client in self._clients:
            for message in client.channel.read_messages():
                self._handle_message(client, message)
            if client not in self._remaining_pids and not self.abort_reason and (reason := client.close_reason):
                if self._longest_pause > self._launch.heartbeat_timeout:
                    cause = "SIGSTOP, Ctrl-Z, or a machine that slept"
                    reason += f"; this process itself did not run for {self._longest_pause:.0f} s ({cause})"
                self.abort_reason = f"{reason}; {self._format_ranks(client)} ran there"
                self._has_failed_host = True
            client.channel.send_heartbeat()
        self._last_poll_at = time.monotonic()

    def _format_ranks(self, client: AgentClient) -> str:
        return f"rank {', '.join(map(str, self._launch.ranks_of(self._clients.index(client))))}"

    def _handle_message(self, client: AgentClient, message: Mapping[str, Any]) -> None:
        if "ended" in message:
            rank, code, record = message["ended"]
            if record is not None:
                self.records[rank] = RankRecord(**record)
            self.exit_codes[rank] = code
        if "killed" in message:
            rank, reason = message["killed"]
            self.kill_reasons[rank] = reason
        if "remaining_pids" in message:
            self._remaining_pids[client] = message["remaining_pids"]

    def send_signal(self, signum: int) -> int:
        for client in self._clients:
            client.channel.send(signal=signum)
        return len(self.alive_ranks)

    def is_alive(self) -> bool:
        return bool(self.alive_ranks)

    def kill(self) -> list[str]:
        """SIGKILL all processes on every host; if an agent does not answer, once over a separate
        ssh session.

        If that fails too, the agent kills its ranks when its channel is closed, and ranks kill
        themselves when their agent is stopped.
        """
        self._stop_heartbeats()
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
            unanswered = [client for client in self._clients if client not in self._remaining_pids]
            self._add_restart_hint(RemoteCleanup(unanswered, self._launch.heartbeat_timeout).wait_for_failures())
        return [f"{pid} on {client.host.name}" for client, pids in self._remaining_pids.items() for pid in pids]

    def _add_restart_hint(self, failed_clients: Sequence[AgentClient]) -> None:
        """Add to the abort reason whether the same command can be started again at once."""
        if not self._has_failed_host:
            return
        if not failed_clients:
            self.abort_reason += "; nothing of the launch is left there; start the same command again to resume"
            return
        there = " and ".join(f"{self._format_ranks(client)} on {client.host.name}" for client in failed_clients)
        seconds = (STOPPED_TIMEOUT_FACTOR + 1) * self._launch.heartbeat_timeout
        self.abort_reason += (
            f"; {there} cannot be ended from here: where it still runs, it ends by itself within {seconds:g} s; "
            "wait for that, then start the same command again to resume"
        )

    def wait_for_event(self, timeout: float) -> None:
        wait_readable([client.channel.read_fd for client in self._clients], timeout)

    def find_output(self, rank: int | None) -> Path | None:
        of_rank = (
            client.log_path for at, client in enumerate(self._clients) if rank in (None, *self._launch.ranks_of(at))
        )
        return next(of_rank, None)


CLEANUP_TIMEOUT_SECONDS = 15.0
"""Limit for a host to answer and to kill; ssh reports an unreachable host sooner."""
_CONNECT_TIMEOUT_SECONDS = 4
_DONE_MESSAGE = "ended: 0 left"


class RemoteCleanup:
    """Sessions that end a host's agent and ranks, one per host, all at the same time."""

    def __init__(self, clients: Sequence[AgentClient], heartbeat_timeout: float) -> None:
        self._deadline = time.monotonic() + CLEANUP_TIMEOUT_SECONDS
        self._sessions = {client: _start_session(client, heartbeat_timeout) for client in clients}

    def wait_for_failures(self) -> list[AgentClient]:
        """Wait for all sessions; return the hosts on which processes may remain."""
        return [client for client, session in self._sessions.items() if not self._wait_for_success(client, session)]

    def _wait_for_success(self, client: AgentClient, session: subprocess.Popen[bytes]) -> bool:
        assert session.stdout is not None
        output = b""
        os.set_blocking(session.stdout.fileno(), False)
        while (seconds_left := self._deadline - time.monotonic()) > 0:
            wait_readable([session.stdout.fileno()], seconds_left)
            try:
                data = session.stdout.read(1 << 16)
            except OSError:
                break
            if not data:
                break
            # A login script may write much; the result comes last.
            output = (output + data)[-(1 << 17) :]
        session.kill()
        session.communicate()
        return f"{client.nonce} {_DONE_MESSAGE}".encode() in output


def _start_session(client: AgentClient, heartbeat_timeout: float) -> subprocess.Popen[bytes]:
    info = client.host_info
    module = [AGENT_MODULE, "kill", str(info["pid"]), info["started"], client.nonce]
    words = remote_command(client.host, module, heartbeat_timeout, os.environ)
    words[1:1] = ["-o", f"ConnectTimeout={_CONNECT_TIMEOUT_SECONDS}"]  # of an option given twice ssh uses the first
    return start_session(words, client.log_path)

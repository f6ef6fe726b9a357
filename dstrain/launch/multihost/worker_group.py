"""Worker group on several hosts: one agent per host starts, polls and kills the ranks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.launch.command import LocalLaunch
from dstrain.launch.heartbeat import RANK_TIMEOUT_FACTOR
from dstrain.launch.multihost.agent_client import KILL_TIMEOUT_SECONDS, AgentClient, open_agents, start_session
from dstrain.launch.multihost.channel import BEATS_PER_TIMEOUT
from dstrain.launch.multihost.plan import (
    RANK_MODULE,
    MasterEndpoint,
    MultiHostLaunch,
    agent_command,
    check_runner,
    choose_master,
    node_command,
    node_environment,
    probe_hosts,
    remote_command,
    runner_command,
    runner_environment,
)
from dstrain.launch.processes import find_processes, has_marker, kill_processes
from dstrain.launch.rank_monitor import wait_readable
from dstrain.launch.worker import (
    LAUNCH_FILE_ENV,
    LAUNCH_ID_ENV,
    RankRecord,
    get_workers_dir,
    log_path,
    remove_rank_records,
    start_log_copy,
)
from dstrain.launch.worker_group import LauncherSpec, LocalWorkerGroup, WorkerGroup, make_local_group

RUNNER_EXIT_SECONDS = 10.0
"""Time for DeepSpeed's runner to end by itself after all ranks have ended."""
RUNNER_LOG = "launcher.log"
"""File in the run folder's logs for the output of DeepSpeed's runner, pdsh and mpirun."""


@contextlib.contextmanager
def open_worker_group(launch: LocalLaunch | MultiHostLaunch, run_dir: Path) -> Iterator[WorkerGroup]:
    """Yield the worker group of a launch, ready to start.

    Raises UsageError if a host cannot take part.
    """
    if isinstance(launch, LocalLaunch):
        yield make_local_group(launch, run_dir)
        return
    check_runner(launch, run_dir)
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
        self.alive_ranks: set[int] = set()
        self.exit_codes: dict[int, int | None] = {}
        self.kill_reasons: dict[int, str] = {}
        self.records: dict[int, RankRecord] = {}
        self.abort_reason = ""
        self._launch, self._clients, self._master = launch, clients, master
        folder, name = get_workers_dir(run_dir), secrets.token_hex(8)
        self._launch_file, self._hostfile = folder / f"launch-{name}.json", folder / f"hosts-{name}"
        self._runner: LocalWorkerGroup | None = None
        self._has_started = self._has_failed_host = False
        self._all_exited_at: float | None = None
        """Time at which all ranks were first seen to have ended."""
        self._launcher_codes: dict[AgentClient, int] = {}
        self._remaining_pids: dict[AgentClient, list[int]] = {}
        self._last_poll_at = time.monotonic()
        self._heartbeat_stop = threading.Event()
        self._heartbeat_thread: threading.Thread | None = None
        self._longest_pause = 0.0
        """Longest time in seconds between two polls: this process may have been suspended."""

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
        write_launch_file(self._launch, self._launch_file, self._master, self._clients)
        write_hostfile(self._launch, self._hostfile)
        self._has_started = True
        log = log_path(self.run_dir, 0)
        # From its present end: the output of earlier launches is not shown again.
        with log.open("ab") as file:
            start_log_copy(log, file.tell())
        argv = runner_command(self._launch, self._hostfile, self._master, self._launch_file)
        environment = {**self._launch.environment, **({"DS_ACCELERATOR": "cpu"} if self.use_cpu else {})}
        for index, client in enumerate(self._clients):
            node_argv = node_command(self._launch, index, self._master, [RANK_MODULE, str(self._launch_file)])
            client.channel.send(
                start={
                    "launch": str(self._launch_file),
                    "launch_id": self._launch.environment.get(LAUNCH_ID_ENV, ""),
                    "run_dir": str(self.run_dir),
                    "cwd": os.getcwd(),
                    "ranks": list(self._launch.ranks_of(index)),
                    "argv": node_argv if argv is None else None,
                    "env": node_environment(self._launch, index),
                    "environment": environment,
                }
            )
        if argv is not None:
            env = runner_environment(self._launch, os.environ)
            with log.with_name(RUNNER_LOG).open("wb") as output:
                # The runner makes each host change to its working directory, through a shell: /
                # exists on all.
                self._runner = LocalWorkerGroup(LauncherSpec(argv, env, "/", output), self.run_dir, ())
                self._runner.start()
        self._last_poll_at = time.monotonic()

    def poll(self, force: bool = False) -> None:
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
        for name in ("started", "ended"):
            if name in message:
                rank, status, record = message[name]
                if record is not None:
                    self.records[rank] = RankRecord(**record)
                if name == "started":
                    self.alive_ranks.add(rank)
                else:
                    self.alive_ranks.discard(rank)
                    self.exit_codes[rank] = status
        if "killed" in message:
            rank, reason = message["killed"]
            self.kill_reasons[rank] = reason
        if "launcher" in message:
            self._launcher_codes[client] = message["launcher"]
        if "remaining_pids" in message:
            self._remaining_pids[client] = message["remaining_pids"]

    def poll_launcher(self) -> int | None:
        if self._runner is not None:
            return self._poll_runner()
        if len(self._launcher_codes) < len(self._clients):
            return None
        return next((code for code in self._launcher_codes.values() if code), 0)

    def _poll_runner(self) -> int | None:
        """Return the runner's exit code; 1 if it still runs long after all ranks have ended.

        A process that a login script left running may hold its ssh session open.
        """
        assert self._runner is not None
        code = self._runner.poll_launcher()
        if code is not None or len(self.exit_codes) < self._launch.world_size:
            return code
        self._all_exited_at = self._all_exited_at or time.monotonic()
        return 1 if time.monotonic() - self._all_exited_at > RUNNER_EXIT_SECONDS else None

    def send_signal(self, signum: int) -> int:
        for client in self._clients:
            client.channel.send(signal=signum)
        return len(self.alive_ranks)

    def is_alive(self) -> bool:
        return bool(self.alive_ranks) or (self._runner is not None and self._runner.is_alive())

    def kill(self) -> list[str]:
        """SIGKILL all processes on every host; if an agent does not answer, once over a separate
        ssh session.

        If that fails too, the agent kills its ranks when its channel is closed, and ranks kill
        themselves when their agent sends no heartbeat.
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
        if self._runner is not None:
            self._runner.kill()
        if self._has_started:  # after the runner: killing it kills all children that this process started since
            unanswered = [client for client in self._clients if client not in self._remaining_pids]
            self._add_restart_hint(
                RemoteCleanup(unanswered, self._launch_file, self._launch.heartbeat_timeout).wait_for_failures()
            )
        for file in (self._launch_file, self._hostfile):
            file.unlink(missing_ok=True)
        return [f"{pid} on {client.host.name}" for client, pids in self._remaining_pids.items() for pid in pids]

    def _add_restart_hint(self, failed_clients: Sequence[AgentClient]) -> None:
        """Add to the abort reason whether the same command can be started again at once."""
        if not self._has_failed_host:
            return
        if not failed_clients:
            self.abort_reason += "; nothing of the launch is left there; start the same command again to resume"
            return
        there = " and ".join(f"{self._format_ranks(client)} on {client.host.name}" for client in failed_clients)
        seconds = (RANK_TIMEOUT_FACTOR + 1) * self._launch.heartbeat_timeout
        self.abort_reason += (
            f"; {there} cannot be ended from here: where it still runs, it ends by itself within {seconds:g} s; "
            "wait for that, then start the same command again to resume"
        )

    def wait_for_event(self, timeout: float) -> None:
        wait_readable([client.channel.read_fd for client in self._clients], timeout)

    def find_launcher_log(self, rank: int | None) -> Path | None:
        if self._runner is not None:
            return log_path(self.run_dir, 0).with_name(RUNNER_LOG)
        of_rank = (
            client.log_path for at, client in enumerate(self._clients) if rank in (None, *self._launch.ranks_of(at))
        )
        return next(of_rank, None)


CLEANUP_TIMEOUT_SECONDS = 15.0
"""Limit for a host to answer and to kill; ssh reports an unreachable host sooner."""
_CONNECT_TIMEOUT_SECONDS = 4
AGENT_MODULE = "dstrain.launch.multihost.agent"
_DONE_MESSAGE = "ended: 0 left"


class RemoteCleanup:
    """Cleanup sessions, one per host, all at the same time."""

    def __init__(self, clients: Sequence[AgentClient], launch_file: Path, heartbeat_timeout: float) -> None:
        self._deadline = time.monotonic() + CLEANUP_TIMEOUT_SECONDS
        self._sessions = {client: _start_session(client, launch_file, heartbeat_timeout) for client in clients}

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


def _start_session(client: AgentClient, launch_file: Path, heartbeat_timeout: float) -> subprocess.Popen[bytes]:
    words = remote_command(
        client.host,
        ["dstrain.launch.multihost.worker_group", os.fsencode(launch_file).hex(), client.nonce],
        heartbeat_timeout,
        os.environ,
    )
    words[1:1] = ["-o", f"ConnectTimeout={_CONNECT_TIMEOUT_SECONDS}"]  # of an option given twice ssh uses the first
    return start_session(words, client.log_path)


def main(hex_path: str, nonce: str) -> int:
    """Kill the launch's processes on this host. Returns 0 if none remains, else 1."""
    file = os.fsdecode(bytes.fromhex(hex_path))
    left = kill_processes(lambda: find_processes(lambda words, env: is_of_launch(words, env, file, nonce)))
    print(f"\n{nonce} ended: {len(left)} left", flush=True)
    return bool(left)


def is_of_launch(words: Sequence[str], env: Callable[[], Mapping[str, str]], launch_file: str, nonce: str) -> bool:
    """Return True for an agent with this nonce, and for processes that carry the path of the launch
    file.
    """
    return (nonce in words and AGENT_MODULE in words) or has_marker(words, env, launch_file, LAUNCH_FILE_ENV)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))


def write_launch_file(
    launch: MultiHostLaunch, file: Path, master: MasterEndpoint, clients: Sequence[AgentClient]
) -> None:
    """Write the file that every rank reads at its start; only its owner can read it.

    It does not hold the environment, which may contain secrets: the agents hand that out.
    """
    content = {
        "arguments": list(launch.arguments),
        "cwd": os.getcwd(),
        "heartbeat_timeout": launch.heartbeat_timeout,
        "master": [master.address, master.port],
        "hosts": {client.host_info["machine"]: _host_entry(client) for client in clients},
    }
    # O_EXCL and 0600 from the start: it holds the token for the environment.
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
        json.dump(content, opened)
        opened.flush()
        os.fsync(opened.fileno())  # other hosts read it over a network file system


def write_hostfile(launch: MultiHostLaunch, file: Path) -> None:
    """Write the hostfile for DeepSpeed's runner."""
    lines = (f"{host.name} slots={len(host.slots)}\n" for host in launch.hosts)
    if launch.options.launcher != "openmpi":  # DeepSpeed compares the slot numbers of --include with it
        lines = (f"{host.name} slots={max(host.slots) + 1}\n" for host in launch.hosts)
    file.write_text("".join(lines))


def _host_entry(client: AgentClient) -> dict[str, Any]:
    host_info = client.host_info
    return {
        "hostname": host_info["hostname"],
        "agent": host_info["pid"],
        "heartbeat": host_info["heartbeat"],
        "token": host_info["token"],
        "interface": client.interface,
        "slots": client.host.slots,
    }

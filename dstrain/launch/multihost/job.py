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

from dstrain.launch.command import PORT_FILE_ENV, LocalLaunch
from dstrain.launch.heartbeat import RANK_TIMEOUT_FACTOR
from dstrain.launch.job import LaunchedJob, LauncherSpec, LocalJob
from dstrain.launch.multihost.agent_client import KILL_TIMEOUT_SECONDS, AgentClient, open_agents, wait_readable
from dstrain.launch.multihost.channel import BEATS_PER_TIMEOUT
from dstrain.launch.multihost.cleanup import RemoteCleanup
from dstrain.launch.multihost.plan import (
    MasterEndpoint,
    MultiHostLaunch,
    agent_command,
    check_runner,
    node_command,
    node_environment,
    runner_command,
    runner_environment,
)
from dstrain.launch.multihost.preflight import choose_master, probe_hosts
from dstrain.launch.worker import (
    LAUNCH_ID_ENV,
    RankRecord,
    get_workers_dir,
    log_path,
    remove_rank_records,
    start_log_copy,
)

RUNNER_EXIT_SECONDS = 10.0
"""What started the ranks gets this long to end by itself once they have."""
RUNNER_LOG = "launcher.log"
"""In the run folder's logs: what DeepSpeed's runner, pdsh and mpirun write."""


@contextlib.contextmanager
def open_job(launch: LocalLaunch | MultiHostLaunch, run_dir: Path) -> Iterator[LaunchedJob]:
    """The crew of a launch, ready to start. Raises UsageError where a host cannot take part."""
    if isinstance(launch, LocalLaunch):
        place = get_workers_dir(run_dir) / f"port-{secrets.token_hex(8)}"
        environment = {name: value for name, value in launch.environment.items() if name != PORT_FILE_ENV}
        environment |= {PORT_FILE_ENV: str(place)} if launch.allow_any_port else {}
        yield LocalJob(LauncherSpec(launch.argv, environment), run_dir, launch.ranks)
        return
    check_runner(launch, run_dir)
    logs = log_path(run_dir, 0).parent
    logs.mkdir(parents=True, exist_ok=True)
    with open_agents(
        launch.hosts,
        lambda host, nonce: agent_command(host, launch.heartbeat_timeout, nonce, os.environ),
        logs,
        launch.heartbeat_timeout,
    ) as peers:
        probe_hosts(launch, peers, run_dir)
        crew = MultiHostJob(launch, peers, choose_master(launch, peers), run_dir)
        with crew.keep_alive():
            yield crew


class MultiHostJob:
    """Ranks on several hosts, each host watched over by its agent."""

    def __init__(
        self, launch: MultiHostLaunch, clients: list[AgentClient], master: MasterEndpoint, run_dir: Path
    ) -> None:
        self.run_dir, self.ranks = run_dir, launch.ranks
        self.alive_ranks: set[int] = set()
        self.exit_codes: dict[int, int | None] = {}
        self.records: dict[int, RankRecord] = {}
        self.abort_reason = ""
        self._launch, self._clients, self._master = launch, clients, master
        folder, name = get_workers_dir(run_dir), secrets.token_hex(8)
        self._launch_file, self._hostfile = folder / f"launch-{name}.json", folder / f"hosts-{name}"
        self._runner: LocalJob | None = None
        self._has_started = self._has_failed_host = False
        self._all_exited_at: float | None = None
        """When all ranks were first seen to have ended."""
        self._launcher_codes: dict[AgentClient, int] = {}
        self._remaining_pids: dict[AgentClient, list[int]] = {}
        self._last_poll_at = time.monotonic()
        self._heartbeat_stop = threading.Event()
        self._heartbeat_thread: threading.Thread | None = None
        self._longest_pause = 0.0
        """Seconds: the longest time in which this process itself did nothing."""

    @property
    def supports_bf16(self) -> bool:
        """Whether every GPU computes in bf16, as far as hosts can tell."""
        return all(peer.host_info["bf16"] is not False for peer in self._clients)

    @property
    def use_cpu(self) -> bool:
        """Whether no host has a GPU to use."""
        return not any(peer.host_info["gpus"] for peer in self._clients)

    @contextlib.contextmanager
    def keep_alive(self) -> Iterator[None]:
        """Inside, and until `start`, a thread tells the agents that we are there: data may be looked at before, for long."""
        every = self._launch.heartbeat_timeout / (2 * BEATS_PER_TIMEOUT)

        def send_heartbeats() -> None:
            while not self._heartbeat_stop.wait(every):
                for peer in self._clients:
                    peer.channel.send_heartbeat()

        self._heartbeat_thread = threading.Thread(target=send_heartbeats, name="beats", daemon=True)
        self._heartbeat_thread.start()
        try:
            yield
        finally:
            self._stop_heartbeats()

    def _stop_heartbeats(self) -> None:
        """From here on the lines belong to this thread."""
        self._heartbeat_stop.set()
        if self._heartbeat_thread is not None:
            self._heartbeat_thread.join()

    def start(self) -> None:
        self._stop_heartbeats()
        remove_rank_records(self.run_dir, self.ranks)
        remove_launch_files(self.run_dir)
        self._write_launch_files()
        self._has_started = True
        log = log_path(self.run_dir, 0)
        with log.open("ab") as file:
            start_log_copy(log, file.tell())
        argv = runner_command(self._launch, self._hostfile, self._master, self._launch_file)
        environment = {**self._launch.environment, **({"DS_ACCELERATOR": "cpu"} if self.use_cpu else {})}
        for index, peer in enumerate(self._clients):
            own = node_command(
                self._launch, index, self._master, ["dstrain.launch.multihost.rank_main", str(self._launch_file)]
            )
            peer.channel.send(
                start={
                    "launch": str(self._launch_file),
                    "launch_id": self._launch.environment.get(LAUNCH_ID_ENV, ""),
                    "run_dir": str(self.run_dir),
                    "cwd": os.getcwd(),
                    "ranks": list(self._launch.ranks_of(index)),
                    "argv": own if argv is None else None,
                    "env": node_environment(self._launch, index),
                    "environment": environment,
                }
            )
        if argv is not None:
            env = runner_environment(self._launch, os.environ)
            with log.with_name(RUNNER_LOG).open("wb") as output:
                # The runner has each host change to its folder, through a shell: / has the same name in all of them.
                self._runner = LocalJob(LauncherSpec(argv, env, "/", output), self.run_dir, ())
                self._runner.start()
        self._last_poll_at = time.monotonic()

    def _write_launch_files(self) -> None:
        """What every rank reads, and DeepSpeed's runner. The environment, which may hold secrets, goes to the agents."""
        about = {
            "arguments": list(self._launch.arguments),
            "cwd": os.getcwd(),
            "silence": self._launch.heartbeat_timeout,
            "master": [self._master.address, self._master.port],
            "hosts": {peer.host_info["machine"]: _host_entry(peer) for peer in self._clients},
        }
        with os.fdopen(os.open(self._launch_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(about, file)
            file.flush()
            os.fsync(file.fileno())
        lines = (f"{host.name} slots={len(host.slots)}\n" for host in self._launch.hosts)
        if self._launch.options.launcher != "openmpi":  # DeepSpeed checks --include against it
            lines = (f"{host.name} slots={max(host.slots) + 1}\n" for host in self._launch.hosts)
        self._hostfile.write_text("".join(lines))

    def poll(self, force: bool = False) -> None:
        self._longest_pause = max(self._longest_pause, time.monotonic() - self._last_poll_at)
        for peer in self._clients:
            for message in peer.channel.read_messages():
                self._handle_message(peer, message)
            if peer not in self._remaining_pids and not self.abort_reason and (why := peer.close_reason):
                paused = f"; this process itself did not run for {self._longest_pause:.0f} s (SIGSTOP, Ctrl-Z, or a machine that slept)"
                self.abort_reason = f"{why}{paused if self._longest_pause > self._launch.heartbeat_timeout else ''}; {self._format_ranks(peer)} ran there"
                self._has_failed_host = True
            peer.channel.send_heartbeat()
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
        if "launcher" in message:
            self._launcher_codes[client] = message["launcher"]
        if "left" in message:
            self._remaining_pids[client] = message["left"]

    def poll_launcher(self) -> int | None:
        if self._runner is not None:
            return self._poll_runner()
        if len(self._launcher_codes) < len(self._clients):
            return None
        return next((code for code in self._launcher_codes.values() if code), 0)

    def _poll_runner(self) -> int | None:
        """The starter's code; 1 where it stays although all ranks have ended: what a login script left running holds ssh open."""
        assert self._runner is not None
        code = self._runner.poll_launcher()
        if code is not None or len(self.exit_codes) < self._launch.world_size:
            return code
        self._all_exited_at = self._all_exited_at or time.monotonic()
        return 1 if time.monotonic() - self._all_exited_at > RUNNER_EXIT_SECONDS else None

    def send_signal(self, signum: int) -> int:
        for peer in self._clients:
            peer.channel.send(signal=signum)
        return len(self.alive_ranks)

    def is_alive(self) -> bool:
        return bool(self.alive_ranks) or (self._runner is not None and self._runner.is_alive())

    def kill(self) -> list[str]:
        """SIGKILL what is left on every host; where the agent does not answer over another ssh session, once.

        Where that fails too, the agent does it when its line is dead, or its ranks when it no longer beats.
        """
        self._stop_heartbeats()
        asked = [peer for peer in self._clients if not peer.close_reason]
        for peer in asked:
            peer.channel.send(end=True)
        deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
        while time.monotonic() < deadline and any(
            peer not in self._remaining_pids and not peer.close_reason for peer in asked
        ):
            wait_readable(
                [
                    peer.channel.read_fd
                    for peer in asked
                    if peer not in self._remaining_pids and not peer.channel.closed
                ],
                0.2,
            )
            self.poll()
        if self._runner is not None:
            self._runner.kill()
        if self._has_started:  # after the starter, whose end is one of everything that was started since
            unheard = [peer for peer in self._clients if peer not in self._remaining_pids]
            self._add_restart_hint(
                RemoteCleanup(unheard, self._launch_file, self._launch.heartbeat_timeout).wait_for_failures()
            )
        for file in (self._launch_file, self._hostfile):
            file.unlink(missing_ok=True)
        return [f"{pid} on {peer.host.name}" for peer, pids in self._remaining_pids.items() for pid in pids]

    def _add_restart_hint(self, failed_clients: Sequence[AgentClient]) -> None:
        """Say of a lost launch whether the same command can be started at once."""
        if not self._has_failed_host:
            return
        if not failed_clients:
            self.abort_reason += "; nothing of the launch is left there; start the same command again to go on"
            return
        there = " and ".join(f"{self._format_ranks(peer)} on {peer.host.name}" for peer in failed_clients)
        seconds = (RANK_TIMEOUT_FACTOR + 1) * self._launch.heartbeat_timeout
        self.abort_reason += (
            f"; {there} cannot be ended from here: where it still runs, it ends by itself within {seconds:g} s; "
            "wait for that, then start the same command again to go on"
        )

    def wait_for_event(self, timeout: float) -> None:
        wait_readable([peer.channel.read_fd for peer in self._clients], timeout)

    def find_launcher_log(self, rank: int | None) -> Path | None:
        if self._runner is not None:
            return log_path(self.run_dir, 0).with_name(RUNNER_LOG)
        of_rank = (peer.log_path for at, peer in enumerate(self._clients) if rank in (None, *self._launch.ranks_of(at)))
        return next(of_rank, None)


def remove_launch_files(run_dir: Path) -> None:
    """Remove the launch files of launches that were killed. Call it where no other launch can be in this folder."""
    for pattern in ("launch-*.json", "hosts-*", "seen-*"):
        for file in get_workers_dir(run_dir).glob(pattern):
            file.unlink(missing_ok=True)


def _host_entry(client: AgentClient) -> dict[str, Any]:
    facts = client.host_info
    return {
        "hostname": facts["hostname"], "agent": facts["pid"], "heartbeat": facts["heartbeat"], "token": facts["token"],
        "interface": client.interface, "slots": client.host.slots,
    }  # fmt: skip

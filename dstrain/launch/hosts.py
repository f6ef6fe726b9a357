"""Hosts of a launch: an ssh session to each, the checks before the ranks start, and the ranks on all of them."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dstrain import __version__
from dstrain.errors import Fault, UsageError, one_line
from dstrain.files import open_for_writing
from dstrain.launch import host_worker
from dstrain.launch.hostfile import Host
from dstrain.launch.plan import Launch, format_cpu_overload
from dstrain.launch.probe import collect_host_info, hash_source_tree, iter_version_diffs, open_port, try_connect
from dstrain.launch.spawn import LocalWorkerGroup, RankEnd, WorkerGroup, wait_readable
from dstrain.launch.worker import (
    SHARED_FILE_PREFIX,
    RankRecord,
    finish_log_copy,
    get_workers_dir,
    log_path,
    start_log_copy,
)
from dstrain.process_setup import log_stderr

CONNECT_TIMEOUT_SECONDS = 10
"""Limit for ssh to connect."""
ANSWER_TIMEOUT_SECONDS, SECONDS_PER_HOST = 60.0, 0.25
"""Limit for a host to answer before the launch, and what each host adds to it: Pythons of many hosts may start from one
disk."""
KILL_TIMEOUT_SECONDS = 12.0
"""Limit for a host to kill its processes: it tries for 10 s."""
CLOSE_TIMEOUT_SECONDS = 2.0
"""Limit for ssh to end after its input was closed."""
_BLANK_LINES_PER_TIMEOUT = 6
_TAIL_BYTES = 1 << 16


def host_command(host: Host, timeout: float) -> list[str]:
    """Return the command that starts `host_worker` on a host over ssh, without prompts.

    It ends when the host has not answered for about `timeout` seconds. Programs are absolute paths: a login script may define
    aliases.
    """
    # ssh starts in the user's home folder.
    folders = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    path = [f"PYTHONPATH={os.pathsep.join(folders)}"] if folders else []
    words = ["/usr/bin/env", *path, sys.executable, "-P", "-u", "-m", host_worker.__name__]
    # Three missed answers end the session. The user's configuration may hide why (LogLevel QUIET).
    options = (
        "BatchMode=yes",
        f"ConnectTimeout={CONNECT_TIMEOUT_SECONDS}",
        f"ServerAliveInterval={max(1, round(timeout / 3))}",
        "ServerAliveCountMax=3",
        "LogLevel=INFO",
    )
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), host.name, shlex.join(words)]


class HostSession:
    """A host, and the ssh session to its `host_worker`, which ends with this process: its input is closed then."""

    def __init__(self, host: Host, log_dir: Path, timeout: float) -> None:
        self.host = host
        self.log_path = log_dir / f"host-{re.sub(r'[^A-Za-z0-9_.-]', '_', host.name)}.log"
        """What ssh and the host's processes write to stderr."""
        self.info: dict[str, Any] = {}
        """What `collect_host_info` has returned there; empty if the host has not answered."""
        self.listener: int | None = None
        """Descriptor there of the socket that was opened for rank 0."""
        with open_for_writing(self.log_path) as log:
            # No preexec_fn: with it Python forks a copy of this process for each of many hosts.
            self._process = subprocess.Popen(
                host_command(host, timeout),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.messages = host_worker.MessagePipe(self._process.stdout.fileno(), self._process.stdin.fileno())

    def describe_end(self) -> str:
        """Return how the session ended."""
        return f"the ssh session to {self.host.name} ended with code {self._wait_for_exit()} ({self._last_log_line()})"

    def _wait_for_exit(self) -> int | None:
        """Return ssh's exit code: the remote command's, or 255; None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        return self._process.poll()

    def _last_log_line(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        told = [one_line(line) for line in lines if line.strip() and not line.startswith("Warning: Permanently added")]
        return told[-1] if told else "no message"

    def connection_fault(self) -> Fault:
        """Return the fault of a host that has not answered."""
        name = self.host.name
        if not self.messages.closed:
            return self.make_fault(
                "does not answer in time",
                f"`ssh {name} true` must end without a prompt, and Python must start there within a minute; "
                "check the login scripts there, such as ~/.bashrc",
            )
        code, line = self._wait_for_exit(), self._last_log_line()
        if code == 255:
            fix = f"`ssh {name} true` must work without a prompt: fix the name, the network (also its MTU) or the keys"
            return self.make_fault(f"cannot be reached by ssh ({line})", fix)
        if code in (126, 127) or re.search("No module|ModuleNotFound|ImportError", line):
            fix = "install the same Python with dstrain at the same path on every host, or share the folder"
            return self.make_fault(f"dstrain cannot be started there ({line})", fix)
        return self.make_fault(
            f"its login shell or dstrain ended with code {code} before it answered ({line})",
            f"`ssh {name} true; echo $?` must print 0: check the login scripts there, such as ~/.bashrc",
        )

    def make_fault(self, problem: str, fix: str) -> Fault:
        """Return a fault of this host, with its line in the hostfile."""
        return Fault(f"{self.host.location} {self.host.name}", problem, fix)

    def close_input(self) -> None:
        """Close the session's input: the host then kills its ranks and ends."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()

    def close(self, deadline: float) -> None:
        """End the session; kill ssh at the deadline (time.monotonic)."""
        self.close_input()
        assert self._process.stdout is not None
        self._process.stdout.close()
        try:
            self._process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextlib.contextmanager
def open_sessions(hosts: Sequence[Host], log_dir: Path, timeout: float) -> Iterator[list[HostSession]]:
    """Yield sessions to all hosts, and close them at the end. `timeout`: see `host_command`."""
    sessions: list[HostSession] = []
    try:
        for host in hosts:
            sessions.append(HostSession(host, log_dir, timeout))
        yield sessions
    finally:
        for session in sessions:
            session.close_input()
        deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
        for session in sessions:
            session.close(deadline)


def ask(sessions: Sequence[HostSession], function: Callable[..., Any], **arguments: Any) -> dict[HostSession, Any]:
    """Call a function on the hosts, all at once; return what it returns, as JSON, on those that answer in time."""
    for session in sessions:
        session.messages.send(call=f"{function.__module__}:{function.__name__}", arguments=arguments)
    waiting, replies = list(sessions), {}
    deadline = time.monotonic() + ANSWER_TIMEOUT_SECONDS + len(sessions) * SECONDS_PER_HOST
    while waiting and time.monotonic() < deadline:
        wait_readable([session.messages.read_fd for session in waiting], 0.2)
        for session in list(waiting):
            session.messages.receive()
            if session.messages.received:
                replies[session] = session.messages.received.popleft()["reply"]
            if session in replies or session.messages.closed:
                waiting.remove(session)
    return replies


def ask_all(sessions: Sequence[HostSession], function: Callable[..., Any], **arguments: Any) -> dict[HostSession, Any]:
    """Do as `ask`. Raises UsageError that names all hosts that do not answer."""
    replies = ask(sessions, function, **arguments)
    if len(replies) < len(sessions):
        raise UsageError([session.connection_fault() for session in sessions if session not in replies])
    return replies


def check_hosts(launch: Launch, sessions: list[HostSession], run_dir: Path) -> Launch:
    """Check the hosts, and return the launch with the address and port on the first host.

    Raises UsageError with the faults of all hosts.
    """
    request_host_info(sessions, get_workers_dir(run_dir), launch.use_cpu)
    faults = [session.connection_fault() for session in sessions if not session.info]
    faults = faults or [fault for _, fault in iter_host_faults(sessions, run_dir)]
    if faults:
        raise UsageError(faults)
    if not any(session.info["gpus"] for session in sessions):
        for session in sessions:
            warning = format_cpu_overload(len(session.host.slots), session.host.name, session.info["cores"])
            if warning:
                log_stderr(f"warning: {warning}")
    return choose_master(launch, sessions)


def request_host_info(sessions: Sequence[HostSession], shared_dir: Path, use_cpu: bool) -> None:
    """Fill in `info` of the hosts that answer. They look for a file in `shared_dir`, which is created."""
    shared_dir.mkdir(parents=True, exist_ok=True)
    # A new name each time: an NFS client may remember that an earlier one was absent.
    with tempfile.NamedTemporaryFile(dir=shared_dir, prefix=SHARED_FILE_PREFIX) as token:
        replies = ask(sessions, collect_host_info, token=token.name, cwd=os.getcwd(), cpu=use_cpu)
    for session, info in replies.items():
        session.info = info


def iter_host_faults(sessions: Sequence[HostSession], run_dir: Path) -> Iterator[tuple[str, Fault]]:
    """Yield what keeps the hosts that have answered from a common run, with the name of the check."""
    first = sessions[0]
    names: dict[str, str] = {}
    with_gpus = any(session.info["gpus"] for session in sessions)
    for session in sessions:
        host, info, fault = session.host, session.info, session.make_fault
        name = names.setdefault(info["machine"], host.name)
        if name != host.name:
            yield "machine", fault(f"is the same machine as {name}", "name it once, with all its slots")
        if not info["sees"]:
            folders = (
                "mount it there, or use a folder that all hosts share (--run-dir; TMPDIR for other commands than train)"
            )
            yield "run folder", fault(f"does not see {run_dir}", folders)
        if not info["has_cwd"]:
            yield "folder", fault(f"has no folder {Path.cwd()}", "start from a folder that all hosts have")
        for package, wanted, present in iter_version_diffs(first.info["versions"], info["versions"]):
            problem = f"has {package} {present}, {first.host.name} has {wanted}"
            yield "versions", fault(problem, f"install {package} {wanted} on every host")
        if info["code"] != hash_source_tree():  # the messages and the launch are this process's
            problem = f"has other code of dstrain {__version__} than this host"
            yield "versions", fault(problem, "install the same build on every host, or share the folder")
        if with_gpus and info["gpus"] <= max(host.slots):
            problem = f"has {info['gpus']} GPUs, but slot {max(host.slots)} is requested"
            yield "GPUs", fault(problem, "write as many slots as it has GPUs, or select with --include")


def choose_master(launch: Launch, sessions: Sequence[HostSession]) -> Launch:
    """Return the launch with address and port on the first host, which the others reach. Raises UsageError."""
    first, others = sessions[0], sessions[1:]
    address = launch.master_addr or first.info["reached_at"] or next(iter(first.info["addresses"]), "")
    if not address and others:
        raise UsageError(f"{first.host.name} has no address that others could reach; give one with --master-addr")
    address = address or "127.0.0.1"
    opened = ask_all([first], open_port, address=address, port=launch.master_port)[first]
    if "fault" in opened:
        raise UsageError(f"{first.host.name}: {opened['fault']}")
    first.listener, port = opened["listener"], opened["port"]
    replies = ask_all(others, try_connect, address=address, port=port)
    faults = [
        session.make_fault(
            f"does not reach {first.host.name} at {address}, port {port} ({reply['fault']})",
            "open the network between the hosts, or give an address that they reach with --master-addr",
        )
        for session, reply in replies.items()
        if "fault" in reply
    ]
    if faults:
        raise UsageError(faults)
    return replace(launch, master_addr=address, master_port=port)


@contextlib.contextmanager
def open_worker_group(launch: Launch, run_dir: Path) -> Iterator[WorkerGroup]:
    """Yield the worker group of a launch, ready to start. Raises UsageError if a host cannot take part."""
    if not launch.hosts:
        yield LocalWorkerGroup(launch, run_dir)
        return
    logs = log_path(run_dir, 0).parent
    with open_sessions(launch.hosts, logs, launch.heartbeat_timeout) as sessions:
        try:
            yield MultiHostWorkerGroup(check_hosts(launch, sessions, run_dir), sessions, run_dir)
        finally:
            finish_log_copy()


class MultiHostWorkerGroup(WorkerGroup):
    """Ranks on several hosts; `host_worker` starts, watches and kills those of each host."""

    def __init__(self, launch: Launch, sessions: Sequence[HostSession], run_dir: Path) -> None:
        super().__init__(launch, run_dir)
        self._ranks = {session: launch.ranks_of(index) for index, session in enumerate(sessions)}
        self._has_started = self._is_ending = False
        self._remaining_pids: dict[HostSession, list[str]] = {}
        """By host: processes that could not be ended; of the hosts that have done all they do."""
        self._stopped_ranks: dict[HostSession, list[int]] = {}
        """By host, as it has reported last."""
        self._blank_sent_at = 0.0

    @property
    def alive_ranks(self) -> set[int]:
        return set(self.launch.ranks) - self.ends.keys() if self._has_started else set()

    @property
    def supports_bf16(self) -> bool:
        """True unless a host reports a GPU without bf16."""
        return all(session.info["bf16"] is not False for session in self._ranks)

    @property
    def use_cpu(self) -> bool:
        """True if no host has a GPU to use."""
        return not any(session.info["gpus"] for session in self._ranks)

    def find_stopped_ranks(self) -> set[int]:
        stopped = {rank for ranks in self._stopped_ranks.values() for rank in ranks}
        return stopped & self.alive_ranks

    def start(self) -> None:
        self._has_started = True
        log = log_path(self.run_dir, 0)
        # From its present end: the output of earlier launches is not shown again.
        with open_for_writing(log, append=True) as file:
            start_log_copy(log, os.fstat(file.fileno()).st_size)
        environment = {**self.launch.environment, **({"DS_ACCELERATOR": "cpu"} if self.use_cpu else {})}
        for session, ranks in self._ranks.items():
            devices = tuple(map(str, session.host.slots))
            launch = asdict(replace(self.launch, environment=environment, devices=devices, hosts=()))
            launch["ranks"] = [ranks.start, ranks.stop]
            folders = {"run_dir": str(self.run_dir), "cwd": os.getcwd()}
            session.messages.send(start={"launch": launch, "listener": session.listener, **folders})

    def poll(self) -> None:
        for session, ranks in self._ranks.items():
            session.messages.receive()
            while session.messages.received:
                self._handle_message(session, session.messages.received.popleft())
            is_expected = self._is_ending or self.ends.keys() >= set(ranks)
            if session.messages.closed and not is_expected and not self.abort_reason:
                self._abort(session, session.describe_end())
        interval = self.launch.heartbeat_timeout / _BLANK_LINES_PER_TIMEOUT
        if self._has_started and not self._is_ending and time.monotonic() - self._blank_sent_at > interval:
            self._blank_sent_at = time.monotonic()
            for session in self._ranks:
                session.messages.send_blank()

    def _handle_message(self, session: HostSession, message: Mapping[str, Any]) -> None:
        if "ended" in message:
            rank, end = message["ended"]
            record = None if end["record"] is None else RankRecord(**end["record"])
            self.ends[rank] = RankEnd(**end | {"record": record})
        if "stopped" in message:
            self._stopped_ranks[session] = message["stopped"]
        if "aborted" in message and not self._is_ending and not self.abort_reason:
            self._abort(session, f"{session.host.name} {message['aborted']}")
        if "remaining" in message:
            self._remaining_pids[session] = message["remaining"]

    def _abort(self, session: HostSession, reason: str) -> None:
        ranks = ", ".join(map(str, self._ranks[session]))
        self.abort_reason = (
            f"{reason}; rank {ranks} ran there. What still runs on {session.host.name} ends by itself within "
            f"{self.launch.heartbeat_timeout:g} s; start the same command again then to resume"
        )

    def send_signal(self, signum: int) -> int:
        for session in self._ranks:
            session.messages.send(signal=signum)
        return len(self.alive_ranks)

    def is_alive(self) -> bool:
        return bool(self.alive_ranks)

    def kill(self) -> list[str]:
        """Have every host kill its ranks, all at once. Returns the processes that did not end."""
        self._is_ending = True
        for session in self._ranks:
            session.close_input()
        deadline = time.monotonic() + KILL_TIMEOUT_SECONDS
        while time.monotonic() < deadline:
            running = [
                session.messages
                for session in self._ranks
                if self._has_started and session not in self._remaining_pids and not session.messages.closed
            ]
            if not running:
                break
            wait_readable([messages.read_fd for messages in running], 0.2)
            self.poll()
        return [f"{pid} on {session.host.name}" for session, pids in self._remaining_pids.items() for pid in pids]

    def wait_for_event(self, timeout: float) -> None:
        wait_readable([session.messages.read_fd for session in self._ranks if not session.messages.closed], timeout)

    def find_output(self, rank: int) -> Path | None:
        return next(session.log_path for session, ranks in self._ranks.items() if rank in ranks)

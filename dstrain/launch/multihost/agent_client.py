"""The hosts of a launch: one ssh session to an agent on each, requests to all at once, and the checks before the launch."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain import __version__
from dstrain.errors import Fault, UsageError, one_line
from dstrain.launch.command import Launch, format_cpu_overload
from dstrain.launch.multihost.channel import Channel
from dstrain.launch.multihost.hostfile import Host
from dstrain.launch.multihost.probe import find_source_diff, hash_source_files, iter_version_diffs
from dstrain.launch.spawn import wait_readable
from dstrain.launch.worker import SHARED_FILE_PREFIX, get_workers_dir
from dstrain.process_setup import log_stderr

AGENT_MODULE = "dstrain.launch.multihost.agent"
REQUEST_TIMEOUT_SECONDS = 60.0
"""Limit for a host to answer before the launch: Python may be on a slow disk."""
SECONDS_PER_HOST = 0.25
"""Added to that limit for each host: Pythons of many hosts may start from one disk."""
CONNECT_TIMEOUT_SECONDS = 10
"""Limit for ssh to connect."""
CLOSE_TIMEOUT_SECONDS = 2.0
"""Limit for ssh to end after its input was closed."""
_HEARTBEAT_POLL_SECONDS = 0.1
_SSH_MESSAGE = re.compile(
    r"(ssh|kex|client|packet|mux)[\w-]*: |@ +WARNING: |banner exchange: |Load key |Permission denied|Host key |No \S+ host key "
    r"|(\S+@)?\S+: (Permission denied|Bad configuration option|terminating)|Connection (to|closed|reset|timed) |Timeout, server "
    r"|Unable to negotiate |Too many authentication|Bad owner |Received disconnect |Disconnected from |Write failed"
)
"""Beginnings of lines that OpenSSH's client writes; other lines come from the host."""
_TAIL_BYTES = 1 << 16
"""Bytes read from the end of a host's log."""


def agent_command(
    host: Host,
    heartbeat_timeout: float,
    nonce: str,
    module: str = AGENT_MODULE,
    connect_timeout: int = CONNECT_TIMEOUT_SECONDS,
) -> list[str]:
    """Return the command that starts an agent on a host over ssh: without prompts, and with an end when the host is lost.

    Programs are absolute paths: a login script may define aliases.
    """
    # ssh starts in the user's home folder.
    folders = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    path = [f"PYTHONPATH={os.pathsep.join(folders)}"] if folders else []
    # -u: a message must not wait in a buffer.
    words = ["/usr/bin/env", *path, sys.executable, "-P", "-u", "-m", module, f"{heartbeat_timeout:g}", nonce]
    # Three missed answers end the session, after about the heartbeat timeout. A configuration with LogLevel QUIET would
    # hide why a host cannot be reached.
    options = (
        "BatchMode=yes",
        f"ConnectTimeout={connect_timeout}",
        f"ServerAliveInterval={max(1, round(heartbeat_timeout / 3))}",
        "ServerAliveCountMax=3",
        "LogLevel=INFO",
    )
    return ["ssh", "-T", *(word for option in options for word in ("-o", option)), host.name, shlex.join(words)]


class AgentClient:
    """Host, and the ssh session to its agent.

    The session ends with this process, which holds the other end of its input: the agent then ends too.
    """

    def __init__(
        self,
        host: Host,
        log_path: Path,
        heartbeat_timeout: float,
        answer_seconds: float,
        module: str = AGENT_MODULE,
        connect_timeout: int = CONNECT_TIMEOUT_SECONDS,
    ) -> None:
        self.host, self.log_path = host, log_path
        self.answer_seconds = answer_seconds
        """Limit for an answer to a request."""
        self.nonce = secrets.token_hex(8)
        """Random word in the command line of this session's agent; identifies it among other agents."""
        self.host_info: dict[str, Any] = {}
        with log_path.open("ab") as errors:
            # No preexec_fn: with it Python forks a copy of this process for each of many hosts.
            self.process = subprocess.Popen(
                agent_command(host, heartbeat_timeout, self.nonce, module, connect_timeout),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno(), heartbeat_timeout, self.nonce)

    @property
    def close_reason(self) -> str:
        """Reason why the session is lost; empty if it is open."""
        if self.channel.closed:
            code, ssh_error = self._wait_for_exit(), self._find_ssh_error()
            return f"the ssh session to {self.host.name} ended" + (
                f" ({ssh_error})" if ssh_error else f" with code {code}"
            )
        if self.channel.is_timed_out():
            causes = "power, network, or a suspended process or machine"
            return f"{self.host.name} sent no message for {self.channel.heartbeat_timeout:g} s ({causes})"
        return ""

    def _wait_for_exit(self) -> int | None:
        """Return ssh's exit code: the remote command's, or 255; None if it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        return self.process.poll()

    def _read_log_tail(self) -> list[str]:
        """Return the last lines that ssh and the host's processes wrote to stderr."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return [one_line(line) for line in text.splitlines() if line.strip() and not line.startswith("Warning: Perm")]

    def _find_ssh_error(self) -> str:
        """Return the last line that ssh itself wrote; '' if there is none."""
        return next((line for line in reversed(self._read_log_tail()) if _SSH_MESSAGE.match(line)), "")

    def connection_fault(self) -> Fault:
        """Return the fault of a host whose agent does not answer."""
        name = self.host.name
        if not self.channel.closed:
            noise = (
                ", only other output (of its login shell, or of another version of dstrain)"
                if self.channel.has_noise
                else ""
            )
            return self.make_fault(
                f"no answer from its agent in {self.answer_seconds:g} s{noise}",
                f"`ssh {name} true` must end within that time without a prompt, and Python must start there in that time; "
                f"check the login scripts there, such as ~/.bashrc",
            )
        code, lines = self._wait_for_exit(), self._read_log_tail()
        reason = self._find_ssh_error()
        # ssh writes a message where it cannot connect, and none where a signal ends the remote command.
        if code == 255 and (self.channel.has_messages or not reason):
            problem = f"its agent was ended there ({reason or 'ssh ended with code 255 without a message'})"
            fix = (
                "see `dmesg` there: memory may have run out; else check the network between the hosts, and start again"
            )
            return self.make_fault(problem, fix)
        if code == 255:
            fix = f"`ssh {name} true` must work without a prompt: fix the name, the network (also its MTU) or the keys"
            return self.make_fault(f"cannot be reached by ssh ({reason})", fix)
        import_errors = [
            line for line in lines if "dstrain" in line and re.search("No module|ModuleNotFound|ImportError", line)
        ]
        if code in (126, 127) or import_errors:
            fix = "install the same Python with dstrain at the same path on every host, or share the folder"
            return self.make_fault(
                f"dstrain cannot be started there ({[f'code {code}', *lines, *import_errors][-1]})", fix
            )
        return self.make_fault(
            f"its login shell or its agent ended with code {code} before it answered ({['no message', *lines][-1]})",
            f"`ssh {name} true; echo $?` must print 0: check the login scripts there, such as ~/.bashrc",
        )

    def make_fault(self, problem: str, fix: str) -> Fault:
        """Return a fault of this host, with its line in the hostfile."""
        return Fault(f"{self.host.location} {self.host.name}", problem, fix)


def close_sessions(clients: Sequence[AgentClient]) -> None:
    """End the sessions, all at once; the agents kill what they watch over."""
    for client in clients:
        for stream in (client.process.stdin, client.process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
    deadline = time.monotonic() + CLOSE_TIMEOUT_SECONDS
    for client in clients:
        try:
            client.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            client.process.kill()
            client.process.wait()


@contextlib.contextmanager
def open_agents(
    hosts: Sequence[Host], log_dir: Path, heartbeat_timeout: float, module: str = AGENT_MODULE
) -> Iterator[list[AgentClient]]:
    """Yield sessions to all hosts, and close them at the end. A thread sends the heartbeats meanwhile."""
    clients: list[AgentClient] = []
    stop_event = threading.Event()

    def send_heartbeats() -> None:
        while not stop_event.wait(_HEARTBEAT_POLL_SECONDS):
            for client in clients:
                client.channel.send_heartbeat()

    thread = threading.Thread(target=send_heartbeats, name="heartbeats", daemon=True)
    try:
        for host in hosts:
            log = log_dir / f"host-{re.sub(r'[^A-Za-z0-9_.-]', '_', host.name)}.log"
            # Lines of an earlier launch would be taken for messages of this session.
            log.write_bytes(b"")
            answer_seconds = REQUEST_TIMEOUT_SECONDS + len(hosts) * SECONDS_PER_HOST
            clients.append(AgentClient(host, log, heartbeat_timeout, answer_seconds, module))
        thread.start()
        yield clients
    finally:
        stop_event.set()
        if thread.ident is not None:
            thread.join()
        close_sessions(clients)


def request(
    clients: Iterable[AgentClient], make_message: Callable[[AgentClient], Mapping[str, Any]], reply_key: str
) -> dict[AgentClient, Any]:
    """Send each client its message and return the replies. Raises UsageError that names all hosts without a reply."""
    asked = list(clients)
    replies = request_replies(asked, make_message, reply_key)
    if faults := [client.connection_fault() for client in asked if client not in replies]:
        raise UsageError(faults)
    return replies


def request_replies(
    clients: Iterable[AgentClient], make_message: Callable[[AgentClient], Mapping[str, Any]], reply_key: str
) -> dict[AgentClient, Any]:
    """Send each client its message and return the replies of those that answer in time."""
    waiting, replies = list(clients), {}
    for client in waiting:
        client.channel.send(**make_message(client))
    deadline = time.monotonic() + max((client.answer_seconds for client in waiting), default=0.0)
    while waiting and time.monotonic() < deadline:
        wait_readable([client.channel.read_fd for client in waiting if not client.channel.closed], 0.2)
        for client in list(waiting):
            for message in client.channel.read_messages():
                if reply_key in message:
                    replies[client] = message[reply_key]
            if client in replies:
                waiting.remove(client)
        if all(client.channel.closed for client in waiting):
            break
    return replies


def check_hosts(launch: Launch, clients: list[AgentClient], run_dir: Path) -> Launch:
    """Check the hosts, and return the launch with the address and port on the first host.

    Raises UsageError with the faults of all hosts.
    """
    request_host_info(clients, get_workers_dir(run_dir), launch.use_cpu)
    if faults := [client.connection_fault() for client in clients if not client.host_info]:
        raise UsageError(faults)
    if faults := [fault for _, fault in iter_host_faults(clients, run_dir)]:
        raise UsageError(faults)
    if not any(client.host_info["gpus"] for client in clients):
        for client in clients:
            if line := format_cpu_overload(len(client.host.slots), client.host.name, client.host_info["cores"]):
                log_stderr(f"warning: {line}")
    return choose_master(launch, clients)


def request_host_info(clients: list[AgentClient], shared_dir: Path, use_cpu: bool) -> None:
    """Fill in `host_info` of the hosts that answer. They look for a file in `shared_dir`, which is created."""
    shared_dir.mkdir(parents=True, exist_ok=True)
    # A new name each time: an NFS client may remember that an earlier one was absent.
    with tempfile.NamedTemporaryFile(dir=shared_dir, prefix=SHARED_FILE_PREFIX) as token:
        hello = {"token": token.name, "cwd": os.getcwd(), "cpu": use_cpu}
        for client, info in request_replies(clients, lambda _: {"hello": hello}, "host_info").items():
            client.host_info = info


def iter_host_faults(clients: list[AgentClient], run_dir: Path) -> Iterator[tuple[str, Fault]]:
    """Yield what keeps the hosts that have answered from a common run, with the name of the check.

    The version of dstrain is compared with this process, whose messages the agents read; the rest with the first host,
    since the ranks compute together.
    """
    first = clients[0]
    names: dict[str, str] = {}
    with_gpus = any(client.host_info["gpus"] for client in clients)
    for client in clients:
        host, info, fault = client.host, client.host_info, client.make_fault
        # Two names of one machine would start two agents that kill each other's ranks.
        if (other := names.setdefault(info["machine"], host.name)) != host.name:
            yield "machine", fault(f"is the same machine as {other}", "name it once, with all its slots")
        if not info["sees"]:
            folders = (
                "mount it there, or use a folder that all hosts share (--run-dir; TMPDIR for other commands than train)"
            )
            yield "run folder", fault(f"does not see {run_dir}", folders)
        if not info["has_cwd"]:
            yield "folder", fault(f"has no folder {Path.cwd()}", "start from a folder that all hosts have")
        versions = info["versions"]
        if versions["dstrain"] != __version__:
            problem = f"has dstrain {versions['dstrain']}, this host has {__version__}"
            yield "versions", fault(problem, "install the same version on every host")
        for name, wanted, found in iter_version_diffs(first.host_info["versions"], versions):
            if name != "dstrain":
                problem = f"has {name} {found}, {first.host.name} has {wanted}"
                yield "versions", fault(problem, f"install {name} {wanted} on every host")
        file, count = find_source_diff(hash_source_files(), info["digests"])
        if count and versions["dstrain"] == __version__:
            others = f" and {count - 1} more" if count > 1 else ""
            problem = f"has other code of dstrain {__version__} than this host: {file}{others}"
            yield "versions", fault(problem, "install the same build on every host, or share the folder")
        if with_gpus and info["gpus"] <= max(host.slots):
            problem = f"has {info['gpus']} GPUs, but slot {max(host.slots)} is requested"
            yield "GPUs", fault(problem, "write as many slots as it has GPUs, or select with --include")


def choose_master(launch: Launch, clients: list[AgentClient]) -> Launch:
    """Return the launch with address and port on the first host, which the others reach. Raises UsageError."""
    first, others = clients[0], clients[1:]
    address = launch.master_addr or first.host_info["reached_at"] or next(iter(first.host_info["addresses"]), "")
    if not address and others:
        raise UsageError(f"{first.host.name} has no address that others could reach; give one with --master-addr")
    address = address or "127.0.0.1"
    place = {"address": address, "port": launch.master_port}
    opening = request([first], lambda _: {"open": place}, "opened")[first]
    if "fault" in opening:
        raise UsageError(f"{first.host.name}: {opening['fault']}")
    port = opening["port"]
    replies = request(others, lambda _: {"reach": {"address": address, "port": port}}, "reachability")
    if faults := [
        client.make_fault(
            f"does not reach {first.host.name} at {address}, port {port} ({found['fault']})",
            "open the network between the hosts, or give an address that they reach with --master-addr",
        )
        for client, found in replies.items()
        if "fault" in found
    ]:
        raise UsageError(faults)
    return replace(launch, master_addr=address, master_port=port)

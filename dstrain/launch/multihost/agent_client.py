"""Clients of the agents: one ssh session per host, with requests sent to all at once."""

from __future__ import annotations

import contextlib
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.errors import Fault, UsageError, one_line
from dstrain.launch.multihost.channel import Channel
from dstrain.launch.multihost.hostfile import Host
from dstrain.launch.spawn import wait_readable
from dstrain.process_setup import set_parent_death_signal

REQUEST_TIMEOUT_SECONDS = 60.0
"""Limit for a host to answer before the launch: Python may be on a slow disk."""
SECONDS_PER_HOST = 0.25
"""Added to that limit for each host."""
KILL_TIMEOUT_SECONDS = 12.0
"""Limit for a host to kill its processes: it tries for 10 s."""
_SSH_MESSAGE = re.compile(
    r"(ssh|kex|client|packet|mux)[\w-]*: |@ +WARNING: |banner exchange: |Load key |Permission denied|Host key |No \S+ host key "
    r"|(\S+@)?\S+: (Permission denied|Bad configuration option|terminating)|Connection (to|closed|reset|timed) |Timeout, server "
    r"|Unable to negotiate |Too many authentication|Bad owner |Received disconnect |Disconnected from |Write failed"
)
"""Beginnings of lines that OpenSSH's client writes; other lines come from the host."""
_TAIL_BYTES = 1 << 16
"""Bytes read from the end of a host's log."""


def start_session(command: Sequence[str], log_path: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start ssh with a pipe for its output; its error output is appended to the log.

    It ends with this process.
    """
    with log_path.open("ab") as errors:
        return subprocess.Popen(
            list(command),
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            start_new_session=True,
            preexec_fn=set_parent_death_signal,
        )


class AgentClient:
    """Host, and the ssh session to its agent."""

    def __init__(
        self, host: Host, make_command: Callable[[Host, str], Sequence[str]], log_path: Path, heartbeat_timeout: float
    ) -> None:
        self.host = host
        self.nonce = secrets.token_hex(8)
        """Random word in the command line of this session's agent; identifies it among other
        agents."""
        self.host_info: dict[str, Any] = {}
        self.interface = ""
        """Network interface over which the host reaches the master address."""
        self.log_path, self._heartbeat_timeout = log_path, heartbeat_timeout
        # Lines of an earlier launch would be taken for messages of this session.
        log_path.write_bytes(b"")
        self.process = start_session(make_command(host, self.nonce), log_path, subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno(), heartbeat_timeout, self.nonce)
        self.channel.peer_timeout = REQUEST_TIMEOUT_SECONDS

    def use_heartbeat_timeout(self) -> None:
        """Drop the host from now on after the recipe's heartbeat timeout, instead of the longer
        request timeout.
        """
        self.channel.peer_timeout = self._heartbeat_timeout

    @property
    def close_reason(self) -> str:
        """Reason why the session is lost; empty if it is open."""
        if self.channel.closed:
            return f"the ssh session to {self.host.name} ended{self._describe_exit()}"
        if self.channel.is_timed_out():
            causes = "power, network, or a suspended process or machine"
            return f"{self.host.name} sent no message for {self.channel.peer_timeout:g} s ({causes})"
        return ""

    def _describe_exit(self) -> str:
        code = self._wait_for_exit()
        ssh_error = self._find_ssh_error()
        return f" ({ssh_error})" if ssh_error else f" with code {code}"

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
        name, where = self.host.name, f"{self.host.location} {self.host.name}"
        if not self.channel.closed:
            noise = (
                ", only other output (of its login shell, or of another version of dstrain)"
                if self.channel.has_noise
                else ""
            )
            return Fault(
                where,
                f"no answer from its agent in {REQUEST_TIMEOUT_SECONDS:g} s{noise}",
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
            return Fault(where, problem, fix)
        if code == 255:
            fix = f"`ssh {name} true` must work without a prompt: fix the name, the network (also its MTU) or the keys"
            return Fault(where, f"cannot be reached by ssh ({reason})", fix)
        import_errors = [
            line for line in lines if "dstrain" in line and re.search("No module|ModuleNotFound|ImportError", line)
        ]
        if code in (126, 127) or import_errors:
            fix = "install the same Python with dstrain at the same path on every host, or share the folder"
            return Fault(
                where, f"dstrain cannot be started there ({[f'code {code}', *lines, *import_errors][-1]})", fix
            )
        return Fault(
            where,
            f"its login shell or its agent ended with code {code} before it answered ({['no message', *lines][-1]})",
            f"`ssh {name} true; echo $?` must print 0: check the login scripts there, such as ~/.bashrc",
        )

    def close(self) -> None:
        """End the session; the agent kills what it watches over."""
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
            return
        self.process.kill()
        self.process.wait()


def request(
    clients: Iterable[AgentClient], make_message: Callable[[AgentClient], Mapping[str, Any]], reply_key: str
) -> dict[AgentClient, Any]:
    """Send each client its message and return the replies.

    Raises UsageError that names all hosts without a reply.
    """
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
    # Pythons of many hosts may start from one disk.
    deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS + len(waiting) * SECONDS_PER_HOST
    while waiting and time.monotonic() < deadline:
        wait_readable([client.channel.read_fd for client in waiting if not client.channel.closed], 0.2)
        for client in list(waiting):
            for message in client.channel.read_messages():
                if reply_key in message:
                    replies[client] = message[reply_key]
            client.channel.send_heartbeat()
            if client in replies:
                waiting.remove(client)
        if all(client.channel.closed for client in waiting):
            break
    return replies


@contextlib.contextmanager
def open_agents(
    hosts: Sequence[Host], make_command: Callable[[Host, str], Sequence[str]], log_dir: Path, heartbeat_timeout: float
) -> Iterator[list[AgentClient]]:
    """Yield sessions to all hosts, and close them at the end."""
    clients: list[AgentClient] = []
    try:
        for host in hosts:
            log = log_dir / f"host-{re.sub(r'[^A-Za-z0-9_.-]', '_', host.name)}.log"
            clients.append(AgentClient(host, make_command, log, heartbeat_timeout))
        yield clients
    finally:
        for client in clients:
            client.close()

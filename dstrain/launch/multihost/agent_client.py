"""The launching side of the agents: a peer per host, asked all at once."""

from __future__ import annotations

import contextlib
import re
import secrets
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.errors import Fault, UsageError, one_line
from dstrain.launch.multihost.channel import Channel
from dstrain.launch.multihost.hostfile import Host
from dstrain.launch.worker import set_parent_death_signal

REQUEST_TIMEOUT_SECONDS = 60.0
"""For a host to answer before the launch: Python may lie on a slow disk."""
KILL_TIMEOUT_SECONDS = 12.0
"""For a host to kill what is there: it tries for ten."""
_SSH_MESSAGE = re.compile(
    r"(ssh|kex|client|packet|mux)[\w-]*: |@ +WARNING: |banner exchange: |Load key |Permission denied|Host key |No \S+ host key "
    r"|(\S+@)?\S+: (Permission denied|Bad configuration option|terminating)|Connection (to|closed|reset|timed) |Timeout, server "
    r"|Unable to negotiate |Too many authentication|Bad owner |Received disconnect |Disconnected from |Write failed"
)
"""How lines begin that OpenSSH's client writes; others come from the host."""
_TAIL_BYTES = 1 << 16
"""Bytes that are looked at of what a host wrote."""


def start_session(command: Sequence[str], log_path: Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start ssh with a pipe for its output; its error output is appended to the log. It ends with this process."""
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
    """A host and the ssh session to its agent."""

    def __init__(
        self, host: Host, make_command: Callable[[Host, str], Sequence[str]], log_path: Path, heartbeat_timeout: float
    ) -> None:
        self.host = host
        self.nonce = secrets.token_hex(8)
        """Of the session; one word of its agent's command line, and in no other's."""
        self.host_info: dict[str, Any] = {}
        self.interface = ""
        """The one over which it reaches where the ranks meet."""
        self.log_path, self._heartbeat_timeout = log_path, heartbeat_timeout
        log_path.write_bytes(b"")
        self.process = start_session(make_command(host, self.nonce), log_path, subprocess.PIPE)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.channel = Channel(self.process.stdout.fileno(), self.process.stdin.fileno(), heartbeat_timeout, self.nonce)
        self.channel.peer_timeout = REQUEST_TIMEOUT_SECONDS

    def use_heartbeat_timeout(self) -> None:
        """From now on it is given up when it says nothing for as long as the recipe allows."""
        self.channel.peer_timeout = self._heartbeat_timeout

    @property
    def close_reason(self) -> str:
        """Why it is given up; empty where it is there."""
        if self.channel.closed:
            return f"the ssh session to {self.host.name} ended{self._describe_exit()}"
        if self.channel.is_timed_out():
            return f"{self.host.name} said nothing for {self.channel.peer_timeout:g} s (power, network, or a process or machine that stands still)"
        return ""

    def _describe_exit(self) -> str:
        code = self._wait_for_exit()
        said = self._find_ssh_error()
        return f" ({said})" if said else f" with code {code}"

    def _wait_for_exit(self) -> int | None:
        """ssh's exit code: the command's there, or 255; None where it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        return self.process.poll()

    def _read_log_tail(self) -> list[str]:
        """The last lines that ssh and everything on the host wrote to its error output."""
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - _TAIL_BYTES))
            text = log.read().decode(errors="replace")
        return [one_line(line) for line in text.splitlines() if line.strip() and not line.startswith("Warning: Perm")]

    def _find_ssh_error(self) -> str:
        """The last line of ssh's own; empty where there is none."""
        return next((line for line in reversed(self._read_log_tail()) if _SSH_MESSAGE.match(line)), "")

    def connection_fault(self) -> Fault:
        """Why no agent answers there."""
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
                f"`ssh {name} true` must end within that time and ask nothing, and so must the start of Python there; "
                f"check the login scripts there, such as ~/.bashrc",
            )
        code, said = self._wait_for_exit(), self._read_log_tail()
        if code == 255:
            why = self._find_ssh_error() or "ssh ended with code 255 without a message"
            mend = (
                f"`ssh {name} true` must work without a question: fix the name, the network (its MTU too) or the keys"
            )
            return Fault(where, f"cannot be reached by ssh ({why})", mend)
        absent = [
            line for line in said if "dstrain" in line and re.search("No module|ModuleNotFound|ImportError", line)
        ]
        if code in (126, 127) or absent:
            mend = "install the same Python with dstrain at the same path on every host, or share the folder"
            return Fault(where, f"dstrain cannot be started there ({[f'code {code}', *said, *absent][-1]})", mend)
        return Fault(
            where,
            f"its login shell or its agent ended with code {code} before it answered ({['no message', *said][-1]})",
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
    """Each peer's answer to its question. Raises UsageError, with all faults, where some do not answer."""
    waiting, found = list(clients), {}
    for peer in waiting:
        peer.channel.send(**make_message(peer))
    deadline = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    while waiting and time.monotonic() < deadline:
        wait_readable([peer.channel.read_fd for peer in waiting if not peer.channel.closed], 0.2)
        for peer in list(waiting):
            for message in peer.channel.read_messages():
                if reply_key in message:
                    found[peer] = message[reply_key]
            peer.channel.send_heartbeat()
            if peer in found:
                waiting.remove(peer)
        if all(peer.channel.closed for peer in waiting):
            break
    if waiting:
        raise UsageError([peer.connection_fault() for peer in waiting])
    return found


def wait_readable(fds: Iterable[int], timeout: float) -> None:
    """Sleep, but wake when something can be read."""
    poll = select.poll()
    for descriptor in fds:
        poll.register(descriptor, select.POLLIN)
    poll.poll(1000 * timeout)


@contextlib.contextmanager
def open_agents(
    hosts: Sequence[Host], make_command: Callable[[Host, str], Sequence[str]], log_dir: Path, heartbeat_timeout: float
) -> Iterator[list[AgentClient]]:
    """Sessions to all hosts, closed at the end."""
    peers: list[AgentClient] = []
    try:
        for host in hosts:
            log = log_dir / f"host-{re.sub(r'[^A-Za-z0-9_.-]', '_', host.name)}.log"
            peers.append(AgentClient(host, make_command, log, heartbeat_timeout))
        yield peers
    finally:
        for peer in peers:
            peer.close()

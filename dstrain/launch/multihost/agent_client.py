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
from dstrain.launch.multihost.channel import Line
from dstrain.launch.multihost.hostfile import Host
from dstrain.launch.worker import die_with_parent

ANSWER_SECONDS = 60.0
"""For a host to answer before the launch: Python may lie on a slow disk."""
END_SECONDS = 12.0
"""For a host to kill what is there: it tries for ten."""
_SSH_SAYS = re.compile(
    r"(ssh|kex|client|packet|mux)[\w-]*: |@ +WARNING: |banner exchange: |Load key |Permission denied|Host key |No \S+ host key "
    r"|(\S+@)?\S+: (Permission denied|Bad configuration option|terminating)|Connection (to|closed|reset|timed) |Timeout, server "
    r"|Unable to negotiate |Too many authentication|Bad owner |Received disconnect |Disconnected from |Write failed"
)
"""How lines begin that OpenSSH's client writes; others come from the host."""
_TAIL = 1 << 16
"""Bytes that are looked at of what a host wrote."""


class Peer:
    """A host and the ssh session to its agent."""

    def __init__(self, host: Host, command: Callable[[Host, str], Sequence[str]], log: Path, silence: float) -> None:
        self.host = host
        self.nonce = secrets.token_hex(8)
        """Of the session; one word of its agent's command line, and in no other's."""
        self.facts: dict[str, Any] = {}
        self.interface = ""
        """The one over which it reaches where the ranks meet."""
        self.log, self._silence = log, silence
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                list(command(host, self.nonce)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.line = Line(self.process.stdout.fileno(), self.process.stdin.fileno(), silence, self.nonce)
        self.line.patience = ANSWER_SECONDS

    def patient_no_more(self) -> None:
        """From now on it is given up when it says nothing for as long as the recipe allows."""
        self.line.patience = self._silence

    @property
    def lost(self) -> str:
        """Why it is given up; empty where it is there."""
        if self.line.closed:
            return f"the ssh session to {self.host.name} ended{self._why()}"
        if self.line.silent():
            return f"{self.host.name} said nothing for {self.line.patience:g} s (power, network, or a process or machine that stands still)"
        return ""

    def _why(self) -> str:
        code = self._code()
        said = self._ssh_said()
        return f" ({said})" if said else f" with code {code}"

    def _code(self) -> int | None:
        """ssh's exit code: the command's there, or 255; None where it does not end."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        return self.process.poll()

    def _said(self) -> list[str]:
        """The last lines that ssh and everything on the host wrote to its error output."""
        with self.log.open("rb") as log:
            log.seek(max(0, self.log.stat().st_size - _TAIL))
            text = log.read().decode(errors="replace")
        return [one_line(line) for line in text.splitlines() if line.strip() and not line.startswith("Warning: Perm")]

    def _ssh_said(self) -> str:
        """The last line of ssh's own; empty where there is none."""
        return next((line for line in reversed(self._said()) if _SSH_SAYS.match(line)), "")

    def unreachable(self) -> Fault:
        """Why no agent answers there."""
        name, where = self.host.name, f"{self.host.where} {self.host.name}"
        if not self.line.closed:
            noise = (
                ", only other output (of its login shell, or of another version of dstrain)" if self.line.noise else ""
            )
            return Fault(
                where,
                f"no answer from its agent in {ANSWER_SECONDS:g} s{noise}",
                f"`ssh {name} true` must end within that time and ask nothing, and so must the start of Python there; "
                f"check the login scripts there, such as ~/.bashrc",
            )
        code, said = self._code(), self._said()
        if code == 255:
            why = self._ssh_said() or "ssh ended with code 255 without a message"
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


def ask(peers: Iterable[Peer], question: Callable[[Peer], Mapping[str, Any]], answer: str) -> dict[Peer, Any]:
    """Each peer's answer to its question. Raises UsageError, with all faults, where some do not answer."""
    waiting, found = list(peers), {}
    for peer in waiting:
        peer.line.send(**question(peer))
    deadline = time.monotonic() + ANSWER_SECONDS
    while waiting and time.monotonic() < deadline:
        rest([peer.line.read for peer in waiting if not peer.line.closed], 0.2)
        for peer in list(waiting):
            for message in peer.line.receive():
                if answer in message:
                    found[peer] = message[answer]
            peer.line.beat()
            if peer in found:
                waiting.remove(peer)
        if all(peer.line.closed for peer in waiting):
            break
    if waiting:
        raise UsageError([peer.unreachable() for peer in waiting])
    return found


def rest(descriptors: Iterable[int], seconds: float) -> None:
    """Sleep, but wake when something can be read."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    poll.poll(1000 * seconds)


@contextlib.contextmanager
def opened(
    hosts: Sequence[Host], command: Callable[[Host, str], Sequence[str]], logs: Path, silence: float
) -> Iterator[list[Peer]]:
    """Sessions to all hosts, closed at the end."""
    peers: list[Peer] = []
    try:
        for host in hosts:
            log = logs / f"host-{re.sub(r'[^A-Za-z0-9_.-]', '_', host.name)}.log"
            peers.append(Peer(host, command, log, silence))
        yield peers
    finally:
        for peer in peers:
            peer.close()

"""The launching side of the agents: a peer per host, asked all at once."""

from __future__ import annotations

import contextlib
import re
import select
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.errors import Fault, UsageError
from dstrain.launch.hostlist import Host
from dstrain.launch.line import Line
from dstrain.launch.worker import die_with_parent

ANSWER_SECONDS = 60.0
"""For a host to answer before the launch: Python may lie on a slow disk."""
END_SECONDS = 12.0
"""For a host to kill what is there: it tries for ten."""


class Peer:
    """A host and the ssh session to its agent."""

    def __init__(self, host: Host, command: Sequence[str], log: Path, silence: float) -> None:
        self.host = host
        self.facts: dict[str, Any] = {}
        self.interface = ""
        """The one over which it reaches where the ranks meet."""
        self.log, self._silence = log, silence
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.line = Line(self.process.stdout.fileno(), self.process.stdin.fileno(), silence)
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
            return f"{self.host.name} said nothing for {self.line.patience:g} s (power, network, or a machine that stands still)"
        return ""

    def _why(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        said = self.said().splitlines()
        return f" ({said[-1]})" if said else f" with code {self.process.poll()}"

    def said(self) -> str:
        """What ssh and everything on the host wrote to its error output, without warnings of known hosts."""
        text = self.log.read_text(errors="replace")
        return "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("Warning: Perm"))

    def unreachable(self) -> Fault:
        """Why no agent answers there."""
        where = f"{self.host.where} {self.host.name}"
        if not self.line.closed:
            return Fault(where, f"no answer in {ANSWER_SECONDS:g} s", f"try `ssh {self.host.name} true`")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        code, why = self.process.poll(), (self.said().splitlines() or [""])[-1]
        if code == 255:
            mend = f"`ssh {self.host.name} true` must work without a question: mend the name, the network or the keys"
            return Fault(where, f"cannot be reached by ssh ({why})", mend)
        if code in (126, 127) or "dstrain" in why:
            mend = "install the same Python with dstrain at the same path on every host, or share the folder"
            return Fault(where, f"dstrain cannot be started there ({why})", mend)
        return Fault(where, f"its agent ended with code {code} ({why})", f"try `ssh {self.host.name} true`")

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
    hosts: Sequence[Host], command: Callable[[Host], Sequence[str]], logs: Path, silence: float
) -> Iterator[list[Peer]]:
    """Sessions to all hosts, closed at the end."""
    peers: list[Peer] = []
    try:
        for host in hosts:
            log = logs / f"host-{re.sub(r'[^A-Za-z0-9_.-]', '_', host.name)}.log"
            peers.append(Peer(host, command(host), log, silence))
        yield peers
    finally:
        for peer in peers:
            peer.close()

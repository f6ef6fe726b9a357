"""An end to what is left of a launch on a host whose agent was given up: `python -m dstrain.launch.multihost.cleanup HEX NONCE`.

The agent may be stopped or hang, and the host answer ssh all the same. Started over an ssh session of its own, this
kills whatever belongs to the launch file and the agent of that nonce, then prints the nonce and how many are left. HEX
is the path of the launch file in hexadecimal digits: a command line with the path itself would belong to the launch too.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from dstrain.launch.multihost.agent_client import Peer, rest
from dstrain.launch.multihost.plan import remote_command
from dstrain.launch.processes import end_these, marked
from dstrain.launch.worker import LAUNCH, die_with_parent

CLEANUP_SECONDS = 15.0
"""For a host to answer and to kill; one that ssh does not reach says so sooner."""
_CONNECT_SECONDS = 4
AGENT = "dstrain.launch.multihost.agent"
_DONE = "ended: 0 left"


class Cleanups:
    """One attempt per host, all at once."""

    def __init__(self, peers: Sequence[Peer], file: Path, silence: float) -> None:
        self._until = time.monotonic() + CLEANUP_SECONDS
        self._sessions = {peer: _session(peer, file, silence) for peer in peers}

    def failed(self) -> list[Peer]:
        """Wait for all of them; those where something may be left."""
        return [peer for peer, session in self._sessions.items() if not self._ended_all(peer, session)]

    def _ended_all(self, peer: Peer, session: subprocess.Popen[bytes]) -> bool:
        assert session.stdout is not None
        said = b""
        os.set_blocking(session.stdout.fileno(), False)
        while (left := self._until - time.monotonic()) > 0:
            rest([session.stdout.fileno()], left)
            try:
                part = session.stdout.read(1 << 16)
            except OSError:
                break
            if not part:
                break
            said = (said + part)[-(1 << 17) :]
        session.kill()
        session.communicate()
        return f"{peer.nonce} {_DONE}".encode() in said


def _session(peer: Peer, file: Path, silence: float) -> subprocess.Popen[bytes]:
    words = remote_command(
        peer.host, ["dstrain.launch.multihost.cleanup", os.fsencode(file).hex(), peer.nonce], silence, os.environ
    )
    words[1:1] = ["-o", f"ConnectTimeout={_CONNECT_SECONDS}"]  # of an option given twice ssh takes the first
    with peer.log.open("ab") as errors:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def main(path: str, nonce: str) -> int:
    """Kill what belongs to the launch here. The exit code says whether nothing is left."""
    file = os.fsdecode(bytes.fromhex(path))
    left = end_these(lambda: [*marked(file, LAUNCH), *_agents(nonce)])
    print(f"\n{nonce} ended: {len(left)} left", flush=True)
    return bool(left)


def _agents(nonce: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            words = process.cmdline()
            if nonce in words and AGENT in words and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))

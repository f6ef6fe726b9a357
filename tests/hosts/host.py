"""First process of a lab host: `python host.py LAB NUMBER ADDRESS`, in its own namespaces."""

# It sets the host name, file systems and sshd, reads a line when the network cable exists, answers, and runs as long as
# the lab.

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def over(source: Path, target: Path) -> None:
    """Put a file or folder in another's place, for this host alone."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    mount("--rbind", str(source), str(target.resolve()))


def furnish(lab: Path, number: str) -> None:
    """What this host has for itself: /run, /dev/shm, a home, names, and a pkill that writes down what it is asked."""
    socket.sethostname(f"host{number}")
    home = Path(os.environ["HOME"])
    for line in (lab / "etc/visible").read_text().splitlines():  # what the new home would hide
        over(Path(line), lab / "home" / Path(line).relative_to(home))
    mount("--rbind", str(lab / "home"), str(home))
    for name in ("shadow", "resolv.conf"):
        if (Path("/etc") / name).exists():
            over(lab / "etc" / name, Path("/etc") / name)
    over(lab / f"etc/hosts.{number}", Path("/etc/hosts"))
    over(lab / "bin/logged", Path("/usr/bin/pkill"))
    mount("-t", "tmpfs", "tmpfs", "/run")
    mount("-t", "tmpfs", "tmpfs", "/dev/shm")
    Path("/run/sshd").mkdir()


def connect(address: str) -> None:
    # nodad: an IPv6 address is usable at once.
    subnet = [f"{address}/64", "dev", "eth0", "nodad"] if ":" in address else [f"{address}/24", "dev", "eth0"]
    for words in (["addr", "add", *subnet], ["link", "set", "eth0", "up"]):
        subprocess.run(["ip", *words], check=True)


def read_process_id(path: Path) -> int | None:
    """The number in sshd's file; None while sshd has not written it yet: it listens first, then creates, then writes."""
    text = path.read_text() if path.exists() else ""
    return int(text) if text.endswith("\n") else None


def serve(lab: Path, number: str) -> int:
    """Start sshd; returns its process id when it answers."""
    log = str(lab / f"log/sshd.host{number}")
    subprocess.run(["/usr/sbin/sshd", "-f", str(lab / "etc/sshd_config"), "-E", log], check=True)
    for _ in range(500):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", 22), 1):
            if sshd := read_process_id(Path("/run/sshd.pid")):
                return sshd
        time.sleep(0.01)
    raise TimeoutError(f"sshd does not answer; see {log}")


def main() -> None:
    lab, number, address = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    furnish(lab, number)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print("furnished", flush=True)
    sys.stdin.readline()
    connect(address)
    os.chdir("/")
    print(serve(lab, number), flush=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # orphans come here; the kernel buries them
    sys.stdin.read()  # until the lab, or what it runs in, is gone


if __name__ == "__main__":
    main()

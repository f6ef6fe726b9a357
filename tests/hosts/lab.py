"""Hosts for tests on one machine: namespaces with an address, a name, an sshd, and a cable that can be pulled."""

#     with Lab(folder, hosts=2) as lab:
#         job = lab.start(1, ["dstrain", "train", ..., "--hostfile", str(lab.hostfile())])
#         lab.link(2, False)
#         assert job.wait(60) == 1 and not lab.left()
#
# Each host has its own network, host name, processes, mounts, /run, /dev/shm and home; all other files are those of this
# machine. A bridge in a separate namespace connects the hosts: nothing they send leaves the machine, nothing is added to its
# own network, and two labs are not connected. All processes of a host end with the lab, and the lab with this process.

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal

from dstrain.process_setup import set_parent_death_signal
from dstrain.resources import get_extensions_dir
from tests.workers import ROOT

TOOLS = ("unshare", "nsenter", "mount", "ip", "iptables", "sshd", "ssh", "ssh-keygen", "pdsh", "mpirun", "pgrep")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SPACES = ("--net", "--uts", "--pid", "--mount", "--ipc")
_TICK = 0.02

SSH_CONFIG = """Host *
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""
SSHD_CONFIG = """Port 22
HostKey {lab}/etc/hostkey
PidFile /run/sshd.pid
AuthorizedKeysFile {lab}/home/.ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
StrictModes no
UseDNS no
MaxStartups 100:30:200
"""
LOGGED = """#!/bin/bash
echo "$(date +%s.%N) $(hostname) $(basename "$0") $*" >> {lab}/log/pkill
exec "{lab}/bin/$(basename "$0")" "$@"
"""
"""In place of pgrep, which on Debian is pkill too. A host has its own process ids, so what it kills is the host's."""


@cache
def missing() -> str | None:
    """Why no hosts can be made on this machine; None where they can."""
    if os.geteuid() != 0:
        return "hosts are namespaces with mounts, which needs root"
    absent = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    probe = ["unshare", *SPACES, "--fork", "--mount-proc", "ip", "link", "add", "br0", "type", "bridge"]
    done = subprocess.run(probe, capture_output=True, text=True)
    return f"namespaces cannot be made here: {done.stderr.strip()}" if done.returncode else None


@dataclass(frozen=True)
class Process:
    """One process of a host."""

    host: int
    inside: int
    """Its id on the host."""
    outside: int
    """Its id on this machine: what `os.kill` wants."""
    command: str
    state: str
    """R, S, D, T, Z as in proc(5)."""


class Command:
    """A command that was started on a host."""

    def __init__(self, process: subprocess.Popen[bytes], path: Path) -> None:
        self.path = path
        """Of the file that gets its output and its errors."""
        self._process = process  # nsenter; the command is its child

    def wait(self, timeout: float) -> int:
        """The exit code, -N where signal N ended it. Raises TimeoutExpired."""
        return self._process.wait(timeout)

    @property
    def code(self) -> int | None:
        """The exit code; None as long as it runs."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        """Its id on this machine. It leads its session and its process group."""
        place = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        wait_for(lambda: self.code is not None or place.read_text().strip(), 5, "the command did not start")
        return int(place.read_text().split()[0])

    def signal(self, number: int, group: bool = False) -> None:
        """Send a signal to the command; with `group` to its process group, as Ctrl-C does."""
        (os.killpg if group else os.kill)(self.pid, number)
        if number == signal.SIGCONT:  # nsenter stops itself when its child is stopped
            self._process.send_signal(number)

    def output(self) -> str:
        """All it said so far."""
        return self.path.read_text(errors="replace")

    def end(self) -> None:
        if self.code is None:
            self._process.kill()
            with contextlib.suppress(IndexError, OSError):
                self.signal(signal.SIGKILL)
            self._process.wait(10)


class Host:
    """One host's processes as the machine sees them; Lab's own."""

    def __init__(self, lab: Lab, number: int) -> None:
        words = ["unshare", *SPACES, "--fork", "--mount-proc", "--kill-child"]
        words += [sys.executable, "-I", "-S", str(Path(__file__).with_name("host.py"))]
        with (lab.folder / f"log/host{number}").open("ab") as log:
            self._outer = subprocess.Popen(
                [*words, str(lab.folder), str(number), lab.address(number)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
                env={"PATH": PATH, "HOME": str(HOME), "LANG": "C.UTF-8"}, preexec_fn=set_parent_death_signal,
            )  # fmt: skip
        self.number, self.log = number, Path(log.name)
        self.init = 0
        self.sshd = 0
        """Process id of its listener, inside."""

    def furnished(self) -> None:
        """Wait until it can be given a cable."""
        self._hear()
        self.init = int(Path(f"/proc/{self._outer.pid}/task/{self._outer.pid}/children").read_text())

    def connected(self) -> None:
        """Tell it that there is a cable, and wait until it answers ssh."""
        assert self._outer.stdin
        self._outer.stdin.write(b"go\n")
        self._outer.stdin.flush()
        self.sshd = int(self._hear())

    def _hear(self) -> str:
        assert self._outer.stdout
        line = self._outer.stdout.readline().decode()
        if not line:
            raise RuntimeError(f"host{self.number} did not come up:\n{self.log.read_text()[-2000:]}")
        return line

    def off(self) -> None:
        """End it and everything on it at once; no connection is closed."""
        for pipe in (self._outer.stdin, self._outer.stdout):
            assert pipe
            pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.init or self._outer.pid, signal.SIGKILL)
        self._outer.wait(20)


HOME = Path(pwd.getpwuid(os.geteuid()).pw_dir)


class Lab:
    """Some hosts, numbered from 1: host1, host2."""

    def __init__(self, folder: Path, hosts: int = 2, style: Literal["plain", "debian", "ipv6"] = "plain") -> None:
        """`folder` is made: logs, keys, the hosts' home. `style`: debian if /etc/hosts calls a host itself 127.0.1.1, as
        Debian's installer does; ipv6 if the network has no IPv4 addresses."""
        self.folder, self.numbers, self.style = folder.resolve(), range(1, hosts + 1), style
        self._hosts: dict[int, Host] = {}
        self._switch: subprocess.Popen[bytes] | None = None
        self._relay: subprocess.Popen[bytes] | None = None
        self._commands: list[Command] = []
        self._count = itertools.count(1)

    def __enter__(self) -> Lab:
        self._prepare()
        try:
            self._switch = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "ip link add br0 type bridge && ip link set br0 up && echo && exec cat"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PATH": PATH}, preexec_fn=set_parent_death_signal,
                start_new_session=True,
            )  # fmt: skip
            assert self._switch.stdout
            if not self._switch.stdout.readline():
                raise RuntimeError("the bridge between the hosts could not be made")
            self._boot(self.numbers)
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.down()

    def down(self) -> None:
        """Power everything off. Processes, mounts and interfaces go with their namespaces."""
        for host in [*self._hosts.values()]:
            host.off()
        self._hosts.clear()
        for command in self._commands:
            command.end()
        for process in (self._relay, self._switch):
            if process is not None:
                process.kill()
                process.communicate()

    def address(self, host: int) -> str:
        return f"fd77::{10 + host}" if self.style == "ipv6" else f"10.77.0.{10 + host}"

    def hostfile(self, lines: Iterable[str] | None = None, slots: int = 1) -> Path:
        """A new hostfile of these lines; of all hosts by default."""
        path = self.folder / f"hostfile-{next(self._count)}"
        lines = [f"host{number} slots={slots}" for number in self.numbers] if lines is None else lines
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def start(
        self, host: int, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None,
        stdout: Path | None = None,
    ) -> Command:  # fmt: skip
        """Start a command on a host as a login there would: with a clean environment, in a session of its own.

        `cwd`: the lab's folder by default. `stdout`: a file for its output; one in the lab's folder by default.
        """
        path = stdout or self.folder / f"log/host{host}-{next(self._count)}.out"
        login = {"HOME": str(HOME), "USER": "root", "LOGNAME": "root", "SHELL": "/bin/sh", "PATH": PATH}
        login["PYTHONPATH"] = str(ROOT)  # the sources beside these tests, wherever another copy is installed
        words = [f"{name}={value}" for name, value in {**login, "LANG": "C.UTF-8", **(env or {})}.items()]
        clean = ["env", "-i", "--default-signal", f"--chdir={cwd or self.folder}", *words]
        with path.open("wb") as out:
            process = subprocess.Popen(
                [*self._within(host), *clean, "setsid", "--wait", *argv],
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._commands.append(Command(process, path))
        return self._commands[-1]

    def run(self, host: int, argv: Sequence[str], timeout: float = 60, **how: object) -> tuple[int, str]:
        """Run a short command on a host to its end; its exit code and what it said. `how`: as for `start`."""
        command = self.start(host, argv, **how)  # type: ignore[arg-type]
        try:
            return command.wait(timeout), command.output()
        finally:
            command.end()

    def processes(self, host: int) -> list[Process]:
        """What lives on a host, but for its init and its sshd that listens."""
        if host not in self._hosts:
            return []
        init, sshd = self._hosts[host].init, self._hosts[host].sshd
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if not os.path.samestat(os.stat(f"/proc/{init}/ns/pid"), os.stat(folder / "ns/pid")):
                    continue
                facts = dict(re.findall(r"^(Name|State|NSpid):\s*(.*)$", (folder / "status").read_text(), re.M))
                inside = int(facts["NSpid"].split()[-1])
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if inside not in (1, sshd):
                    found.append(
                        Process(host, inside, int(folder.name), words or f"[{facts['Name']}]", facts["State"][0])
                    )
        return sorted(found, key=lambda process: process.inside)

    def find(self, host: int, pattern: str) -> list[Process]:
        """The processes of a host whose command line has this regular expression in it."""
        return [process for process in self.processes(host) if re.search(pattern, process.command)]

    def kill(self, host: int, which: str | int, number: int = signal.SIGKILL) -> list[Process]:
        """Send a signal to the processes of a host that a regular expression finds, or to one by its id there."""
        if isinstance(which, str):
            found = self.find(host, which)
        else:
            found = [process for process in self.processes(host) if process.inside == which]
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.outside, number)
        return found

    def left(self, within: float = 0.0, but: str = "$^") -> list[Process]:
        """What is alive on any host but init, sshd's listener and what a regular expression finds.

        `within`: seconds that may pass until nothing is.
        """
        end = time.monotonic() + within
        while True:
            alive = [process for host in self.numbers for process in self.processes(host) if process.state != "Z"]
            found = [process for process in alive if not re.search(but, process.command)]
            if not found or time.monotonic() >= end:
                return found
            time.sleep(_TICK)

    def link(self, host: int, up: bool) -> None:
        """Plug the cable in, or pull it; the host itself sees no change."""
        self._on_switch(f"link set p{host} {'up' if up else 'down'}")

    def drop(self, host: int, on: bool) -> None:
        """Lose every packet from and to the host, or no longer."""
        for chain, way in (("INPUT", "-i"), ("OUTPUT", "-o")):
            words = ["iptables", "-I" if on else "-D", chain, way, "eth0", "-j", "DROP"]
            subprocess.run([*self._within(host), *words], check=True, env={"PATH": PATH})

    def slow_down(self, seconds: float, loss: float) -> None:
        """Give two hosts a network with latency, one way, and loss: a share of the packets."""
        words = [str(seconds), str(loss)]
        for host in self.numbers:
            words += [str(self._hosts[host].init), self.address(host)]
        self._relay = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("slow_network.py")), *words],
            stdout=subprocess.PIPE, env={"PATH": PATH}, preexec_fn=set_parent_death_signal,
        )  # fmt: skip
        assert self._relay.stdout
        if not self._relay.stdout.readline():
            raise RuntimeError("the slow network could not be made")

    def poweroff(self, host: int) -> None:
        """Everything on the host is gone at once, and nobody is told."""
        self.link(host, False)
        self._hosts.pop(host).off()

    def boot(self, host: int) -> None:
        """Start a host that is off: same name, same address, nothing runs there."""
        self._boot([host])
        for other in self._hosts:  # they may hold it for unreachable
            subprocess.run([*self._within(other), "ip", "neigh", "flush", "all"], check=True, env={"PATH": PATH})

    def cut_ssh(self, host: int) -> list[Process]:
        """Kill the host's ends of all ssh connections; new ones can be made."""
        return self.kill(host, r"^sshd(-session)?: ")

    def keep_apart(self, host: int, folder: Path) -> None:
        """Give a host a folder of its own where the others share one."""
        folder.mkdir(parents=True, exist_ok=True)
        words = ["mount", "-t", "tmpfs", "tmpfs", str(folder)]
        subprocess.run([*self._within(host), *words], check=True, env={"PATH": PATH})

    def replace(self, host: int, file: Path, text: str) -> None:
        """Give a host another file than the others have."""
        own = self.folder / f"etc/replaced-{next(self._count)}"
        own.write_text(text)
        words = ["mount", "--bind", str(own), str(file.resolve())]
        subprocess.run([*self._within(host), *words], check=True, env={"PATH": PATH})

    def login_script(self, text: str) -> None:
        """What every shell on every host reads first that sshd starts."""
        (self.folder / "home/.bashrc").write_text(text)

    def pkills(self) -> list[str]:
        """Each call of pkill or pgrep on any host: `TIME HOST pkill ARGUMENTS`."""
        log = self.folder / "log/pkill"
        return log.read_text().splitlines() if log.exists() else []

    def _prepare(self) -> None:
        for name in ("etc", "bin", "log", "home/.ssh"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        etc, ssh = self.folder / "etc", self.folder / "home/.ssh"
        for key in (etc / "hostkey", ssh / "id_ed25519"):
            if not key.exists():
                subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
        shutil.copy(ssh / "id_ed25519.pub", ssh / "authorized_keys")
        (ssh / "config").write_text(SSH_CONFIG)
        ssh.chmod(0o700)
        (etc / "sshd_config").write_text(SSHD_CONFIG.format(lab=self.folder))
        (etc / "shadow").write_text("root:*:19000:0:99999:7:::\nsshd:!:19000::::::\n")  # sshd refuses a locked root
        (etc / "resolv.conf").write_text("")
        (etc / "visible").write_text("".join(f"{path}\n" for path in _hidden_by_home()))
        for number in self.numbers:
            (etc / f"hosts.{number}").write_text(self._names(number))
        logged, real = self.folder / "bin/logged", Path(shutil.which("pgrep", path=PATH) or "").resolve()
        logged.write_text(LOGGED.format(lab=self.folder))
        logged.chmod(0o755)
        for name in ("pgrep", "pkill"):
            shutil.copy(real, self.folder / "bin" / name)

    def _names(self, own: int) -> str:
        lines = ["127.0.0.1 localhost", *([f"127.0.1.1 host{own}"] if self.style == "debian" else [])]
        others = [number for number in self.numbers if self.style != "debian" or number != own]
        return "".join(f"{line}\n" for line in [*lines, *(f"{self.address(other)} host{other}" for other in others)])

    def _boot(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._hosts[number] = Host(self, number)
        for number in numbers:
            host = self._hosts[number]
            host.furnished()
            with contextlib.suppress(subprocess.CalledProcessError):  # of the host that had this number before
                self._on_switch(f"link del p{number}")
            self._on_switch(
                f"link add p{number} type veth peer name eth0 address 02:00:0a:4d:00:{number:02x} netns {host.init}",
                f"link set p{number} master br0 up",
            )
            host.connected()

    def _on_switch(self, *lines: str) -> None:
        assert self._switch
        words = ["nsenter", "-t", str(self._switch.pid), "-n", "ip", "-batch", "-"]
        text = "".join(f"{line}\n" for line in lines)
        subprocess.run(words, input=text.encode(), capture_output=True, check=True, env={"PATH": PATH})

    def _within(self, host: int) -> list[str]:
        return ["nsenter", "-t", str(self._hosts[host].init), *SPACES, "--"]


def _hidden_by_home() -> list[Path]:
    """What the hosts need of this machine's home, which theirs covers: Python, dstrain, compiled kernels."""
    wanted = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parent.parent, ROOT}
    built = get_extensions_dir(os.environ)
    built.mkdir(parents=True, exist_ok=True)
    inside = sorted(path for path in {*wanted, built} if path.is_relative_to(HOME) and path != HOME)
    return [path for path in inside if not any(path != other and path.is_relative_to(other) for other in inside)]


def wait_for(condition: Callable[[], object], seconds: float, else_say: str) -> None:
    """Until the condition holds. Raises TimeoutError."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(else_say)
        time.sleep(_TICK)

"""Faults that `dstrain doctor` finds on two hosts, as a Markdown table: `python -m tests.hosts.doctor [WORD...]`."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import psutil

from tests.hosts.lab import Lab, missing

BOTH = ("host1 slots=1", "host2 slots=1")
NVIDIA_SMI = """#!/bin/sh
[ "$1" = -L ] && { echo "GPU 0: none (UUID: GPU-0)"; echo "GPU 1: none (UUID: GPU-1)"; }
exit 0
"""


@dataclass(frozen=True)
class Seed:
    """A fault on host2, and the check and words that name it."""

    name: str
    check: str
    words: str
    do: Callable[[Lab, Path], None] = lambda lab, folder: None
    """Does the harm; its second argument is the folder that the hosts share."""
    hostfile: tuple[str, ...] = BOTH
    host: str = "host2"
    state: str = "fault"


def on_host2(line: str) -> Callable[[Lab, Path], None]:
    """Return what adds a line to the login script of host2 alone."""
    return lambda lab, folder: lab.login_script(f'[ "$(hostname)" = host2 ] && {{ {line}; }}\n')


def run(lab: Lab, host: int, *words: str) -> None:
    code, said = lab.run(host, list(words))
    assert code == 0, said


def no_key(lab: Lab, folder: Path) -> None:
    lab.replace(2, lab.folder / "home/.ssh/authorized_keys", "")


def other_transformers(lab: Lab, folder: Path) -> None:
    from importlib import metadata

    files = metadata.files("transformers") or []
    (path,) = [Path(str(file.locate())) for file in files if str(file).endswith("dist-info/METADATA")]
    lab.replace(2, path, "Metadata-Version: 2.1\nName: transformers\nVersion: 4.0.0\n")


def other_code(lab: Lab, folder: Path) -> None:
    import dstrain.units

    path = Path(dstrain.units.__file__)
    lab.replace(2, path, path.read_text() + "\n# other\n")


def broken_package(lab: Lab, folder: Path) -> None:
    lab.replace(2, Path(peft.__file__), "raise ImportError('peft was installed halfway')\n")


def two_gpus(lab: Lab, folder: Path) -> None:
    programs = lab.folder / "programs"
    programs.mkdir()
    (programs / "nvidia-smi").write_text(NVIDIA_SMI)
    (programs / "nvidia-smi").chmod(0o755)
    on_host2(f"export PATH={programs}:$PATH")(lab, folder)


def little_shared_memory(lab: Lab, folder: Path) -> None:
    two_gpus(lab, folder)
    run(lab, 2, "mount", "-o", "remount,size=32m", "/dev/shm")


def read_only(lab: Lab, folder: Path) -> None:
    run(lab, 2, "mount", "--bind", str(folder), str(folder))
    run(lab, 2, "mount", "-o", "remount,ro,bind", str(folder))


def small_cache_disk(lab: Lab, folder: Path) -> None:
    place = lab.folder / "cache"
    place.mkdir()
    run(lab, 2, "mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place))
    on_host2(f"export DSTRAIN_CACHE={place}")(lab, folder)


def clock_ahead(lab: Lab, folder: Path) -> None:
    path = Path(str(psutil.__file__))
    ahead = "\nimport time\n_time = time.time\ntime.time = lambda: _time() + 600\n"
    lab.replace(2, path, path.read_text() + ahead)


def firewall(host: int) -> Callable[[Lab, Path], None]:
    """Return what lets a host be reached at ssh's port alone."""

    def block(lab: Lab, folder: Path) -> None:
        rule = ["-I", "INPUT", "-i", "eth0", "-p", "tcp", "--syn", "!", "--dport", "22", "-j", "DROP"]
        run(lab, host, "iptables", *rule)

    return block


SEEDS = (
    Seed("nothing", "all-reduce", "64.0 MiB on 2 ranks", host="all", state="ok"),
    Seed("a host without a name in DNS", "ssh", "Could not resolve hostname", hostfile=("host1 slots=1", "host9 slots=1"), host="host9"),
    Seed("a host that is off", "ssh", "cannot be reached by ssh", lambda lab, folder: lab.poweroff(2)),
    Seed("no key for ssh", "ssh", "Permission denied", no_key),
    Seed("a host under two names", "machine", "is the same machine as host2", hostfile=(*BOTH, "10.77.0.12 slots=1"), host="10.77.0.12"),
    Seed("another transformers", "versions", "has transformers 4.0.0", other_transformers),
    Seed("other code of dstrain", "versions", "has other code of dstrain", other_code),
    Seed("a package installed halfway", "imports", "peft was installed halfway", broken_package),
    Seed("more slots than GPUs", "GPUs", "has 2 GPUs, but slot 2 is requested", two_gpus, hostfile=("host1 slots=1", "host2 slots=3")),
    Seed("GPUs that torch cannot use", "imports", "torch sees no GPU", two_gpus),
    Seed("little shared memory", "shared memory", "NCCL may fail below", little_shared_memory, state="warning"),
    Seed("the run folder is not shared", "run folder", "does not see", lambda lab, folder: lab.keep_apart(2, folder)),
    Seed("the run folder is read-only", "run folder", "cannot be written", read_only),
    Seed("a full cache disk", "cache disk", "set DSTRAIN_CACHE to a larger disk", small_cache_disk, state="warning"),
    Seed("a clock 10 minutes ahead", "clock", "its clock is 600 s ahead", clock_ahead, state="warning"),
    Seed("few open files", "limits", "ulimit -Hn is below", on_host2("ulimit -n 512"), state="warning"),
    Seed("no compiler", "compiler", "need g++", on_host2("export PATH=/nowhere"), state="warning"),
    Seed("a firewall on host1", "network", "does not reach host1", firewall(1)),
    Seed("a firewall on host2", "network", "does not reach host2", firewall(2), host="host1"),
)  # fmt: skip


def examine(seed: Seed, lab: Lab, folder: Path) -> tuple[dict[str, Any], float]:
    """Return doctor's finding that names the seeded fault, and its seconds. Raises AssertionError."""
    folder.mkdir()
    hostfile = lab.hostfile(seed.hostfile)
    seed.do(lab, folder)
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "dstrain",
        "doctor",
        "--hostfile",
        str(hostfile),
        "--run-dir",
        str(folder),
        "--json",
    ]
    job = lab.start(1, command, env={"DS_ACCELERATOR": "cpu"} if seed.name == "nothing" else {}, cwd=folder.parent)
    code, said = job.wait(200), job.output()
    seconds = time.monotonic() - began
    result = json.loads(said[said.index("{\n") :])
    found = [
        check for check in result["checks"]
        if (check["host"], check["check"], check["state"]) == (seed.host, seed.check, seed.state)
        and seed.words in check["problem"] + check["value"]
    ]  # fmt: skip
    shown = "\n".join(str(check) for check in result["checks"] if check["state"] != "ok" or check["host"] == "all")
    assert found, f"{seed.name} was not found:\n{shown}"
    assert code == (0 if result["ok"] else 1)
    assert seed.state != "fault" or code == 1, said
    assert not [path for path in folder.iterdir() if path.name.startswith(".dstrain-doctor")], "a file is left"
    return found[0], seconds


def main() -> None:
    """A row for each fault; what is not found is told on stderr, and the others follow."""
    if reason := missing():
        sys.exit(reason)
    broken = 0
    print("| fault | host | check | state | doctor says | seconds |\n" + "|---" * 6 + "|")
    with tempfile.TemporaryDirectory() as path:
        for number, seed in enumerate(SEEDS):
            if sys.argv[1:] and not any(word in seed.name for word in sys.argv[1:]):
                continue
            try:
                with Lab(Path(path) / f"lab-{number}") as lab:
                    found, seconds = examine(seed, lab, Path(path) / f"runs-{number}")
            except Exception as error:
                broken += 1
                print(f"{seed.name}: {type(error).__name__}: {error}\n", file=sys.stderr, flush=True)
                continue
            says = (found["problem"] or found["value"]).replace(path, "").replace("|", "/")
            print(f"| {seed.name} | {seed.host} | {seed.check} | {seed.state} | {says} | {seconds:.0f} |", flush=True)
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()

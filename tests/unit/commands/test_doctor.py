"""`dstrain doctor` on this host, and its judgement of what hosts report; on two hosts: tests/hosts/test_doctor.py."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.commands import doctor, environment
from dstrain.commands.doctor import Finding, findings_as_json, show_findings
from dstrain.commands.environment import EnvironmentLine, collect_host_lines


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The libraries are not imported by another process."""
    done = subprocess.CompletedProcess([], 0, stdout="noise\nfound False 0\n", stderr="")
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(environment, "visible_gpus", lambda env: 0)


def line(name: str, folder: Path = Path("/tmp")) -> EnvironmentLine:
    return next(found for found in collect_host_lines(folder, several_hosts=True) if found.name == name)


def test_each_check_of_this_host_has_a_line_and_a_state(quick: None, tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["doctor", "--run-dir", str(tmp_path / "runs"), "--json"])
    result = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert result["ok"] is True
    assert {"imports", "host memory", "limits", "kernels", "run folder", "cache disk"} <= {
        check["check"] for check in result["checks"]
    }
    assert [*tmp_path.iterdir()] == [], "nothing is left"


def test_a_fault_is_shown_with_its_fix_and_exits_with_1(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\nImportError: no \x1b[31m peft")
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: failed)
    done = CliRunner().invoke(main, ["doctor", "--run-dir", str(tmp_path)])
    assert done.exit_code == 1
    assert "fault: ImportError: no \\x1b[31m peft; run `pip install dstrain` again" in done.output
    assert " 1 faults, " in done.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("kind", "hard", "words"),
    [
        (resource.RLIMIT_NOFILE, 512, "ulimit -Hn is below 4096"),
        (resource.RLIMIT_NPROC, 100, "ulimit -Hu is below 1024"),
        (None, 0, ""),
    ],
)
def test_low_limits_are_a_warning(
    kind: int | None, hard: int, words: str, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def getrlimit(asked: int) -> tuple[int, int]:
        return (hard, hard) if asked == kind else (resource.RLIM_INFINITY, resource.RLIM_INFINITY)

    monkeypatch.setattr(environment.resource, "getrlimit", getrlimit)
    found = line("limits")
    assert words in found.warning
    assert bool(found.warning) == bool(words)


def test_little_memory_is_a_warning(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "get_available_memory", lambda: 1 << 30)
    assert line("host memory") == EnvironmentLine("host memory", "1.0 GiB free", line("host memory").warning)
    assert "less than 4.0 GiB" in line("host memory").warning


def test_gpus_that_torch_does_not_see_are_a_fault(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "visible_gpus", lambda env: 2)
    monkeypatch.setattr(environment, "detect_gpu_bytes", lambda env: ([], ""))
    found = line("imports")
    assert found.is_fault
    assert "torch sees no GPU" in found.warning


def test_slow_imports_are_a_warning(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: Any, **__: Any) -> None:
        raise subprocess.TimeoutExpired("python", 50)

    monkeypatch.setattr(environment.subprocess, "run", run)
    assert "install Python on a local disk" in line("imports").warning


def test_a_run_folder_without_permission_is_a_fault(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = line("run folder", Path("/proc/runs"))
    assert found.is_fault
    assert "/proc cannot be written" in found.warning


def test_a_run_folder_in_a_folder_that_may_not_be_entered_is_a_fault(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, stat = tmp_path / "closed", os.stat
    closed.mkdir()

    def stat_as_another_user(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
        if not isinstance(path, int) and closed in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat_as_another_user)
    assert line("run folder", closed / "runs").value == f"{closed} can be written"  # as root; others cannot


@pytest.mark.parametrize(
    ("address", "interface", "is_fault"),
    [("10.0.0.1", "", False), ("127.0.1.1", "eth0", False), ("127.0.1.1", "", True)],
)
def test_a_host_name_at_the_loopback_matters_without_another_interface(
    address: str, interface: str, is_fault: bool, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment.socket, "gethostbyname", lambda name: address)
    monkeypatch.setattr(environment, "find_route_interface", lambda name: interface)
    assert bool(line("host name").warning) == is_fault


def test_a_missing_libaio_is_a_warning(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setattr(environment, "Path", lambda *names: SimpleNamespace(exists=lambda: False))
    assert "apt install libaio-dev" in environment._kernels().warning


def test_a_hostfile_that_is_not_there_is_bad_usage() -> None:
    done = CliRunner().invoke(main, ["doctor", "--hostfile", "/no/such/file"])
    assert done.exit_code == 2
    assert "--hostfile /no/such/file: cannot be read" in done.output


def test_a_run_folder_that_cannot_be_written_here_ends_the_check_of_hosts(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("host1 slots=1\nhost2 slots=1\n")
    done = CliRunner().invoke(
        main, ["doctor", "--hostfile", str(tmp_path / "hosts"), "--run-dir", "/proc/runs", "--json"]
    )
    assert done.exit_code == 1, done.output
    (check,) = json.loads(done.stdout)["checks"]
    assert (check["check"], check["state"]) == ("run folder", "fault")
    assert check["problem"].startswith("/proc/runs cannot be written here")


def test_an_all_reduce_follows_where_nothing_stops_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = [EnvironmentLine("imports", "fine")]
    monkeypatch.setattr(doctor, "collect_host_lines", lambda *_, **__: lines)
    monkeypatch.setattr(doctor, "visible_gpus", lambda env: 2)
    measured = Finding(host="all", check="all-reduce", state="ok", value="fast")
    monkeypatch.setattr(doctor, "check_all_reduce", lambda *_: measured)
    assert doctor.run_doctor(None, tmp_path)[-1] == measured
    lines.append(EnvironmentLine("run folder", "unusable", "no; fix", is_fault=True))
    assert doctor.run_doctor(None, tmp_path)[-1].value == "not tried: 1 faults above"


def test_problems_stand_below_their_check_and_are_counted() -> None:
    findings = [
        Finding(host="host1", check="clock", state="ok", value="+0 s"),
        Finding(
            host="host2", check="clock", state="warning", value="+600 s", problem="its clock is ahead; start chrony"
        ),
        Finding(host="host2", check="ssh", state="fault", problem="no answer; fix it"),
    ]
    lines = show_findings(findings).splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [
        "host1:",
        "host2:",
        "",
        "doctor: 3 checks, 1 faults, 1 warnings",
    ]
    assert lines[4].split() == ["warning:", "its", "clock", "is", "ahead;", "start", "chrony"]
    assert json.loads(findings_as_json(findings))["ok"] is False

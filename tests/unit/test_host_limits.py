"""Counters of processes that the kernel killed for memory, and its log."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from dstrain import host_limits
from dstrain.host_limits import (
    OomKills,
    count_available_cores,
    describe_oom_kill,
    find_cgroup_limits,
    get_available_memory,
    read_oom_kills,
)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without any kill, whose files are in the folder."""
    group = tmp_path / "cgroup/job/step"
    group.mkdir(parents=True)
    (tmp_path / "own").write_text("0::/job/step\n")
    (tmp_path / "cgroup/job/memory.events").write_text("low 0\nhigh 0\nmax 7\noom 0\noom_kill 0\noom_group_kill 0\n")
    (tmp_path / "vmstat").write_text("nr_free_pages 10\noom_kill 4\n")
    (tmp_path / "kmsg").write_text("")
    for name, file in (
        ("CGROUP_ROOT", "cgroup"),
        ("OWN_CGROUP_FILE", "own"),
        ("VMSTAT_FILE", "vmstat"),
        ("KERNEL_LOG", "kmsg"),
    ):
        monkeypatch.setattr(host_limits, name, tmp_path / file)
    return tmp_path


def test_without_a_kill_there_is_no_evidence(host: Path) -> None:
    assert read_oom_kills() == OomKills(in_cgroups=0, on_host=4)
    assert describe_oom_kill(12, read_oom_kills()) == ""


def test_a_counter_that_grew_is_evidence_of_some_kill(host: Path) -> None:
    before = read_oom_kills()
    (host / "vmstat").write_text("oom_kill 5\n")
    assert describe_oom_kill(12, before).endswith("(oom_kill in /proc/vmstat grew)")
    (host / "cgroup/job/memory.events").write_text("oom_kill 1\n")
    assert "the memory of this cgroup was full" in describe_oom_kill(12, before)


def test_a_line_about_the_process_in_the_kernel_log_is_certain(host: Path) -> None:
    line = "3,1,1,-;Out of memory: Killed process 12 (python) total-vm:9000kB, anon-rss:2097152kB, file-rss:0kB\n"
    (host / "kmsg").write_text(line)
    before = read_oom_kills()
    assert describe_oom_kill(12, before) == "", "that was an earlier process with this number"
    (host / "vmstat").write_text("oom_kill 5\n")
    assert describe_oom_kill(12, before) == (
        "the kernel killed it because memory was full (kernel log: 2.0 GiB resident)"
    )
    assert "kernel log" not in describe_oom_kill(1, before)


def test_nothing_is_known_where_the_kernel_tells_nothing(host: Path) -> None:
    for file in ("vmstat", "own", "kmsg"):
        (host / file).unlink()
    assert read_oom_kills() == OomKills()
    assert describe_oom_kill(os.getpid(), OomKills()) == ""


@pytest.mark.parametrize("content", [b"", b"what\n", b"0::\n0:\n", b"\xff\xfe::\n"])
def test_a_file_of_cgroups_in_another_form_is_no_error(content: bytes, host: Path) -> None:
    (host / "own").write_bytes(content)
    assert read_oom_kills().on_host == 4
    assert get_available_memory(find_cgroup_limits()) > 0


def test_reading_never_waits(host: Path) -> None:
    (host / "kmsg").unlink()
    os.mkfifo(host / "kmsg")
    (host / "vmstat").write_text("oom_kill 5\n")
    reader = threading.Thread(target=describe_oom_kill, args=(1, OomKills(on_host=4)), daemon=True)
    reader.start()
    reader.join(5)
    assert not reader.is_alive()


def test_memory_is_limited_by_the_fullest_cgroup(host: Path) -> None:
    group = host / "cgroup/job"
    (group / "memory.max").write_text("1000\n")
    (group / "memory.current").write_text("900\n")
    (group / "step" / "memory.max").write_text("max\n")
    assert [limit.limit_file for limit in find_cgroup_limits()] == [group / "memory.max"]
    assert get_available_memory() == 100
    (group / "memory.current").unlink()
    assert get_available_memory() > 1000, "a limit without a count says nothing"


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        ("0::/job/step", {"job/cpu.max": "150000 100000"}, 2),
        ("0::/job/step", {"job/cpu.max": "max 100000"}, 64),
        ("0::/job/step", {"job/step/cpu.max": "800000 100000", "job/cpu.max": "400000 100000"}, 4),
        ("4:cpu,cpuacct:/job", {"cpu,cpuacct/job/cpu.cfs_quota_us": "300000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/job", {"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, 64),
        ("0::/job/step", {"job/cpu.max": "10000 100000"}, 1),
        ("0::/job/step", {"job/cpu.max": "much"}, 64),
    ],
    ids=["one and a half", "no limit", "the lower of two", "version 1", "version 1 without a limit", "a tenth", "damaged"],
)  # fmt: skip
def test_a_container_has_the_cores_of_its_quota(
    own: str, files: dict[str, str], cores: int, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(64))
    (host / "own").write_text(own + "\n")
    for name, content in files.items():
        (host / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (host / "cgroup" / name).write_text(content + "\n")
    assert count_available_cores() == cores

"""Rank and world size from the variables that launchers set."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch

from dstrain.errors import UsageError
from dstrain.host_limits import describe_ignored_threads, thread_environment, threads_per_process
from dstrain.launch import topology
from dstrain.launch.topology import expand_task_counts, first_host, visible_devices, visible_gpus, worker_from_env

TORCH = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "1"}
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


def place(env):
    worker = worker_from_env(env)
    return worker.rank, worker.local_rank, worker.world_size, worker.local_world_size, worker.launcher


def test_nobody_launched_a_plain_shell():
    assert worker_from_env({"PATH": "/bin"}) is None


def test_deepspeed_torchrun_and_accelerate_are_told_apart():
    assert place({**TORCH, "CROSS_RANK": "0", "LOCAL_SIZE": "2"}) == (3, 1, 4, 2, "deepspeed")
    elastic = {**TORCH, "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}
    assert place(elastic) == (3, 1, 4, 2, "torchrun")
    assert place({**elastic, "ACCELERATE_MIXED_PRECISION": "no"}) == (3, 1, 4, 2, "accelerate")
    assert place(TORCH) == (3, 1, 4, 4, "environment")


def test_what_the_launcher_said_is_not_said_again():
    assert worker_from_env({**TORCH, "LOCAL_WORLD_SIZE": "2"}).environment == {}


def test_accelerate_of_one_process_is_one_worker():
    worker = worker_from_env({"ACCELERATE_MIXED_PRECISION": "no"})
    assert (worker.rank, worker.world_size) == (0, 1)
    assert worker.environment["MASTER_ADDR"] == "127.0.0.1"
    assert "MASTER_PORT" not in worker.environment


def test_an_srun_task_knows_its_place():
    worker = worker_from_env(SLURM)
    assert place(SLURM) == (2, 0, 3, 1, "slurm")
    assert worker.environment == {
        "RANK": "2",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": str(15000 + 101 * 4711 % 15000),
    }


def test_two_slurm_jobs_on_a_node_do_not_meet():
    ports = {worker_from_env({**SLURM, "SLURM_JOB_ID": str(job)}).environment["MASTER_PORT"] for job in range(100)}
    assert len(ports) == 100


def test_a_batch_script_and_an_interactive_step_launch_their_own():
    batch = {name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}
    assert worker_from_env(batch) is None
    assert worker_from_env({**SLURM, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


def test_mpirun_goes_before_the_slurm_daemon_it_runs_under():
    assert place({**SLURM, **OPENMPI}) == (1, 1, 2, 2, "openmpi")
    assert worker_from_env(OPENMPI).environment["MASTER_ADDR"] == "127.0.0.1"


def test_mpirun_over_hosts_needs_an_address():
    spread = {**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    with pytest.raises(UsageError, match="-x MASTER_ADDR"):
        worker_from_env(spread)
    assert "MASTER_ADDR" not in worker_from_env({**spread, "MASTER_ADDR": "host1"}).environment


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"),
        ("a,b[1-2]", "a"),
        ("node[01-03,7]", "node01"),
        ("node[7,9-10]-ib,login", "node7-ib"),
        ("r[1-2]n[3-4]", "r1n3"),
    ],
)
def test_the_first_host_of_slurms_list_has_rank_0(nodelist, first):
    assert first_host(nodelist) == first


@pytest.mark.parametrize("nodelist", ["node[a-b]", "node[1", "", ","])
def test_a_broken_host_list_is_named(nodelist):
    with pytest.raises(UsageError, match="names no host"):
        first_host(nodelist)


def test_slurms_counts_expand():
    assert expand_task_counts("2(x3),1") == [2, 2, 2, 1]
    with pytest.raises(UsageError):
        expand_task_counts("2(x)")


@pytest.mark.parametrize(
    ("listed", "present", "seen"),
    [
        (None, 2, ["0", "1"]),
        ("1", 2, ["1"]),
        ("1,5,0", 2, ["1"]),
        ("0,1", 0, []),
        ("-1", 2, []),
        ("1,0", 2, ["1", "0"]),
        ("0,-1,1", 2, ["0"]),
        ("0,,1", 2, ["0"]),
        (",0", 2, []),
        (" 1 , 0", 2, ["1", "0"]),
        ("1gpu2,+0", 2, ["1", "0"]),
        ("0,1,0", 2, []),
        ("none", 2, []),
        ("0,GPU-abc", 2, ["0"]),
        ("GPU-abc,1", 2, ["GPU-abc"]),
        ("GPU-abc,GPU-d", 2, ["GPU-abc", "GPU-d"]),
        ("GPU-abc", 0, []),
        ("MIG-4f6a,MIG-77", 2, ["MIG-4f6a"]),
        ("MIG-GPU-4f6a/1/0", 2, ["MIG-GPU-4f6a/1/0"]),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(listed, present, seen):
    assert visible_devices(listed, present) == seen


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        ("GPU-12,GPU-9", ["GPU-12", "GPU-9"]),
        ("GPU-9abc", ["GPU-9abc"]),
        ("GPU-1", []),  # two begin so
        ("GPU-12,GPU-77,GPU-9", ["GPU-12"]),
        ("GPU-12,GPU-12ab", []),  # the same one twice
    ],
)
def test_a_uuid_may_be_cut_where_it_stays_unique(listed, seen):
    assert visible_devices(listed, 3, ["GPU-12ab", "GPU-13ab", "GPU-9abc"]) == seen


def test_torch_counts_the_same_devices(monkeypatch):
    """Its parser is written after CUDA's."""
    for listed in (
        "1,0",
        "0,-1,1",
        "0,,1",
        "1gpu2,+0",
        "0,1,0",
        "none",
        "0,GPU-abc",
        "GPU-abc,1",
        "0,5,1",
        "GPU-a,GPU-a",
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        parsed = [str(device) for device in torch.cuda._parse_visible_devices()]
        known = parsed[: parsed.index("5")] if "5" in parsed else parsed
        assert visible_devices(listed, 2) == known, listed


def test_hidden_gpus_are_not_asked_for(monkeypatch):
    monkeypatch.setattr(topology, "count_gpus", lambda: pytest.fail("the machine was asked"))
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0,1", "DS_ACCELERATOR": "cpu"}) == 0


def fake_nvidia_smi(folder: Path, monkeypatch) -> None:
    script = folder / "nvidia-smi"
    script.write_text(
        "#!/bin/sh\n"
        'case "$1" in\n'
        '-L) echo "GPU 0: A (UUID: GPU-1)"; echo "  MIG 1g.10gb Device 0: (UUID: MIG-1)"; echo "GPU 1: A (UUID: GPU-2)";;\n'
        "*) printf '8.0\\n7.5\\n';;\nesac\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_gpus_are_counted_by_nvidia_smi(tmp_path, monkeypatch):
    fake_nvidia_smi(tmp_path, monkeypatch)
    assert visible_gpus({}) == 2
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-1,GPU-7"}) == 2
    assert topology.gpus_support_bf16() is False


def test_without_nvidia_smi_nothing_is_claimed_about_bf16(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert topology.gpus_support_bf16() is None


def test_processes_share_the_cores_whatever_the_launcher_set():
    assert [threads_per_process(processes, 8) for processes in (1, 3, 16)] == [8, 2, 1]
    assert thread_environment({"OMP_NUM_THREADS": "1", "A": "b"}, 2, 8) == {
        "A": "b",
        "OMP_NUM_THREADS": "4",
        "MKL_NUM_THREADS": "4",
    }


@pytest.mark.parametrize(
    ("env", "threads", "is_told"),
    [
        ({}, 2, False),
        ({"OMP_NUM_THREADS": "2"}, 2, False),
        ({"OMP_NUM_THREADS": "4"}, 2, True),
        ({"OMP_NUM_THREADS": "1"}, None, True),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"}, 2, False),
        ({"OMP_NUM_THREADS": "4", "TORCHELASTIC_RUN_ID": "x"}, 2, True),
    ],
)
def test_a_number_of_threads_that_is_not_used_is_told(env: dict[str, str], threads: int | None, is_told: bool) -> None:
    assert ("is not used" in describe_ignored_threads(env, threads)) == is_told

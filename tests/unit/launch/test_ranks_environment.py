"""Settings of a worker before it computes: device, memory, network."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from dstrain.config.schema import RunConfig
from dstrain.launch.multihost import probe
from dstrain.launch.topology import Worker, worker_from_env
from dstrain.train.setup.plan import ALLOCATOR_ENV_VARS, set_up_process

SLURM = {
    "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_NODELIST": "node[1-2]",
}  # fmt: skip
MPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("SIZE", "2"))}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.device]:
    """`start(environment, gpus)` -> the device of a worker that sees so many GPUs; os.environ is as it would be after."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)

    def started(found: dict[str, str], gpus: int = 0) -> torch.device:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        monkeypatch.setattr(os, "environ", {**inherited, **found})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        worker = worker_from_env(os.environ)
        assert worker is not None
        return set_up_process(worker, RunConfig())

    return started


@pytest.mark.parametrize(("gpus", "index"), [(1, 0), (4, 1)])
def test_deepspeed_takes_the_device_that_the_task_sees(
    start: Callable[..., torch.device], gpus: int, index: int
) -> None:
    """Slurm shows each task one GPU with --gpus-per-task=1, and DeepSpeed computes on the one that LOCAL_RANK names."""
    assert start(SLURM, gpus) == torch.device("cuda", index)
    assert os.environ["LOCAL_RANK"] == str(index)
    assert os.environ["RANK"] == "5", "its place among all processes stays"


def test_open_mpi_says_the_same_place(start: Callable[..., torch.device]) -> None:
    """DeepSpeed asserts that both names say one thing (runtime/engine.py)."""
    start({**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1)
    assert os.environ["LOCAL_RANK"] == os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] == "0"


def test_memory_on_a_gpu_grows_in_place_unless_somebody_says_otherwise(start: Callable[..., torch.device]) -> None:
    start(SLURM, 1)
    assert os.environ[ALLOCATOR_ENV_VARS[0]] == "expandable_segments:True"
    for name in ALLOCATOR_ENV_VARS:
        start({**SLURM, name: "max_split_size_mb:512"}, 1)
        assert {name: os.environ[name] for name in ALLOCATOR_ENV_VARS if name in os.environ} == {
            name: "max_split_size_mb:512"
        }
    start({**SLURM, "DS_ACCELERATOR": "cpu"}, 1)
    assert ALLOCATOR_ENV_VARS[0] not in os.environ


def test_a_process_that_nobody_launched_needs_no_address(
    start: Callable[..., torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    set_up_process(worker(1, 1), RunConfig())
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def worker(world: int, local: int) -> Worker:
    return Worker(rank=0, local_rank=0, world_size=world, launcher="torchrun", local_world_size=local)


@pytest.fixture
def two_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host on two networks, with the default route over the first; it takes its own name for loopback."""
    ways = {"10.0.0.9": "eth0", "10.1.0.9": "ib0", probe._EXTERNAL_ADDRESS: "eth0", "127.0.1.1": ""}
    monkeypatch.setattr(probe, "find_route_interface", ways.__getitem__)


@pytest.mark.parametrize(
    ("processes", "master", "interface"),
    [
        ((4, 2), "10.1.0.9", "ib0"),
        ((4, 2), "127.0.1.1", "eth0"),  # rank 0's host: MASTER_ADDR is its own name, Debian's 127.0.1.1
        ((4, 4), "10.0.0.9", "eth0"),  # a launcher that does not say how many are here
        ((4, 4), "127.0.1.1", ""),
        ((1, 1), "10.0.0.9", ""),
        ((1, 1), "", ""),  # a command alone
        ((4, 2), "", ""),
    ],
)
def test_gloo_is_told_the_way_to_other_hosts(
    processes: tuple[int, int], master: str, interface: str, two_networks: None
) -> None:
    assert probe.find_gloo_interface(worker(*processes), master) == interface


def test_every_launcher_tells_gloo_the_way(start: Callable[..., torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_route_interface", lambda address: {"node1": "eth1"}[address])
    start(SLURM)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth1"
    start({**SLURM, "GLOO_SOCKET_IFNAME": "ib0"})
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"

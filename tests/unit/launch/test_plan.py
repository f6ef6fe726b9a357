"""Command lines for several hosts, word by word."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable

import pytest
import torch

from dstrain.commands.train import show_launch
from dstrain.config.schema import LaunchConfig, RunConfig
from dstrain.distributed.store import RANK_KEY_ENV
from dstrain.errors import UsageError
from dstrain.launch import probe
from dstrain.launch.hosts import host_command
from dstrain.launch.plan import (
    Launch,
    LaunchOptions,
    build_remote_env,
    cpu_overload_warning,
    plan_launch,
    rank_command,
    read_env_file,
)
from dstrain.launch.topology import Worker, worker_from_env
from dstrain.planner.workload import ALLOCATOR_ENV_VARS
from dstrain.training.plan import set_up_process

PYTHON = shlex.quote(sys.executable)
SSH = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 -o LogLevel=INFO"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setattr("dstrain.launch.plan.shutil.which", lambda name: name)
    (tmp_path / "F").write_text("host1 slots=2\nhost2 slots=4\n")

    def make(env: dict[str, str] | None = None, config: LaunchConfig | None = None, **options):
        options = LaunchOptions(hostfile=str(tmp_path / "F"), **options)
        return plan_launch(options, ["train", "r.yaml"], env or {}, config or LaunchConfig())

    return make


def test_a_hosts_command_survives_the_remote_shell(plan, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/a b:c:")
    words = host_command(plan().hosts[1], 30.0)
    assert shlex.join(words[:-1]) == f"ssh -T {SSH} host2"
    assert shlex.split(words[-1]) == ["/usr/bin/env", f"PYTHONPATH=/a b:{os.getcwd()}/c", sys.executable, "-P", "-u", "-m",
                                      "dstrain.launch.host_worker"]  # fmt: skip


def test_no_secret_stands_on_a_command_line(plan):
    secrets = {"HF_TOKEN": "hf-secret", "WANDB_API_KEY": "w-secret", "MLFLOW_TRACKING_PASSWORD": "m-secret",
               "NCCL_X": "n-secret", "PYTHONX": "p-secret"}  # fmt: skip
    launch = plan(secrets, LaunchConfig(env=["OWN=o-secret"]))
    assert "secret" not in show_launch(launch)
    assert launch.environment.pop(RANK_KEY_ENV) not in show_launch(launch)
    assert launch.environment == secrets | {"OWN": "o-secret"}


def test_ranks_follow_the_hosts(plan):
    launch = plan()
    assert (launch.world_size, launch.ranks_of(0), launch.ranks_of(1)) == (6, range(2), range(2, 6))


def test_without_ssh_a_host_runs_its_share(plan):
    launch = plan({"CUDA_VISIBLE_DEVICES": ""}, no_ssh=True, node_rank=1, master_addr="10.0.0.9", master_port=29555)
    assert (launch.hosts, launch.has_all_ranks) == ((), False)
    assert (launch.world_size, launch.ranks, launch.use_cpu) == (6, range(2, 6), True)
    assert (launch.master_addr, launch.master_port) == ("10.0.0.9", 29555)
    assert launch.argv == rank_command(["train", "r.yaml"])
    assert plan(no_ssh=True, node_rank=1).master_addr == "host1"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"no_ssh": True}, "add --node-rank K, from 0 on host1 to 1 on host2"),
        ({"no_ssh": True, "node_rank": 2}, "add --node-rank K"),
        ({"node_rank": 1}, "works only with --no-ssh"),
    ],
)
def test_options_that_do_not_fit_are_refused(plan, options, said):
    with pytest.raises(UsageError, match=said):
        plan(**options)


def test_ssh_that_is_missing_is_named_with_its_package(plan, monkeypatch):
    monkeypatch.setattr("dstrain.launch.plan.shutil.which", lambda name: None)
    with pytest.raises(UsageError, match=r"ssh is not installed here; install it \(apt install openssh-client\)"):
        plan()


def test_a_dry_run_says_what_it_would_ask_the_hosts(plan):
    lines = show_launch(plan()).splitlines()
    assert [line.split()[0] for line in lines] == ["ssh", "ssh", "RANK=<0", "RANK=<2"]
    assert lines[-1].startswith("RANK=<2 to 5> LOCAL_RANK=<0 to 3> WORLD_SIZE=6 LOCAL_WORLD_SIZE=4 ")
    assert f"MASTER_ADDR=<address of host1> MASTER_PORT=<free port on host1> {PYTHON} -P -u -m dstrain.cli" in lines[-1]


def test_more_processes_than_cores_are_warned_of(monkeypatch):
    def make(here: int, devices: int = 0) -> Launch:
        environment = {} if devices else {"DS_ACCELERATOR": "cpu"}
        return Launch(argv=[], environment=environment, world_size=99, ranks=range(here), devices=("0",) * devices)

    monkeypatch.setattr("dstrain.launch.plan.count_available_cores", lambda: 2)
    assert cpu_overload_warning(make(2)) == cpu_overload_warning(make(99, devices=99)) == ""
    assert cpu_overload_warning(make(99)).startswith(
        "99 processes are started on this machine, which has 2 CPU cores: they share"
    )


# Environment variables that are forwarded to other hosts.


def test_what_a_run_needs_travels_and_the_rest_stays():
    env = {"HF_TOKEN": "s", "WANDB_API_KEY": "k", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "ib0", "TORCH_LOGS": "x",
           "OMP_NUM_THREADS": "3", "CUDA_HOME": "/c", "DSTRAIN_CACHE": "/d", "HOME": "/h", "PATH": "/p",
           "CUDA_VISIBLE_DEVICES": "1", "DSTRAIN_SUPERVISOR": "host 1", "DSTRAIN_HOST_TIMEOUT": "30",
           "DSTRAIN_LISTENER": "3"}  # fmt: skip
    assert set(env) - set(build_remote_env(env, [], ())) == {
        "HOME", "PATH", "CUDA_VISIBLE_DEVICES", "DSTRAIN_SUPERVISOR", "DSTRAIN_HOST_TIMEOUT", "DSTRAIN_LISTENER",
    }  # fmt: skip


def test_launch_env_names_more_and_wins(tmp_path):
    (tmp_path / "env").write_text("MINE=file\n")
    env = {"MINE": "here", "AWS_PROFILE": "a=b"}
    assert build_remote_env(env, ["AWS_PROFILE", "MINE=json={}"], [tmp_path / "env"]) == {
        "AWS_PROFILE": "a=b",
        "MINE": "json={}",
    }
    with pytest.raises(UsageError, match=r"launch\.env: LOST is not set here; set it, write LOST=value"):
        build_remote_env(env, ["LOST"], ())


def test_deepspeeds_file_may_hold_comments_blank_lines_and_json(tmp_path):
    (tmp_path / "env").write_text("# ours\n\nA=1\nexport B='two words'\nC={\"k\": 1}\nD=$HOME/x\nE=a=b\n")
    assert read_env_file(tmp_path / "env", {"HOME": "/root"}) == {
        "A": "1", "B": "two words", "C": '{"k": 1}', "D": "/root/x", "E": "a=b",
    }  # fmt: skip
    (tmp_path / "env").write_text("A=1\nno value\n=x\n")
    with pytest.raises(UsageError) as caught:
        read_env_file(tmp_path / "env", {})
    assert [fault.where for fault in caught.value.faults] == [f"{tmp_path / 'env'}:2", f"{tmp_path / 'env'}:3"]
    assert read_env_file(tmp_path / "none", {}) == {}


# Settings of a worker before it computes: device, memory, network.


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

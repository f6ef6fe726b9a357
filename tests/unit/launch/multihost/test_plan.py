"""Command lines for several hosts, word by word."""

from __future__ import annotations

import base64
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dstrain.config.schema import LaunchConfig, RunConfig
from dstrain.distributed.store import RANK_KEY_ENV
from dstrain.errors import UsageError
from dstrain.launch.command import LaunchOptions, LocalLaunch
from dstrain.launch.multihost import probe
from dstrain.launch.multihost.plan import (
    MasterEndpoint,
    MultiHostLaunch,
    agent_command,
    build_remote_env,
    check_runner,
    cpu_overload_warning,
    node_command,
    plan_launch,
    read_env_file,
    runner_command,
    runner_environment,
    show_launch,
)
from dstrain.launch.topology import Worker, worker_from_env
from dstrain.train.setup.plan import ALLOCATOR_ENV_VARS, set_up_process

PYTHON = shlex.quote(sys.executable)
MASTER = MasterEndpoint("10.0.0.1", 29501)
FILE = Path("/runs/a/.workers/launch-1.json")
SSH = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 -o LogLevel=INFO"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setattr("dstrain.launch.multihost.plan.shutil.which", lambda name: name)
    (tmp_path / "F").write_text("host1 slots=2\nhost2 slots=4\n")

    def make(env: dict[str, str] | None = None, config: LaunchConfig | None = None, **options):
        options = LaunchOptions(hostfile=str(tmp_path / "F"), **options)
        return plan_launch(options, ["train", "r.yaml"], env or {}, config or LaunchConfig())

    return make


def starter(launch: MultiHostLaunch) -> str:
    command = runner_command(launch, Path("/runs/a/.workers/hosts-1"), MASTER, FILE)
    assert command is not None
    return shlex.join(command)


def test_pdsh_is_the_default_and_gets_paths_alone(plan):
    assert starter(plan(include="host1@host2:1,3")) == (
        f"{PYTHON} -m deepspeed.launcher.runner --hostfile /runs/a/.workers/hosts-1 --no_ssh_check "
        "--include host1:0,1@host2:1,3 --master_addr 10.0.0.1 --master_port 29501 --force_multi --no_local_rank "
        f"--launcher_args=-N --module dstrain.launch.multihost.rank_main {FILE}"
    )


def test_openmpi_binds_nothing_and_reaches_hosts_like_ssh_does(plan):
    command = starter(plan(launcher="openmpi"))
    assert "--include" not in command
    words = shlex.split(command)
    assert words[words.index("openmpi") + 1] == (
        f"--launcher_args=--bind-to none --mca btl_tcp_if_include lo --mca plm_rsh_no_tree_spawn 1 "
        f"--mca plm_rsh_args '{SSH}' --mca orte_launch_agent 'env DSTRAIN_LAUNCH={FILE} orted'"
    )


def test_agents_start_deepspeeds_inner_launcher_or_torchrun(plan):
    launch = plan(launcher="ssh")
    assert runner_command(launch, FILE, MASTER, FILE) is None
    words = node_command(launch, 1, MASTER, ["m", "a"])
    world = json.loads(base64.urlsafe_b64decode(words[4].removeprefix("--world_info=")))
    assert list(world.items()) == [("host1", [0, 1]), ("host2", [0, 1, 2, 3])]
    assert words[5:] == ["--node_rank=1", "--master_addr=10.0.0.1", "--master_port=29501", "--log_level=critical",
                         "--no_local_rank", "--module", "m", "a"]  # fmt: skip
    assert shlex.join(node_command(plan(launcher="torchrun"), 1, MASTER, ["m", "a"])) == (
        f"{PYTHON} -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 4 "
        "--master-addr 10.0.0.1 --master-port 29501 -m m a"
    )


def test_an_agents_command_survives_the_remote_shell(plan):
    words = agent_command(plan().hosts[1], 30.0, "a1b2", {"PYTHONPATH": "/a b:/c"})
    assert shlex.join(words[:-1]) == f"ssh -T {SSH} host2"
    assert shlex.split(words[-1]) == ["/usr/bin/env", "PYTHONPATH=/a b:/c", sys.executable, "-u", "-m",
                                      "dstrain.launch.multihost.agent", "30", "a1b2"]  # fmt: skip


def test_no_secret_stands_on_a_command_line(plan):
    secrets = {"HF_TOKEN": "hf-secret", "WANDB_API_KEY": "w-secret", "MLFLOW_TRACKING_PASSWORD": "m-secret",
               "NCCL_X": "n-secret", "PYTHONX": "p-secret"}  # fmt: skip
    for launcher in ("deepspeed", "openmpi", "ssh", "torchrun"):
        launch = plan(secrets, LaunchConfig(env=["OWN=o-secret"]), launcher=launcher)
        assert "secret" not in show_launch(launch, Path("/runs/a"))
        assert launch.environment.pop(RANK_KEY_ENV) not in show_launch(launch, Path("/runs/a"))
        assert launch.environment == secrets | {"OWN": "o-secret"}
        # DeepSpeed's runner exports these by writing them into the command for pdsh.
        assert not {"MLFLOW_TRACKING_PASSWORD", "NCCL_X", "PYTHONX"} & set(runner_environment(launch, secrets))


def test_ranks_follow_the_hosts(plan):
    launch = plan()
    assert (launch.world_size, launch.ranks_of(0), launch.ranks_of(1)) == (6, range(2), range(2, 6))


def test_without_ssh_a_host_runs_its_share(plan):
    launch = plan({"CUDA_VISIBLE_DEVICES": ""}, no_ssh=True, node_rank=1, master_addr="10.0.0.9", master_port=29555)
    assert isinstance(launch, LocalLaunch)
    assert (launch.world_size, launch.ranks, launch.use_cpu) == (6, range(2, 6), True)
    assert launch.argv[5:] == ["--node_rank=1", "--master_addr=10.0.0.9", "--master_port=29555", "--log_level=critical",
                               "--no_local_rank", "--module", "dstrain.cli", "train", "r.yaml"]  # fmt: skip
    assert "--master_addr=host1" in plan(no_ssh=True, node_rank=1).argv


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"no_ssh": True}, "add --node-rank K, from 0 on host1 to 1 on host2"),
        ({"no_ssh": True, "node_rank": 2}, "add --node-rank K"),
        ({"node_rank": 1}, "works only with --no-ssh"),
        ({"no_ssh": True, "node_rank": 1, "launcher": "openmpi"}, "use deepspeed or torchrun"),
    ],
)
def test_options_that_do_not_fit_are_refused(plan, options, said):
    with pytest.raises(UsageError, match=said):
        plan(**options)


def test_a_missing_program_is_named_with_its_package(plan, monkeypatch):
    monkeypatch.setattr("dstrain.launch.multihost.plan.shutil.which", lambda name: None if name == "pdsh" else name)
    with pytest.raises(
        UsageError, match=r"pdsh is not installed here; install it \(apt install pdsh\), or add --launcher ssh"
    ):
        plan()
    assert plan(launcher="ssh").world_size == 6


@pytest.mark.parametrize("strange", ["%h", "$x", "a'b", 'a"b', "a;b", "a b"])
def test_a_path_that_pdsh_would_change_is_refused(plan, strange):
    with pytest.raises(UsageError, match="choose a --run-dir without it, or add --launcher ssh"):
        check_runner(plan(), Path(f"/runs/{strange}"))


def test_a_host_that_deepspeeds_runner_would_misread_is_refused(plan, tmp_path):
    (tmp_path / "F").write_text("host1 slots=1\nme@host2 slots=1\n")
    with pytest.raises(
        UsageError, match=r"F:2: DeepSpeed's runner cannot take the host me@host2; .* or add --launcher ssh"
    ):
        check_runner(plan(), tmp_path)
    assert [words[-2] for words in (agent_command(host, 30.0, "a1b2", {}) for host in plan(launcher="ssh").hosts)][
        1
    ] == "me@host2"


def test_a_dry_run_says_what_it_would_ask_the_hosts(plan):
    lines = show_launch(plan(), Path("/runs/a")).splitlines()
    assert [line.split()[0] for line in lines] == ["ssh", "ssh", PYTHON]
    assert "--master_addr '<address of host1>' --master_port '<free port on host1>'" in lines[-1]


def test_more_processes_than_cores_are_warned_of(monkeypatch):
    monkeypatch.setattr("dstrain.launch.multihost.plan.count_available_cores", lambda: 2)
    made = {count: LocalLaunch([], {"DS_ACCELERATOR": "cpu"}, count) for count in (2, 99)}
    assert cpu_overload_warning(made[2]) == cpu_overload_warning(LocalLaunch([], {}, 99, ("0",) * 99)) == ""
    assert cpu_overload_warning(made[99]).startswith(
        "99 processes are started on this machine, which has 2 CPU cores: they share"
    )
    assert cpu_overload_warning(LocalLaunch([], {"DS_ACCELERATOR": "cpu"}, 99, local_ranks=range(2))) == "", (
        "one host of many"
    )


# Environment variables that are forwarded to other hosts.


def test_what_a_run_needs_travels_and_the_rest_stays():
    env = {"HF_TOKEN": "s", "WANDB_API_KEY": "k", "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "ib0", "TORCH_LOGS": "x",
           "OMP_NUM_THREADS": "3", "CUDA_HOME": "/c", "DSTRAIN_CACHE": "/d", "HOME": "/h", "PATH": "/p",
           "CUDA_VISIBLE_DEVICES": "1", "DSTRAIN_SUPERVISOR": "host 1", "DSTRAIN_LAUNCH": "/f"}  # fmt: skip
    assert set(env) - set(build_remote_env(env, [], ())) == {
        "HOME", "PATH", "CUDA_VISIBLE_DEVICES", "DSTRAIN_SUPERVISOR", "DSTRAIN_LAUNCH",
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

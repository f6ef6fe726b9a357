"""Command lines for several hosts, word by word."""

from __future__ import annotations

import base64
import json
import shlex
import sys
from pathlib import Path

import pytest

from dstrain.config.schema import LaunchConfig
from dstrain.distributed.store import RANK_KEY_ENV
from dstrain.errors import UsageError
from dstrain.launch.command import LaunchOptions, LocalLaunch
from dstrain.launch.multihost import plan as several
from dstrain.launch.multihost.plan import (
    MasterEndpoint,
    MultiHostLaunch,
    agent_command,
    check_runner,
    node_command,
    plan_launch,
    runner_command,
    runner_environment,
    show_launch,
)

PYTHON = shlex.quote(sys.executable)
MASTER = MasterEndpoint("10.0.0.1", 29501)
FILE = Path("/runs/a/.workers/launch-1.json")
SSH = "-o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o ServerAliveCountMax=3 -o LogLevel=INFO"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setattr(several.shutil, "which", lambda name: name)
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
    monkeypatch.setattr(several.shutil, "which", lambda name: None if name == "pdsh" else name)
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
    monkeypatch.setattr(several, "count_available_cores", lambda: 2)
    made = {count: LocalLaunch([], {"DS_ACCELERATOR": "cpu"}, count) for count in (2, 99)}
    assert (
        several.cpu_overload_warning(made[2])
        == several.cpu_overload_warning(LocalLaunch([], {}, 99, ("0",) * 99))
        == ""
    )
    assert several.cpu_overload_warning(made[99]).startswith(
        "99 processes are started on this machine, which has 2 CPU cores: they share"
    )
    assert several.cpu_overload_warning(LocalLaunch([], {"DS_ACCELERATOR": "cpu"}, 99, local_ranks=range(2))) == "", (
        "one host of many"
    )

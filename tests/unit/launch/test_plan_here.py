"""Command lines of a launch on one host, word by word."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dstrain.config.schema import LaunchConfig
from dstrain.errors import UsageError
from dstrain.launch import plan
from dstrain.launch.plan import LaunchOptions, plan_launch, plan_local_launch, select_devices
from dstrain.launch.probe import check_port, free_port

ROOT = Path(__file__).resolve().parents[3]


def launch(monkeypatch, present: int, env: dict[str, str] | None = None, **options):
    monkeypatch.setattr(plan, "count_gpus", lambda: present)
    return plan_local_launch(LaunchOptions(**options), ["train"], env or {})


def test_a_cpu_runs_one_process_or_as_many_as_asked(monkeypatch):
    one, three = launch(monkeypatch, 0), launch(monkeypatch, 0, num_gpus=3)
    assert (one.world_size, three.world_size) == (1, 3)
    assert one.environment["DS_ACCELERATOR"] == "cpu"
    assert launch(monkeypatch, 8, {"CUDA_VISIBLE_DEVICES": ""}, num_gpus=2).environment["DS_ACCELERATOR"] == "cpu"


def test_all_visible_gpus_are_the_default(monkeypatch):
    made = launch(monkeypatch, 4)
    assert made.world_size == 4
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert "DS_ACCELERATOR" not in made.environment


def test_the_first_visible_gpus_are_taken_also_by_their_ids(monkeypatch):
    for listed, first in (("2,3", "2"), ("GPU-1f,GPU-2a", "GPU-1f")):
        made = launch(monkeypatch, 4, {"CUDA_VISIBLE_DEVICES": listed}, num_gpus=1)
        assert made.environment["CUDA_VISIBLE_DEVICES"] == first


def test_exclude_leaves_the_others(monkeypatch):
    made = launch(monkeypatch, 3, exclude="localhost:1")
    assert made.world_size == 2
    assert made.environment["CUDA_VISIBLE_DEVICES"] == "0,2"


@pytest.mark.parametrize(
    ("options", "env", "said"),
    [
        ({"num_gpus": 0}, {}, "starts no process"),
        ({"num_gpus": 5}, {}, "more than the 4 visible"),
        ({"num_gpus": 1, "include": "localhost:0"}, {}, "cannot be combined with"),
        ({"exclude": "localhost:0", "include": "localhost:0"}, {}, "are both set"),
        ({"include": "host1:0"}, {}, "does not name GPUs of this machine"),
        ({"include": "localhost:0,9"}, {}, "localhost has no slot 9; this machine gives it 0 to 3"),
        ({"exclude": "localhost"}, {}, "leaves no slot"),
        ({}, {"CUDA_VISIBLE_DEVICES": "7"}, "names none of the 4 GPUs"),
    ],
)
def test_gpus_that_cannot_be_had_are_refused(options, env, said):
    with pytest.raises(UsageError, match=said):
        select_devices(LaunchOptions(**options), env, 4)


@pytest.mark.parametrize("options", [{"num_nodes": 2}, {"node_rank": 1}, {"master_addr": "host1"}, {"no_ssh": True}])
def test_several_hosts_need_a_hostfile(options):
    with pytest.raises(UsageError, match="runs on several hosts need --hostfile"):
        plan_launch(LaunchOptions(**options), ["train"], {}, LaunchConfig())


def test_slurm_launches_nothing_but_train():
    with pytest.raises(UsageError, match="works only with `dstrain train`; in an allocation start this with srun"):
        plan_launch(LaunchOptions(launcher="slurm"), ["evaluate"], {}, LaunchConfig())


def test_a_taken_port_names_its_holder():
    check_port(free_port())
    holder = rf"is taken by .*\(pid {os.getpid()}\)"
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(UsageError, match=holder):
        check_port(server.getsockname()[1])
    with pytest.raises(UsageError, match="is not a port"):
        check_port(70000)


@pytest.fixture
def path(tmp_path):
    """PATH with our `deepspeed`, a copy of it, and then a fake one that prints its arguments."""
    fake, copied = tmp_path / "fake", tmp_path / "copied"
    fake.mkdir()
    copied.mkdir()
    (fake / "deepspeed").write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    (fake / "deepspeed").chmod(0o755)
    shutil.copy(ROOT / "launchers/deepspeed", copied)
    python = Path(sys.executable).resolve().parent
    return f"{ROOT / 'launchers'}:{copied}:{fake}:{python}:/usr/bin:/bin"


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        ("--num_gpus 8 -m dstrain.cli train r", "--num_gpus 8 --module dstrain.cli train r"),
        ("-m dstrain.cli train -m x --set -m", "--module dstrain.cli train -m x --set -m"),
        ("-H -m -i w:0 -m pkg -m", "-H -m -i w:0 --module pkg -m"),
        ("-Hfile --inc w:0 --no_ssh -m pkg", "-Hfile --inc w:0 --no_ssh --module pkg"),
        ("--hostfile=F -q -mpkg a", "--hostfile=F -q --module pkg a"),
        ("--module dstrain.cli train -m x", "--module dstrain.cli train -m x"),
        ("train.py -m x", "train.py -m x"),
        ("-- train.py -m", "-- train.py -m"),
        ("--help", "--help"),
    ],
)
def test_launchers_deepspeed_takes_m_for_module(path, given, handed_on):
    done = subprocess.run(["deepspeed", *given.split()], env={"PATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == handed_on.split()


def test_launchers_deepspeed_says_so_where_there_is_no_other(tmp_path):
    (tmp_path / "python3").symlink_to(Path(sys.executable).resolve())
    env = {"PATH": f"{ROOT / 'launchers'}:{tmp_path}"}
    done = subprocess.run([str(ROOT / "launchers/deepspeed"), "-m", "x"], env=env, capture_output=True, text=True)
    assert done.returncode == 127
    assert "pip install deepspeed" in done.stderr


@pytest.mark.slow
def test_the_wrapper_knows_every_option_of_the_installed_deepspeed():
    source = (ROOT / "launchers/deepspeed").read_text()
    names: dict[str, object] = {"__name__": "wrapper"}
    exec(compile(source, "deepspeed", "exec"), names)
    probe = (
        "import argparse, sys\n"
        "def show(self, *a, **k):\n"
        "    print(*(o for x in self._actions for o in x.option_strings if x.nargs != 0))\n"
        "    print(*(o for x in self._actions for o in x.option_strings if x.nargs == 0))\n"
        "    sys.exit(0)\n"
        "argparse.ArgumentParser.parse_args = show\n"
        "from deepspeed.launcher.runner import parse_args\n"
        "parse_args()\n"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    valued, flags = (set(text.split()) for text in done.stdout.strip().splitlines()[-2:])
    assert valued == set(names["VALUED"])
    assert flags == set(names["FLAGS"])

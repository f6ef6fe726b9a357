"""Environment variables that are forwarded to other hosts."""

from __future__ import annotations

import pytest

from dstrain.errors import UsageError
from dstrain.launch.multihost.plan import build_remote_env, read_env_file


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

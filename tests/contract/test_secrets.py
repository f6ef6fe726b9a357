"""No secret of the environment, the recipe or the command line is in a run folder, a log or an output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dstrain.tasks import find_task
from dstrain.train.run_dir import collect_environment
from tests.vocabulary import invoke, write_recipe

SECRETS = {
    "WANDB_API_KEY": "fedcba9876543210" * 2 + "12345678",
    "HF_TOKEN": "hf_PlantedTokenOfThisTest",
    "AWS_SECRET_ACCESS_KEY": "PlantedAwsSecretAccessKey0123",
    "HTTPS_PROXY": "http://me:PlantedProxyPassword@127.0.0.1:9",
    "https_proxy": "http://me:PlantedProxyPassword@127.0.0.1:9",
    "MY_SERVICE_PASSWORD": "PlantedServicePassword",
}
PLANTED = [value.partition("me:")[2].partition("@")[0] or value for value in SECRETS.values()]


def run(*words: str, cwd: Path) -> tuple[int, str]:
    env = {**os.environ, **SECRETS, "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"}
    command = [sys.executable, "-m", "dstrain", *words]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=500, check=False)
    return done.returncode, done.stdout + done.stderr


def found_in(folder: Path, secrets: list[str]) -> dict[str, str]:
    """File -> the secret that it holds; names of files and targets of links too."""
    found = {}
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        text = str(path).encode() + (os.readlink(path).encode() if path.is_symlink() else b"") + content
        found |= {str(path): secret for secret in secrets if secret.encode() in text}
    return found


def test_a_run_leaves_no_secret_anywhere(tmp_path: Path) -> None:
    values = find_task("rm").tiny(tmp_path) | {"steps": 2, "launch": {"env": ["MY_SERVICE_PASSWORD"]}}
    values["log"] = {"every": 1, "tensorboard": True, "wandb": {"project": "p", "mode": "offline"}}
    write_recipe(tmp_path, values)
    code, output = run(
        *("train", "recipe.yaml", "--run-dir", "run", "--num-gpus", "1"),
        *("--set", f"log.wandb.name={SECRETS['HF_TOKEN'][:5]}", "--allow-change", "optim.lr"),
        cwd=tmp_path,
    )
    assert code == 0, output[-3000:]
    assert (tmp_path / "run/environment.json").is_file()
    assert list((tmp_path / "run/wandb").rglob("*.wandb")), "W&B ran, and its files were looked through"
    assert found_in(tmp_path / "run", PLANTED) == {}
    assert [secret for secret in PLANTED if secret in output] == []


@pytest.mark.parametrize(
    "words",
    [
        ("--set", "log.wandb={project: 'https://me:PlantedInUrl@host/x'}"),
        ("--set", "model.path=https://me:PlantedInUrl@host/x"),
        ("--set", "data.train=https://me:PlantedInUrl@host/x.jsonl"),
        ("--set", "launch.env=['HTTPS_PROXY=http://me:PlantedInUrl@host:1']"),
        ("--ds-config", "https://me:PlantedInUrl@host/x.json"),
        ("--task", "https://me:PlantedInUrl@host/x.py"),
        ("--resume", "https://me:PlantedInUrl@host/x"),
        ("--hostfile", "https://me:PlantedInUrl@host/x"),
        ("--master-addr", "https://me:PlantedInUrl@host", "--num-gpus", "0"),
    ],
)
def test_a_url_with_a_password_is_refused_without_the_password(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path, find_task("rm").tiny(tmp_path))
    before = sorted(tmp_path.rglob("*"))
    done = invoke("train", "recipe.yaml", "--run-dir", "run", *words)
    assert done.exit_code == 2, done.output
    assert "PlantedInUrl" not in done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_the_recorded_command_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])
    monkeypatch.setattr(sys, "argv", ["dstrain", "train", f"a={SECRETS['HF_TOKEN']}", "https://me:PlantedInUrl@host/x"])
    recorded = collect_environment()
    assert recorded["command"] == ["dstrain", "train", "a=...", "https://me:...@host/x"]
    assert SECRETS["HF_TOKEN"] not in json.dumps(recorded)

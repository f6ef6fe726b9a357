"""No secret of the recipe or the command line is in a run folder or an output; of the environment: launching/test_terminal."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dstrain.training.run_dir import collect_environment
from tests.tiny import tiny_recipe
from tests.vocabulary import invoke, write_recipe


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
    write_recipe(tmp_path, tiny_recipe("rm", tmp_path))
    before = sorted(tmp_path.rglob("*"))
    done = invoke("train", "recipe.yaml", "--run-dir", "run", *words)
    assert done.exit_code == 2, done.output
    assert "PlantedInUrl" not in done.output
    assert sorted(tmp_path.rglob("*")) == before


def test_the_recorded_command_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    token = "hf_PlantedTokenOfThisTest"
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(sys, "argv", ["dstrain", "train", f"a={token}", "https://me:PlantedInUrl@host/x"])
    recorded = collect_environment()
    assert recorded["command"] == ["dstrain", "train", "a=...", "https://me:...@host/x"]
    assert token not in json.dumps(recorded)

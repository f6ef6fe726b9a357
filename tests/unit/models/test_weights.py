"""The same weights have the same fingerprint, and other weights another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dstrain.config.schema import LoraConfig, ModelConfig
from dstrain.errors import RecipeError
from dstrain.models import weights
from dstrain.models.weights import weights_fingerprint
from tests.workers import ROOT

CONFIG = {"model_type": "llama", "hidden_size": 16}


def of(seed: int = 0, **model: Any) -> str:
    return weights_fingerprint(ModelConfig(**model), seed)


def change_a_byte(file: Path) -> None:
    """One bit of the last weight; size, and the time to the second, stay."""
    content, times = bytearray(file.read_bytes()), file.stat()
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns + 1))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text(json.dumps(CONFIG))
    for index in (1, 2):
        save_file({f"a{index}": torch.zeros(4)}, place / f"model-{index}.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "old.safetensors")
    return place


def test_drawn_weights_follow_config_seed_and_the_libraries_that_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    base = of(config=CONFIG)
    assert of(config=dict(reversed(CONFIG.items()))) == base
    assert of(1, config=CONFIG) != base
    assert of(config=CONFIG | {"hidden_size": 32}) != base
    for library in ("torch", "transformers"):
        versions = {"torch": "2.13.0+cpu", "transformers": "5.23.0"}
        monkeypatch.setattr(weights, "version", versions.__getitem__)
        was = of(config=CONFIG)
        versions[library] = "9.9.0"
        assert of(config=CONFIG) != was


def test_loaded_weights_follow_their_bytes_and_no_seed(folder: Path, tmp_path: Path) -> None:
    base = of(path=str(folder))
    assert of(1, path=str(folder)) == base
    other = tmp_path / "elsewhere"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    (other / "README.md").write_text("words")
    assert of(path=str(other)) == base, "the same files in another place"


def renamed(folder: Path) -> None:
    (folder / "model-2.safetensors").rename(folder / "model-3.safetensors")


def exchanged(folder: Path) -> None:
    """Of the same size, and written so close to one another that their times may be equal."""
    (folder / "model-1.safetensors").rename(folder / "x")
    (folder / "model-2.safetensors").rename(folder / "model-1.safetensors")
    (folder / "x").rename(folder / "model-2.safetensors")


CHANGES: dict[str, Callable[[Path], object]] = {
    "a byte of a weight": lambda folder: change_a_byte(folder / "model-2.safetensors"),
    "the config": lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0})),
    "a file more": lambda folder: save_file({"c": torch.zeros(1)}, folder / "model-3.safetensors"),
    "a file less": lambda folder: (folder / "model-2.safetensors").unlink(),
    "another name": renamed,
    "two files exchanged": exchanged,
}


@pytest.mark.parametrize("what", CHANGES)
def test_any_change_of_the_files_shows(what: str, folder: Path) -> None:
    base = of(path=str(folder))
    CHANGES[what](folder)
    assert of(path=str(folder)) != base


def test_the_code_that_comes_with_a_model_counts_where_it_runs(folder: Path) -> None:
    base, trusting = of(path=str(folder)), of(path=str(folder), trust_remote_code=True)
    (folder / "modeling_own.py").write_text("x = 1")
    assert of(path=str(folder)) == base
    assert of(path=str(folder), trust_remote_code=True) != trusting


@pytest.mark.parametrize("start", ["config", "path"])
def test_weights_to_start_from_count(start: str, folder: Path, tmp_path: Path) -> None:
    under: dict[str, Any] = {"config": CONFIG} if start == "config" else {"path": str(folder)}
    init = tmp_path / "old.safetensors"
    found = [of(**under), of(**under, init=str(init))]
    change_a_byte(init)
    found.append(of(**under, init=str(init)))
    torch.save({"b": torch.zeros(4)}, tmp_path / "old.pt")
    found += [of(**under, init=str(tmp_path / "old.pt")), of(**under, init=str(folder))]
    assert len(set(found)) == 5
    (folder / "config.json").write_text("{}")
    assert (of(**under, init=str(folder)) == found[-1]) == (start == "config"), "no weight of the init's"


def test_settings_on_top_of_the_weights_leave_the_fingerprint(folder: Path) -> None:
    more = {"dtype": "bfloat16", "lora": LoraConfig(rank=2), "freeze": ["x"], "attn_implementation": "eager"}
    assert of(path=str(folder), **more) == of(path=str(folder))


def test_files_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = of(path=str(folder))
    monkeypatch.setattr(weights.hashlib, "file_digest", None)
    assert of(path=str(folder)) == base
    change_a_byte(folder / "model-1.safetensors")
    with pytest.raises(TypeError):
        of(path=str(folder))


def test_weights_that_are_gone_are_named(folder: Path) -> None:
    with pytest.raises(
        RecipeError,
        match=r"model\.path: '/nowhere/model' is neither a folder nor a reachable hub id.*restore the model",
    ):
        of(path="/nowhere/model")
    with pytest.raises(RecipeError, match=r"model\.init: '/nowhere\.pt' is neither a file nor a folder"):
        of(path=str(folder), init="/nowhere.pt")


HUB = """
from dstrain.config.schema import ModelConfig
from dstrain.models.weights import weights_fingerprint
print(weights_fingerprint(ModelConfig(path="org/name"), 0))
"""


@pytest.mark.slow
def test_a_hub_name_stands_for_its_revision_in_the_cache(tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--org--name"
    (repository / "refs").mkdir(parents=True)
    found = []
    for revision in ("a" * 40, "b" * 40):
        (repository / "snapshots" / revision).mkdir(parents=True)
        (repository / "snapshots" / revision / "config.json").write_text("{}")
        (repository / "refs/main").write_text(revision)
        environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        environment.pop("HF_HUB_CACHE", None)
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", HUB], env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            found.append(done.stdout)
    assert found[0] == found[1] != found[2] == found[3]


def test_weights_drawn_in_16_bits_are_others() -> None:
    drawn = ModelConfig(config={"model_type": "llama"})
    assert weights_fingerprint(drawn, 0, half_precision_init=True) != weights_fingerprint(drawn, 0)

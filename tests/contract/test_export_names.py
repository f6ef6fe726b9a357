"""The tensors of an export have the names, shapes and dtypes of its base's files, as servers that load the base expect."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dstrain.commands.export import export_model
from tests.cells import mark_slow
from tests.contract.export_cases import make_run
from tests.contract.lora_cases import save_base
from tests.model_families import FAMILIES, family
from tests.tiny import tiny_recipe
from tests.vision_recipes import GEMMA3, IDEFICS3, llava

VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "llava, CLIP": ("vision_tower.", llava()),
    "llava, SigLIP": ("vision_tower.", llava("siglip_vision_model")),
    "gemma3": ("vision_tower.", GEMMA3),
    "idefics3": ("", IDEFICS3),
}
"""Family -> the tower's prefix, after which files on the Hub have `vision_model.`, and the config."""


def read_headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype) of the tensors in a folder's files."""
    headers = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # no mapping
                part = opened.get_slice(name)
                headers[name] = (tuple(part.get_shape()), part.get_dtype())
    return headers


def rename(folder: Path, change: Callable[[str], str]) -> None:
    """Give the tensors of a base the names that it has on the Hub."""
    file = folder / "model.safetensors"
    tensors = {change(name): value.clone() for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def export_of(folder: Path, task: str, base: Path, lora: bool, **more: Any) -> Path:
    model = {"path": str(base), "config": None, "tokenizer": None, "processor": None}
    run = make_run(folder / "it", task, {"model": model | ({"lora": {"rank": 2}} if lora else {}), **more})
    report = export_model(run, "last", folder / "out", merge_lora=lora)
    assert not report.notes
    return folder / "out"


@pytest.mark.parametrize("name", mark_slow(FAMILIES, {*FAMILIES} - {"llama", "qwen3_next"}))
# The two: usual names, and experts beside dense layers. The others repeat one of them.
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "merged"])
def test_a_text_model_keeps_the_names_of_its_base(name: str, lora: bool, tmp_path: Path) -> None:
    if lora and name == "mamba2":
        pytest.skip("peft adapts no linear layer of mamba2's mixer")
    values = tiny_recipe("sft", tmp_path)
    values["model"] = {"config": family(name), "tokenizer": {"vocab_size": 320}}
    save_base(str(tmp_path / "base"), values)
    out = export_of(tmp_path, "sft", tmp_path / "base", lora)
    assert read_headers(out) == read_headers(tmp_path / "base")
    told, before = (json.loads((place / "config.json").read_text()) for place in (out, tmp_path / "base"))
    assert told["architectures"] == before["architectures"]
    assert told["dtype"] == "float32"
    assert "auto_map" not in told
    assert {key for key in before if before[key] != told.get(key)} <= {"transformers_version"}


@pytest.mark.slow
@pytest.mark.parametrize("name", mark_slow(VISION, {*VISION} - {"llava, CLIP"}))  # one tower of four
@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "merged"])
def test_a_tower_keeps_the_prefix_that_its_files_have(name: str, lora: bool, tmp_path: Path) -> None:
    """transformers takes `vision_model.` away while it reads; a model built from its config has read nothing."""
    prefix, config = VISION[name]
    values = tiny_recipe("vlm", tmp_path)
    values["model"]["config"] = config
    save_base(str(tmp_path / "base"), values)
    if prefix:
        rename(tmp_path / "base", lambda key: key.replace(prefix, f"{prefix}vision_model."))
    out = export_of(tmp_path, "vlm", tmp_path / "base", lora, data={"max_length": 128})
    assert read_headers(out) == read_headers(tmp_path / "base")


def test_an_export_of_16_bits_has_the_dtypes_of_its_base(tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path)
    values["model"]["dtype"] = "bfloat16"
    save_base(str(tmp_path / "base"), values)
    model = {"path": str(tmp_path / "base"), "config": None, "tokenizer": None}
    run = make_run(tmp_path / "it", "sft", {"model": model}, "bf16")
    export_model(run, "last", tmp_path / "out")
    assert read_headers(tmp_path / "out") == read_headers(tmp_path / "base")


def test_tensors_that_transformers_does_not_load_are_named(tmp_path: Path) -> None:
    """Layers that predict several tokens, in files of DeepSeek-V3 and others, are not part of the model."""
    values = tiny_recipe("sft", tmp_path)
    values["model"] = {"config": family("deepseek_v3"), "tokenizer": {"vocab_size": 320}}
    save_base(str(tmp_path / "base"), values)
    file = tmp_path / "base/model.safetensors"
    extra = {"model.layers.61.eh_proj.weight": torch.zeros(2, 2)}
    save_file({**load_file(file), **extra}, file, metadata={"format": "pt"})
    model = {"path": str(tmp_path / "base"), "config": None, "tokenizer": None}
    run = make_run(tmp_path / "it", "sft", {"model": model})
    report = export_model(run, "last", tmp_path / "out")
    assert report.notes == [
        "the base's files also hold model.layers.61.eh_proj.weight, which transformers does not load"
    ]
    shutil.rmtree(tmp_path / "base")
    export_model(run, "last", tmp_path / "again")

"""Adapters leave the run as adapters, or as one whole model that says the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from dstrain.commands.export import export_model
from dstrain.errors import CheckpointError
from tests.cells import SLOW, mark_slow
from tests.contract.export_cases import make_run, read_as_a_stranger, spoil, stored
from tests.contract.lora_cases import save_base
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, invoke, metric_rows, write_recipe
from tests.workers import WorkerError, Workers

CASES = "tests.contract.lora_cases:"


@pytest.mark.slow
def test_adapters_on_drawn_weights_are_merged_or_not_written(tmp_path: Path, one: Workers, two: Workers) -> None:
    values = tiny_recipe("dpo", tmp_path)
    values["model"] |= {"lora": {"rank": 2}}
    write_recipe(tmp_path, values | {"steps": 1})
    two(RUN, recipe=str(tmp_path / "recipe.yaml"), run_dir=str(tmp_path / "run"))
    with pytest.raises(WorkerError, match="add --merge-lora"):
        one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "out"), merge=False)
    assert not (tmp_path / "out").exists()
    one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "out"), merge=True)


def adapted(folder: Path, task: str, precision: str, **model: Any) -> Path:
    """A run with adapters on a base in a folder."""
    values = tiny_recipe(task, folder)
    values["model"]["config"] |= model.pop("config", {})
    save_base(str(folder / "base"), values)
    changes = {"path": str(folder / "base"), "config": None, "lora": {"rank": 4, "alpha": 16.0, **model}}
    return make_run(folder, task, {"model": changes}, precision)


KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "rm, a new head": ("rm", "fp32", {}),
    "rm, a new head, bf16": ("rm", "bf16", {}),
    "sft, tied": ("sft", "fp32", {"config": {"tie_word_embeddings": True}}),
    "sft, tied, adapters on the embedding": (
        "sft",
        "fp32",
        {"config": {"tie_word_embeddings": True}, "targets": ["q_proj", "embed_tokens"]},
    ),
    "dpo, dora, bf16": ("dpo", "bf16", {"dora": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", mark_slow(KINDS, ["rm, a new head", "sft, tied"]))  # the head in bf16; fp32 by sft
def test_a_stranger_reads_the_adapters_and_the_merged_model(kind: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    task, precision, model = KINDS[kind]
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    run = adapted(tmp_path, task, precision, **model)
    export_model(run, "last", tmp_path / "apart")
    export_model(run, "last", tmp_path / "merged", merge_lora=True)
    told_of_base = {"base_model.model.model.embed_tokens.base_layer.weight"} if "embedding" in kind else set()
    kept = {name.replace(".default", "").replace(".modules_to_save", ""): value
            for name, value in stored(str(run / "checkpoints/step-00000001")).items()}  # fmt: skip
    found = load_file(tmp_path / "apart/adapter_model.safetensors")
    assert found.keys() - told_of_base == {
        name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector") for name in kept
    }
    assert ("base_model.model.score.weight" in found) == (task == "rm")
    for name, value in kept.items():
        there = found[name if name in found else name.removesuffix(".weight")]
        assert torch.equal(there, value.to(dtype)), name
    auto: Any = AutoModelForSequenceClassification if task == "rm" else AutoModelForCausalLM
    labels = {"num_labels": 1} if task == "rm" else {}
    base = auto.from_pretrained(tmp_path / "base", dtype=dtype, **labels)
    apart = PeftModel.from_pretrained(base, tmp_path / "apart", autocast_adapter_dtype=False).eval()
    merged, told = read_as_a_stranger(tmp_path / "merged", task == "rm")
    assert not any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        ours, theirs = apart(input_ids=ids).logits, merged(input_ids=ids).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 if precision == "fp32" else 3e-2)


ADAPTER = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
SABOTAGE: dict[str, tuple[Any, str]] = {
    "emptied": (lambda held: held.update({ADAPTER: torch.empty(0)}), rf"{ADAPTER} is \(0,\) of F32"),
    "dropped": (lambda held: held.pop(ADAPTER), f"missing keys: {ADAPTER}; unexpected keys: none"),
    "head dropped": (
        lambda held: held.pop("base_model.model.score.weight"),
        "missing keys: base_model.model.score.weight; unexpected keys: none",
    ),
    "added": (lambda held: held.update(odd=torch.ones(2)), "missing keys: none; unexpected keys: odd"),
    "one value": (lambda held: held[ADAPTER][3, 1].add_(1e-4), f"the values of {ADAPTER} in the exported files differ"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a reward model with adapters and a new head."""
    return adapted(tmp_path_factory.mktemp("it"), "rm", "fp32")


@pytest.mark.parametrize("name", SABOTAGE)
@pytest.mark.parametrize("looked_at", [pytest.param(True, id="files"), SLOW(False, id="reloaded")])
def test_what_is_not_the_adapters_is_refused_by_name(
    looked_at: bool, name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the files were not looked at: peft leaves what is missing as it was drawn, with a warning."""
    from peft import PeftModel

    change, words = SABOTAGE[name]
    spoil(monkeypatch, change, PeftModel)
    if not looked_at:
        monkeypatch.setattr("dstrain.commands.export.check_exported_files", lambda *args: None)
        words = "in the reloaded model differ|the exported folder cannot be loaded"
        if name == "added":
            pytest.skip("what nobody loads only the files tell")
    with pytest.raises(CheckpointError, match=words):
        export_model(run, "last", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_what_learnt_beside_the_adapters_is_not_left_out(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import peft

    of_peft = peft.get_peft_model_state_dict
    without = lambda model: {name: value for name, value in of_peft(model).items() if "score" not in name}  # noqa: E731
    monkeypatch.setattr(peft, "get_peft_model_state_dict", without)
    with pytest.raises(
        CheckpointError, match=r"score\.modules_to_save\.default\.weight was trained in addition to the adapters"
    ):
        export_model(run, "last", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_adapters_that_make_no_numbers_are_not_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora import LoraModel

    (tmp_path / "it").mkdir()
    run = adapted(tmp_path / "it", "sft", "fp32")
    unload = LoraModel.merge_and_unload

    def merge_and_unload(self: Any) -> Any:
        whole = unload(self)
        whole.model.embed_tokens.weight.data[319, 3] = torch.inf  # a token that no probe has
        return whole

    monkeypatch.setattr(LoraModel, "merge_and_unload", merge_and_unload)
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight holds inf or nan"):
        export_model(run, "last", tmp_path / "out", merge_lora=True)
    assert {path.name for path in tmp_path.iterdir()} == {"it"}


@pytest.mark.slow
@pytest.mark.parametrize("presets", [("zero0", "zero3"), SLOW(("zero0", "zero1", "zero2"))])  # 1 and 2 shard no weight
def test_an_adapter_is_trained_on_at_every_stage_and_leaves_as_one(
    presets: tuple[str, ...], tmp_path: Path, two: Workers
) -> None:
    from peft import AutoPeftModelForCausalLM

    (tmp_path / "it").mkdir()
    export_model(adapted(tmp_path / "it", "sft", "fp32"), "last", tmp_path / "first")
    first = load_file(tmp_path / "first/adapter_model.safetensors")
    values = tiny_recipe("dpo", tmp_path) | {"steps": 2, "batch": {"total": 4, "micro": 2}, "eval": {"every": 1}}
    values["model"] = {"path": str(tmp_path / "first"), "lora": {"create_new_adapter": False}}
    write_recipe(tmp_path, values | {"optim": {"lr": 1e-2, "warmup": 0}, "log": {"every": 1}})
    started = invoke("train", tmp_path / "recipe.yaml", "--dry-run", "--run-dir", tmp_path / "none")
    assert started.exit_code == 0, started.output
    rows = {}
    for preset in presets:
        run = tmp_path / preset
        two(RUN, recipe=str(tmp_path / "recipe.yaml"), run_dir=str(run), sets=[f"ds_config={preset}"])
        rows[preset] = metric_rows(run)
        assert rows[preset][0]["loss"] == pytest.approx(np.log(2), abs=1e-6), "of its own initial policy"
        for row, wanted in zip(rows[preset], rows["zero0"], strict=True):
            assert row["loss"] == pytest.approx(wanted["loss"], rel=1e-5), preset
    assert rows["zero0"][-1]["loss"] < rows["zero0"][0]["loss"]
    export_model(tmp_path / presets[-1], "last", tmp_path / "second")
    assert not (tmp_path / "second/reference").exists()
    second = load_file(tmp_path / "second/adapter_model.safetensors")
    assert second.keys() == first.keys()
    assert any(not torch.equal(value, first[name]) for name, value in second.items())
    settings = json.loads((tmp_path / "second/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tmp_path / "it/base"), "the original one"
    AutoPeftModelForCausalLM.from_pretrained(tmp_path / "second")
    recipe = yaml.safe_load((tmp_path / "second/dstrain_recipe.yaml").read_text())
    assert recipe["model"]["path"] == str(tmp_path / "it/base")
    assert recipe["options"]["ref_model"] == str(tmp_path / "first"), "what it was compared with"


def test_records_are_checked_before_a_launch_of_quantized_weights(tmp_path: Path) -> None:
    write_recipe(tmp_path, tiny_recipe("sft", tmp_path))
    words = ("--set", "model.lora={rank: 4}", "--set", "model.quantize=nf4", "--run-dir", tmp_path / "none")
    started = invoke("train", tmp_path / "recipe.yaml", "--dry-run", *words)
    assert started.exit_code == 0, started.output

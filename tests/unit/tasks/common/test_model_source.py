"""An attention implementation that cannot train here is refused, with what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import RecipeError
from dstrain.models.load import build_meta_model, read_config
from dstrain.tasks import make_task
from dstrain.tasks.common import model_source
from dstrain.tasks.common.model_source import ModelSource, check_attn_implementation
from dstrain.tasks.sft import SFT
from tests.model_families import family
from tests.tiny import tiny_recipe


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine: its packages and the compute capability of its GPU."""
    machine = SimpleNamespace(packages=set(), capability=None)
    monkeypatch.setattr(model_source, "find_spec", lambda name: name in machine.packages or None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: machine.capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: machine.capability)
    return machine


@pytest.mark.parametrize("name", ["auto", "sdpa", "eager"])
def test_torchs_own_attention_runs_anywhere(name: str, here: SimpleNamespace) -> None:
    check_attn_implementation(ModelConfig(attn_implementation=name), "fp32")


@pytest.mark.parametrize(
    ("name", "packages", "capability", "precision", "trust", "reason"),
    [
        ("flash_attention_2", [], (9, 0), "bf16", False, r"needs the package flash-attn, which is not installed"),
        ("flash_attention_3", ["flash_attn"], (9, 0), "bf16", False, r"needs the package flash-attn-3"),
        ("flash_attention_2", ["flash_attn"], None, "bf16", False, r"needs a GPU, and torch sees none"),
        ("flash_attention_2", ["flash_attn"], (7, 5), "bf16", False, r"compute capability 8\.0; this GPU has 7\.5"),
        ("flash_attention_2", ["flash_attn"], (8, 0), "fp32", False, r"bf16 or fp16, not in fp32; set precision: bf16"),
        ("flex_attention", [], None, "bf16", False, r"flex_attention has no gradients on a CPU"),
        ("kernels-community/flash-attn2", ["kernels"], (9, 0), "bf16", False, r"is code on the Hub.*trust_remote_code"),
        ("kernels-community/flash-attn2", [], (9, 0), "bf16", True, r"needs the package kernels"),
    ],
)
def test_what_is_missing_is_named(
    name: str, packages: list[str], capability: tuple[int, int] | None, precision: str, trust: bool, reason: str,
    here: SimpleNamespace,
) -> None:  # fmt: skip
    here.packages, here.capability = packages, capability
    with pytest.raises(RecipeError, match=r"model\.attn_implementation: .*" + reason):
        check_attn_implementation(ModelConfig(attn_implementation=name, trust_remote_code=trust), precision)


@pytest.mark.parametrize(
    "name", ["flash_attention_2", "flash_attention_3", "flex_attention", "kernels-community/x@v1:f"]
)
def test_kernels_are_accepted_where_everything_is_installed(name: str, here: SimpleNamespace) -> None:
    here.packages, here.capability = {"flash_attn", "flash_attn_interface", "kernels"}, (9, 0)
    check_attn_implementation(ModelConfig(attn_implementation=name, trust_remote_code=True), "bf16")


def test_a_family_without_support_is_refused() -> None:
    model = ModelConfig(config=family("gpt_oss"), attn_implementation="sdpa")
    with pytest.raises(RecipeError, match=r"model\.attn_implementation: the model cannot be built.*use another"):
        build_meta_model(AutoModelForCausalLM, model, read_config(model))


@pytest.mark.parametrize("name", ["flash", "sdpa ", "a/b/c", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"must be one of auto, sdpa, eager"):
        ModelConfig(attn_implementation=name)


# Tasks on text that load their model in their own way.


@dataclass(frozen=True, kw_only=True)
class OwnSource(ModelSource):
    def load(self, model: ModelConfig) -> Any:
        raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Own(SFT):
    @cached_property
    def model_source(self) -> OwnSource:
        return OwnSource(task=self)


def test_where_a_task_loads_in_its_own_way_a_path_means_anything() -> None:
    recipe = RunConfig.model_validate({"task": "sft", "model": {"path": "./mine"}, "data": {"train": "x.jsonl"}})
    Own(recipe=recipe).checks.required_keys()
    with pytest.raises(RecipeError, match="is not a folder"):
        SFT(recipe=recipe).checks.required_keys()


@pytest.mark.parametrize(("alibi", "name"), [(True, "eager"), (True, "auto"), (True, "sdpa"), (False, "eager")])
def test_biases_that_transformers_adds_twice_are_refused(alibi: bool, name: str, tmp_path: Path) -> None:
    """Its eager attention of Falcon adds ALiBi to scores whose mask has it: the model with sdpa is the one without."""
    from transformers import AutoConfig

    config = {**family("falcon"), "alibi": alibi, "multi_query": False, "parallel_attn": False}
    values = tiny_recipe("sft", tmp_path)
    values["model"] = {"config": config, "tokenizer": {"vocab_size": 320}, "attn_implementation": name}
    source = make_task(RunConfig.model_validate(values)).model_source  # type: ignore[attr-defined]
    if alibi and name == "eager":
        with pytest.raises(
            RecipeError, match="eager attention adds the ALiBi biases of a falcon model twice; use sdpa"
        ):
            source.check_attn_implementation()
        logits = []
        for implementation in ("sdpa", "eager"):
            torch.manual_seed(0)
            made = AutoConfig.for_model(**config, initializer_range=0.3)
            model = AutoModelForCausalLM.from_config(made, attn_implementation=implementation).eval()
            logits.append(model(torch.arange(20)[None]).logits)
        assert not torch.allclose(*logits, atol=1e-2), "transformers has mended it: take the refusal out"
    else:
        source.check_attn_implementation()

"""The loss of a router is a part of a task's loss, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dstrain.config import RunConfig
from dstrain.errors import RecipeError
from dstrain.models.router_loss import check_router_loss
from dstrain.tasks import make_task
from dstrain.train.engine.module import TrainModule

SIZES = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 64},
}  # fmt: skip


def build(
    folder: Path, family: str, packing: bool, task: str = "sft", lora: bool = False, **model: Any
) -> tuple[TrainModule, Any]:
    """A task's model with the router's loss, and a batch of four answers of different lengths."""
    rows = [{"prompt": f"what is {'very ' * at}it?", "completion": f"it is {'so ' * (3 * at)}{at}"} for at in range(4)]
    if task != "sft":
        rows = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "no"} for row in rows]
    (folder / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model_type": family,
        **SIZES,
        **FAMILIES[family],
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    }
    recipe = {
        "task": task,
        "options": {"loss_type": "orpo"} if task == "dpo" else {},  # which needs no reference
        "model": {"config": config, "tokenizer": {"train": "bpe", "vocab_size": 290}, "lora": {"rank": 4} if lora else None, **model},
        "data": {"train": str(folder / "x.jsonl"), "max_length": 128},
        "batch": {"total": 4, "micro": 4, "packing": packing},
        "steps": 1,
    }  # fmt: skip
    made: Any = make_task(RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(recipe))))
    examples = made.examples("train")
    torch.manual_seed(0)
    model_ = made.build_model()
    return TrainModule(made, model_).train(), made.collate([examples[index] for index in range(4)])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str, packing: bool, tmp_path: Path) -> None:
    """scale.md A2: the router's loss was dropped, and `router_aux_loss_coef: 10` changed nothing."""
    module, batch = build(tmp_path, family, packing)
    model: Any = module.unwrapped_model
    total, metrics = module(batch)
    total.backward()
    found = {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}
    model.zero_grad()
    # Each row alone and unpadded for the cross entropy; the router's loss over all tokens, without padding.
    reference, padded = build(tmp_path, family, False)
    mask = padded.tensors["attention_mask"]
    ids, learnt = padded.tensors["input_ids"], padded.tensors["learnt"]
    labels = ids.masked_fill(torch.nn.functional.pad(learnt, (ids.shape[1] - learnt.shape[1], 0)) == 0, -100)
    plain: Any = reference.unwrapped_model
    plain.load_state_dict(model.state_dict())
    out = plain(input_ids=ids, attention_mask=mask, labels=labels, output_router_logits=True)
    wanted = out.loss * batch.weight  # cross entropy as a mean over targets, plus 0.5 times the router's loss
    assert torch.allclose(total, wanted, rtol=1e-5)
    assert torch.allclose(metrics["aux_loss"][0], out.aux_loss * batch.weight, rtol=1e-5)
    plain.zero_grad()
    wanted.backward()
    gradients = {name: one.grad for name, one in plain.named_parameters() if one.grad is not None}
    assert found.keys() == gradients.keys()
    error = sum((found[name] - one).square().sum() for name, one in gradients.items()) ** 0.5
    assert error <= 1e-5 * sum(one.square().sum() for one in gradients.values()) ** 0.5


@pytest.mark.parametrize("task", ["dpo", "rm"])
def test_other_tasks_have_it_too(task: str, tmp_path: Path) -> None:
    module, batch = build(tmp_path, "mixtral", False, task)
    total, metrics = module(batch)
    assert "aux_loss" in metrics
    module.router_loss.coefficient = 0.0  # type: ignore[union-attr]
    assert module(batch)[0] != total


def test_the_recipe_switches_it_on_and_names_its_factor(tmp_path: Path) -> None:
    module, _ = build(tmp_path, "mixtral", False, router_aux_loss_coef=2.0)
    assert module.router_loss is not None
    assert module.router_loss.coefficient == 2.0


def test_checkpointing_and_adapters_change_nothing(tmp_path: Path) -> None:
    plain, batch = build(tmp_path, "mixtral", False)
    total, _ = plain(batch)
    total.backward()
    grad = plain.unwrapped_model.model.layers[0].mlp.gate.weight.grad.clone()  # type: ignore[union-attr, operator]
    plain.unwrapped_model.zero_grad()
    plain.unwrapped_model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    again, _ = plain(batch)
    again.backward()
    assert torch.allclose(total, again)
    assert torch.allclose(grad, plain.unwrapped_model.model.layers[0].mlp.gate.weight.grad, rtol=1e-4, atol=1e-7)  # type: ignore[union-attr, operator]


def test_an_evaluation_leaves_it_out(tmp_path: Path) -> None:
    module, batch = build(tmp_path, "mixtral", False)
    with torch.no_grad():
        _, metrics = module(batch)
    assert "aux_loss" not in metrics


def test_a_model_without_a_router_refuses_the_key(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 32,
    }
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes))
    check_router_loss(model, None)
    with pytest.raises(RecipeError, match=r"model\.router_aux_loss_coef: asks for the loss of a router"):
        check_router_loss(model, 0.1)

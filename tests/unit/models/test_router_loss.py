"""The loss of a router is a part of a task's loss, as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dstrain.config import RunConfig
from dstrain.config.schema import OptimConfig
from dstrain.data.encoding.conversations import EncodedPrompt
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import RecipeError
from dstrain.models.params import build_param_groups
from dstrain.models.router_loss import check_router_loss
from dstrain.tasks import make_task
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.module import TrainModule
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.generate import GenerationModel, SamplingParams, generate_answers
from tests.tiny import tiny_recipe

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


pytestmark = pytest.mark.usefixtures("fresh_cache")


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
    ids, loss_mask = padded.tensors["input_ids"], padded.tensors["loss_mask"]
    labels = ids.masked_fill(torch.nn.functional.pad(loss_mask, (ids.shape[1] - loss_mask.shape[1], 0)) == 0, -100)
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


def test_loss_is_the_same_quantity_in_train_rows_and_in_evaluations(tmp_path: Path) -> None:
    """A step at rate 0 and an evaluation of the same samples: without dropout they differ by the routers' loss alone."""
    module, batch = build(tmp_path, "mixtral", False)
    optim = OptimConfig(name="sgd", lr=0.0)
    engine = TorchEngine(module, build_param_groups(module.model, optim), optim, torch.device("cpu"))
    step, evaluation = engine.step([batch], lr=0.0), engine.evaluate(batch)
    assert float(step.loss) == pytest.approx(float(evaluation.loss), rel=1e-6)
    assert float(step.metrics["aux_loss"][0]) > 0
    assert "aux_loss" not in evaluation.metrics
    assert step.metrics.keys() == evaluation.metrics.keys() | {"aux_loss"}


@pytest.mark.parametrize("task", ["dpo", "rm"])
def test_every_task_adds_the_router_loss(task: str, tmp_path: Path) -> None:
    module, batch = build(tmp_path, "mixtral", False, task)
    total, metrics = module(batch)
    assert "aux_loss" in metrics
    assert "task_loss" in metrics
    module.router_loss.coefficient = 0.0  # type: ignore[union-attr]
    assert module(batch)[0] != total


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "qwen3_moe"])
@pytest.mark.parametrize("task", ["rm", "dpo"])
def test_a_shared_prefix_counts_as_in_separate_rows(task: str, family: str, tmp_path: Path) -> None:
    """Its tokens were counted once for both answers, so sharing changed the loss."""
    found = []
    for packing in (True, False):
        module, batch = build(tmp_path, family, packing, task)
        assert batch.is_packed == packing
        assert not packing or any(group.prefix and len(group.branches) == 2 for group in batch.groups)
        total, metrics = module(batch)
        total.backward()
        named = module.unwrapped_model.named_parameters()
        grads = {name: one.grad for name, one in named if one.grad is not None}
        found.append((total, metrics["aux_loss"][0], grads))
    (total, auxiliary, grads), (wanted, wanted_auxiliary, wanted_grads) = found
    assert torch.allclose(auxiliary, wanted_auxiliary, rtol=1e-5)
    assert torch.allclose(total, wanted, rtol=1e-5)
    assert grads.keys() == wanted_grads.keys()
    error = sum((grads[name] - one).square().sum() for name, one in wanted_grads.items()) ** 0.5
    assert error <= 1e-5 * sum(one.square().sum() for one in wanted_grads.values()) ** 0.5


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


def test_an_evaluation_leaves_the_router_loss_out(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("coefficient", [None, 0.0])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_references_and_step_statistics_run_on_packed_rows(
    task: str, lora: dict[str, Any] | None, coefficient: float | None, tmp_path: Path
) -> None:
    """The class of the model computed the loss of them from a mask that packed rows do not have, and failed."""
    config = {"model_type": "mixtral", **SIZES, **FAMILIES["mixtral"], "output_router_logits": True, "vocab_size": 320}
    values = tiny_recipe(task, tmp_path)
    values["model"] = {"config": config, "lora": lora, "router_aux_loss_coef": coefficient}
    values["batch"] = {"total": 4, "micro": 4, "packing": True}
    made = make_task(RunConfig.model_validate(values))
    module = build_train_module(made)
    batch = make_batch(made.examples("train"), made.collate, [0, 1, 2, 3], 0)
    assert batch.is_packed
    if module.loss_inputs.step_stats is not None:
        answers, totals = module(batch, only="stats")
        batch = batch.with_tensors({**answers, **{key: total / weight for key, (total, weight) in totals.items()}})
    total, metrics = module(batch)
    assert total.isfinite()
    assert ("aux_loss" in metrics) == (coefficient is None)
    assert module.unwrapped_model.config.output_router_logits is True  # type: ignore[union-attr]


def test_the_model_generates_in_the_middle_of_training(tmp_path: Path) -> None:
    module, _ = build(tmp_path, "mixtral", False)
    prompts = [EncodedPrompt("", [5, 6, 7]), EncodedPrompt("", [5, 6, 7, 8, 9])]
    model = GenerationModel(module.unwrapped_model, SingleProcessWorld(), False)
    assert len(generate_answers(model, prompts, SamplingParams(max_new_tokens=4), module.task.tokenizer)) == 2  # type: ignore[attr-defined]
    assert model.unwrapped.config.output_router_logits is True


def test_dummy_rows_are_left_out(tmp_path: Path) -> None:
    module, batch = build(tmp_path, "mixtral", False)
    assert module.router_loss is not None
    ids, mask = batch.tensors["input_ids"], batch.tensors["attention_mask"]
    more = torch.cat([ids, ids[:1]]), torch.cat([mask, torch.ones_like(mask[:1])])
    with module.router_loss.collect() as alone:
        module.unwrapped_model(ids, attention_mask=mask)
    with module.router_loss.collect(dummy_rows=1) as beside:
        module.unwrapped_model(more[0], attention_mask=more[1])
    assert torch.allclose(alone[0], beside[0], rtol=1e-5)


@pytest.mark.parametrize("family", ["doge", "jetmoe", "llama4_text"])
def test_a_family_with_another_loss_is_refused(family: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, num_hidden_layers=1)
    config.output_router_logits = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(RecipeError, match=r"model\.config\.output_router_logits: asks for the loss of a router"):
        check_router_loss(model, None)
    check_router_loss(model, 0.0)

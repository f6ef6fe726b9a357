"""MLPs and norms in tiles: gradients do not change, one tile exists at a time, and no MLP runs more often than before."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.errors import RecipeError
from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing, offload_activation_checkpoints
from dstrain.models.tiles import TiledForward, check_tiles, enable_tiles, find_token_functions
from dstrain.tasks import make_task
from dstrain.training.build_model import build_train_module
from tests.cells import mark_slow
from tests.model_families import FAMILIES, family
from tests.tiny import tiny_recipe

TILE = 16
NORM_AFTER_MLP = ("gemma2", "gemma3_text", "glm4")


def made(name: str, tiled: Any, checkpointed: bool = True, **changes: Any) -> Any:
    values = family(name) | changes
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).train()
    if checkpointed:
        enable_gradient_checkpointing(model)
    enable_tiles(model, tiled) if tiled else None
    return model


def backward(model: Any, rows: int = 2, length: int = 37) -> dict[str, torch.Tensor]:
    """Return the gradients of a batch whose tokens no tile divides."""
    torch.manual_seed(1)
    ids = torch.randint(0, 300, (rows, length))
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    squares = [
        ((found[name] - wanted[name]).double().pow(2).sum(), wanted[name].double().pow(2).sum()) for name in wanted
    ]
    return float((sum(a for a, _ in squares) / sum(b for _, b in squares)) ** 0.5)


def mlps(model: Any) -> list[Any]:
    return [module for _, module in find_token_functions(model) if type(module).__name__.endswith("MLP")]


def count_tokens(model: Any) -> dict[str, int]:
    """Return a counter of the tokens that the first layer's MLP computes from now on."""
    found = {"tokens": 0}
    mlps(model)[0].down_proj.register_forward_hook(
        lambda module, inputs, output: found.update(tokens=found["tokens"] + output.shape[:-1].numel())
    )
    return found


# With recomputed layers every family; without them one, as tests/parity/test_families.py has all of them on engines.
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_whole_passes(name: str) -> None:
    assert distance(backward(made(name, TILE)), backward(made(name, False))) <= 1e-6


@pytest.mark.parametrize(("checkpointed", "tiled"), [(False, TILE), (False, True), (False, "auto"), (True, "auto")])
def test_gradients_are_the_same_with_every_value(
    checkpointed: bool, tiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.models.tiles.TILE_TOKENS", TILE)
    model = made("llama", tiled, checkpointed)
    counter = count_tokens(model)
    found = backward(model)
    assert distance(found, backward(made("llama", False, checkpointed))) <= 1e-6
    # auto never computes a tile once more.
    assert counter["tokens"] == 74 * (2 if checkpointed or tiled != "auto" else 1)


@pytest.mark.parametrize("name", ["llama", *NORM_AFTER_MLP])
def test_an_mlp_at_the_end_of_a_recomputed_layer_runs_no_third_time(name: str) -> None:
    """torch's checkpoint stops at the last saved tensor of the layer; a norm after the MLP needs the MLP's output."""
    model = made(name, TILE)
    counter = count_tokens(model)
    backward(model)
    assert counter["tokens"] == 74 * (3 if name in NORM_AFTER_MLP else 2)


def test_dropout_drops_the_same_units_when_a_tile_is_recomputed() -> None:
    """The derivative along a direction equals a difference of losses only if both passes drop the same units."""
    model = made("llama", TILE).double()
    mlp = mlps(model)[0]
    mlp.act_fn = torch.nn.Sequential(mlp.act_fn, torch.nn.Dropout(0.5))

    def loss() -> torch.Tensor:
        torch.manual_seed(1)
        ids = torch.randint(0, 300, (2, 37))
        return model(input_ids=ids, labels=ids).loss

    loss().backward()
    weight, step = mlp.down_proj.weight, 1e-2
    direction = torch.randn_like(weight)
    slope = float((weight.grad * direction).sum())
    with torch.no_grad():
        weight.add_(direction, alpha=step)
        above = float(loss())
        weight.add_(direction, alpha=-2 * step)
        below = float(loss())
    assert (above - below) / (2 * step) == pytest.approx(slope, rel=2e-2)  # the loss is in fp32


def test_16_bit_gradients_of_tiles_are_rounded_once() -> None:
    """A sum of many tiles in bf16 would be off by 1 % (docs/memory.md)."""
    exact, whole, tiled = (made("llama", size).to(dtype) for size, dtype in (
        (False, torch.float64), (False, torch.bfloat16), (TILE, torch.bfloat16)))  # fmt: skip
    exact.load_state_dict({name: one.double() for name, one in whole.state_dict().items()})
    names = [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    grads = [{name: backward(model, 8, 64)[name].double() for name in names} for model in (exact, whole, tiled)]
    assert distance(grads[2], grads[0]) <= 1.05 * distance(grads[1], grads[0])


def test_only_weights_of_the_mlp_may_be_trained() -> None:
    """The input of the first layer has no gradient then, which a Function would take for a pass without one."""
    models = [made("llama", size, checkpointed=False) for size in (TILE, False)]
    for model in models:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".mlp." in name)
    assert distance(*map(backward, models)) <= 1e-6


def test_passes_without_gradients_have_tiles_and_short_ones_none() -> None:
    model = made("llama", TILE)
    sizes: list[int] = []
    mlps(model)[0].down_proj.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[1]))
    with torch.no_grad():
        model(input_ids=torch.zeros(1, 40, dtype=torch.long))
        model(input_ids=torch.zeros(1, TILE, dtype=torch.long))
    assert sizes == [14, 14, 12, TILE], "equal tiles, and a short pass in one"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lora"), [*product(FAMILIES, [False]), ("llama", True), ("gemma2", True)])
def test_short_and_long_passes_have_their_gradients_in_the_same_order(name: str, lora: bool) -> None:
    """ZeRO adds what the processes have at the same place of a bucket; only one of them may have a long pass."""
    orders: list[list[str]] = []
    for rows, length in ((1, TILE), (1, TILE + 1), (3, 50)):
        model = made(name, TILE)
        if lora:
            model = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
        orders.append([])
        for which, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda _, order=orders[-1], which=which: order.append(which)
                )
        backward(model, rows, length)
    assert orders[0] == orders[1] == orders[2]


def test_experts_are_left_alone_and_their_norms_are_not() -> None:
    kinds = {type(module).__name__ for _, module in find_token_functions(made("mixtral", False))}
    assert kinds == {"MixtralRMSNorm"}


def test_tiles_of_nothing_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    check_tiles(model, "auto")  # type: ignore[arg-type]
    with pytest.raises(
        RecipeError, match=r"^model\.tiled_mlp: is 64, but Linear has no MLP or norm .* write auto or false"
    ):
        check_tiles(model, 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [8, 0, -1, "half", 0.5])
def test_a_number_of_tiles_is_no_number_of_tokens(value: Any) -> None:
    with pytest.raises(ValueError, match="tiled_mlp"):
        RunConfig.model_validate({"task": "sft", "model": {"tiled_mlp": value}})


def recipe(folder: Path, **changes: Any) -> dict[str, Any]:
    values = tiny_recipe("sft", folder)
    for section, block in changes.items():
        values[section] = {**values.get(section, {}), **block}
    return values


def gradients(values: dict[str, Any], on_host: bool = False) -> dict[str, torch.Tensor]:
    task = make_task(RunConfig.model_validate(values))
    objective = build_train_module(task)
    if on_host:
        offload_activation_checkpoints(objective.model, pin_memory=False)
    examples: Any = task.examples("train")
    total, _ = objective.train()(make_batch(examples, task.collate, [0, 1, 2], 0))
    total.backward()
    return {name: one.grad for name, one in objective.named_parameters() if one.grad is not None}


LORA = {"rank": 2, "dropout": 0.0}
COMPOSED = {
    "packed": {}, "padded": {"batch": {"packing": False}}, "lora": {"model": {"lora": LORA}},
    "dora": {"model": {"lora": {**LORA, "dora": True}}},
    "qlora": {"model": {"lora": LORA, "quantize": "nf4"}},
    "frozen": {"model": {"freeze": ["*.mlp"]}},
    "half of the layers": {"model": {"gradient_checkpointing": 0.5}},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("on_host", [False, True])
# lora and packed have the same graph.
@pytest.mark.parametrize("name", mark_slow(COMPOSED, ["dora", "half of the layers"]))
def test_tiles_compose_with_what_a_recipe_can_ask_for(name: str, on_host: bool, tmp_path: Path) -> None:
    changes = COMPOSED[name]
    values = {
        size: recipe(tmp_path, **{**changes, "model": {**changes.get("model", {}), "tiled_mlp": size}})
        for size in (False, TILE)
    }
    assert distance(gradients(values[TILE], on_host), gradients(values[False])) <= 1e-6


def test_passes_that_cannot_be_long_are_left_alone(tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(recipe(tmp_path)))
    modules = build_train_module(task).model.modules()
    assert not any(isinstance(vars(module).get("forward"), TiledForward) for module in modules)

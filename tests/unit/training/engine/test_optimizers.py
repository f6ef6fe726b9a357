"""Optimizers and what they run on: Lion by hand, Muon's matrices, and the refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.config import BatchPlan, RunConfig, read_recipe
from dstrain.config.schema import OptimConfig
from dstrain.ds_config import Device, Precision, resolve_ds_config
from dstrain.errors import PresetError, RecipeError
from dstrain.models.params import build_param_groups, muon_param_ids
from dstrain.preset import read_preset
from dstrain.training.engine.optimizers import Lion, make_optimizer, split_by_numel

CPU = torch.device("cpu")
SHAPE = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_key_value_heads": 2, "n_embd": 16, "n_layer": 2, "n_head": 2, "pad_token_id": 0}  # fmt: skip


def model(kind: str, auto: str, **own: Any) -> Any:
    """A skeleton of a small model."""
    import transformers

    known = transformers.AutoConfig.for_model(kind)
    names = {*known.to_dict(), *known.attribute_map}
    settings = {name: value for name, value in (SHAPE | own).items() if name in names}
    with torch.device("meta"):
        return getattr(transformers, auto).from_config(transformers.AutoConfig.for_model(kind, **settings))


def test_lion_is_its_papers_algorithm_2() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))
    lion = Lion([{"params": [weight], "lr": 0.1, "weight_decay": 0.2}], (0.9, 0.99))
    weight.grad = torch.tensor([3.0, -1.0, 0.0], dtype=torch.float64)
    lion.step()
    first = [1 - 0.1 * (1 + 0.2 * 1), -2 - 0.1 * (-1 + 0.2 * -2), 0.5 - 0.1 * (0 + 0.2 * 0.5)]
    assert weight.tolist() == pytest.approx(first, rel=1e-12)
    assert lion.state[weight]["exp_avg"].tolist() == pytest.approx([0.03, -0.01, 0.0], rel=1e-12)
    weight.grad = torch.tensor([-0.2, 1.0, -0.1], dtype=torch.float64)
    lion.step()  # 0.9 * 0.03 - 0.1 * 0.2 > 0: the average goes against the gradient
    signs = [1, 1, -1]
    second = [w - 0.1 * (sign + 0.2 * w) for w, sign in zip(first, signs, strict=True)]
    assert weight.tolist() == pytest.approx(second, rel=1e-12)
    assert lion.state[weight]["exp_avg"].tolist() == pytest.approx([0.0277, 0.0001, -0.001], rel=1e-9)


def test_lion_updates_many_tensors_as_each_alone() -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = [(7, 3), (50,), (2, 2), (30,), (1,), (9, 5)]
    start = [torch.randn(size, generator=draw) for size in sizes]
    gradients = [torch.randn(size, generator=draw) for size in sizes]

    def update(groups: list[list[int]]) -> list[torch.Tensor]:
        weights = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        for indices in groups:
            lion = Lion([{"params": [weights[i] for i in indices], "lr": 0.1, "weight_decay": 0.2}], (0.9, 0.99))
            for turn in range(2):
                for index in indices:
                    weights[index].grad = gradients[index] if turn == 0 else -(gradients[index] ** 2)
                lion.step()
        return [weight.detach() for weight in weights]

    together, alone = update([[*range(len(sizes))]]), update([[index] for index in range(len(sizes))])
    assert all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def test_tensors_are_updated_in_lists_of_at_most_the_largest() -> None:
    tensors = [torch.empty(numel) for numel in (4, 3, 10, 1, 6, 3, 12)]
    assert [[len(one) for one in part] for part in split_by_numel(tensors, 10)] == [[4, 3], [10], [1, 6, 3], [12]]
    assert list(split_by_numel([], 10)) == []


def test_lion_leaves_a_weight_without_a_gradient_where_it_is() -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0, 1.0]))
    lion = Lion([{"params": [weight], "lr": 0.1}], (0.9, 0.99))
    for _ in range(3):
        weight.grad = torch.tensor([1.0, 0.0])
        lion.step()
    assert weight[1] == 1.0


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "adafactor"])
def test_a_new_optimizer_does_nothing_until_a_step_brings_a_rate(name: str) -> None:
    """DeepSpeed's zero-gradient step at stage 0 in bf16 would decay the weights once more."""
    layer = torch.nn.Linear(3, 2)
    before = layer.weight.detach().clone()
    optim = OptimConfig(name=name, lr=0.5, weight_decay=0.5)
    optimizer = make_optimizer(build_param_groups(layer, optim), optim, None, CPU)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(layer.weight, before)


def test_adafactor_keeps_a_row_and_a_column_of_each_matrix() -> None:
    layer, optim = torch.nn.Linear(30, 20), OptimConfig(name="adafactor")
    optimizer = make_optimizer(build_param_groups(layer, optim), optim, None, CPU)
    layer(torch.ones(30)).sum().backward()
    optimizer.step()
    kept = {name: value.numel() for name, value in optimizer.state[layer.weight].items() if torch.is_tensor(value)}
    assert kept == {"step": 1, "row_var": 20, "col_var": 30}


@pytest.mark.parametrize(
    ("kind", "auto", "wanted"),
    [
        ("llama", "AutoModelForCausalLM", 14),
        ("llama", "AutoModelForSequenceClassification", 14),
        ("gpt2", "AutoModelForCausalLM", 8),
        ("bert", "AutoModelForSequenceClassification", 13),
        ("roberta", "AutoModelForSequenceClassification", 12),
    ],
)
def test_the_matrices_of_the_body_are_muons(kind: str, auto: str, wanted: int) -> None:
    made = model(kind, auto)
    chosen = muon_param_ids(made)
    names = [name for name, parameter in made.named_parameters() if id(parameter) in chosen]
    assert len(names) == wanted
    others = ("emb", "wte", "wpe", "score", "head", "norm", "bias")
    assert not [name for name in names if any(word in name for word in others)]
    assert all(dict(made.named_parameters())[name].ndim == 2 for name in names)


def test_a_tied_head_is_the_embedding_and_not_muons() -> None:
    made = model("llama", "AutoModelForCausalLM", tie_word_embeddings=True)
    assert id(made.get_input_embeddings().weight) not in muon_param_ids(made)
    assert len(muon_param_ids(made)) == 14


def test_adapters_are_muons_and_the_head_beside_them_is_not() -> None:
    from peft import LoraConfig, get_peft_model

    made = get_peft_model(
        model("llama", "AutoModelForSequenceClassification"),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["score"]),
    )
    chosen = muon_param_ids(made)
    names = {name for name, p in made.named_parameters() if p.requires_grad and id(p) in chosen}
    assert len(names) == 4
    assert all("lora_" in name for name in names)


def test_a_position_table_and_a_state_matrix_are_not_muons() -> None:
    made = model("mamba", "AutoModelForCausalLM", state_size=4)
    names = [name for name, parameter in made.named_parameters() if id(parameter) in muon_param_ids(made)]
    assert names
    assert not any("A_log" in name for name in names)


def test_one_rate_serves_muon_and_adamw_and_the_decay_stays_the_same() -> None:
    """Rate times decay, as AdamW has it; rate times 0.2 sqrt(max(rows, columns)) / sqrt(max(1, rows / columns))."""
    body = torch.nn.ModuleDict({"tall": torch.nn.Linear(4, 9), "wide": torch.nn.Linear(16, 9)})
    optim = OptimConfig(name="muon", lr=1e-3, weight_decay=0.1)
    groups = {(g.use_muon, g.params[0].shape[-1]): g for g in build_param_groups(body, optim)}
    assert sorted(groups) == [(False, 9), (True, 4), (True, 16)]
    assert groups[True, 4].lr_scale == pytest.approx(0.2 * 9**0.5 / (9 / 4) ** 0.5)
    assert groups[True, 16].lr_scale == pytest.approx(0.2 * 16**0.5)
    assert all(g.lr_scale * g.weight_decay == pytest.approx(0.1) for key, g in groups.items() if key[0])


def test_a_group_may_be_left_to_adamw() -> None:
    body = torch.nn.ModuleDict({"tower": torch.nn.Linear(4, 9), "head": torch.nn.Linear(9, 2)})
    optim = OptimConfig(name="muon", lr=1e-3, groups={"head": {"muon": False, "lr": 1e-4}})
    chosen = [p for group in build_param_groups(body, optim) if group.use_muon for p in group.params]
    assert [id(p) for p in chosen] == [id(body["tower"].weight)]


def test_muon_without_a_matrix_is_refused() -> None:
    norms = torch.nn.ModuleDict({"table": torch.nn.Embedding(4, 8), "norm": torch.nn.LayerNorm(8)})
    with pytest.raises(
        RecipeError, match="muon finds no trainable hidden matrix, so it would be the same as adamw; write adamw"
    ):
        build_param_groups(norms, OptimConfig(name="muon"))


def test_each_optimizer_has_its_own_defaults_and_what_is_written_counts() -> None:
    assert OptimConfig(name="lion").betas == (0.9, 0.99)
    assert OptimConfig(name="lion", betas=(0.95, 0.98)).betas == (0.95, 0.98)
    assert (OptimConfig().betas, OptimConfig().clip, OptimConfig(name="muon").clip) == ((0.9, 0.999), 1.0, 0.0)


def resolved(name: str, preset: str, precision: str = "fp32", optim: dict[str, Any] | None = None, **keys: Any) -> Any:
    """The JSON of a run, with keys added to the preset's."""
    recipe = RunConfig.model_validate({"task": "rm", "optim": {"name": name, **(optim or {})}, "precision": precision})
    found = read_preset(preset)
    zero = {**found.block["zero_optimization"], **keys.pop("zero", {})}
    made = replace(found, block={**found.block, **keys, "zero_optimization": zero})
    device = Device("cuda" if precision == "fp16" else "cpu", True)
    return resolve_ds_config(recipe, made, BatchPlan(4, 1, 2), 2, device, Path("/tmp/run"))


@pytest.mark.parametrize("preset", ["zero1", "zero2", "zero2_offload", "zero3"])
def test_adafactor_is_refused_where_zero_cuts_matrices(preset: str) -> None:
    said = rf"needs whole matrices, but ZeRO stage {preset[4]} partitions .* zero0, or optim\.name: adamw"
    with pytest.raises(RecipeError, match=said):
        resolved("adafactor", preset)
    assert resolved("adafactor", "zero0")


def test_muon_with_clipping_is_refused_where_deepspeed_would_clip_its_steps() -> None:
    with pytest.raises(RecipeError, match=r"optim\.clip: is 1, but at ZeRO stage 2 DeepSpeed clips Muon's updates"):
        resolved("muon", "zero2", optim={"clip": 1.0})
    assert resolved("muon", "zero0", optim={"clip": 1.0})["gradient_clipping"] == 1.0
    assert resolved("muon", "zero2")["gradient_clipping"] == 0.0


def test_muon_is_refused_in_fp16() -> None:
    with pytest.raises(RecipeError, match="but the loss scale of fp16 changes between steps; use precision: bf16"):
        resolved("muon", "zero2", "fp16")
    assert resolved("lion", "zero2", "fp16")


def test_muon_at_stage_3_takes_whole_gradients() -> None:
    assert resolved("muon", "zero3")["zero_optimization"]["reduce_scatter"] is False
    assert "reduce_scatter" not in resolved("lion", "zero3")["zero_optimization"]
    with pytest.raises(PresetError, match=r"zero3\.json zero_optimization\.reduce_scatter: DeepSpeed's Muon needs"):
        resolved("muon", "zero3", zero={"reduce_scatter": True})


@pytest.mark.parametrize(
    ("preset", "precision", "accumulation", "fine"),
    [
        ("zero2", "bf16", "fp32", False),
        ("zero2_offload", "bf16", "fp32", False),
        ("zero1", "bf16", "fp32", True),
        ("zero3", "bf16", "fp32", True),
        ("zero2", "fp32", "fp32", True),
    ],
)
def test_muon_refuses_sums_of_gradients_that_deepspeed_would_lose(
    preset: str, precision: Precision, accumulation: str, fine: bool
) -> None:
    given = {"data_types": {"grad_accum_dtype": accumulation}}
    if fine:
        assert resolved("muon", preset, precision, **given)
    else:
        with pytest.raises(
            PresetError, match=r"data_types\.grad_accum_dtype: .*Muon computes a wrong update at stage 2"
        ):
            resolved("muon", preset, precision, **given)


def test_bf16_masters_in_host_memory_are_cpuadams_alone() -> None:
    half = {"bf16": {"bf16_master_weights_and_grads": True}}
    assert resolved("adamw", "zero2_offload", "bf16", **half)
    with pytest.raises(PresetError, match=r"bf16\.bf16_master_weights_and_grads: .* only with its own CPU Adam"):
        resolved("lion", "zero2_offload", "bf16", **half)


@pytest.mark.parametrize("name", ["adamw", "sgd", "lion", "muon"])
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero2_offload", "zero3", "zero3_offload", "zero3_nvme"])
def test_the_other_optimizers_run_with_every_preset(name: str, preset: str) -> None:
    assert resolved(name, preset)["zero_force_ds_cpu_optimizer"] is False


def test_a_recipe_that_names_them_reads_clean(tmp_path: Path) -> None:
    for name in ("adamw", "sgd", "lion", "adafactor", "muon"):
        (tmp_path / "recipe.yaml").write_text(f"task: rm\noptim: {{name: {name}}}\n")
        assert read_recipe(tmp_path / "recipe.yaml").config.optim.name == name
    (tmp_path / "recipe.yaml").write_text("task: rm\nadafactor: true\n")
    with pytest.raises(RecipeError, match=r"here it is optim\.name: adafactor"):
        read_recipe(tmp_path / "recipe.yaml")

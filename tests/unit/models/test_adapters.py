"""An adapter folder as model.path: merged into its base, as peft would, and refused where it does not fit."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import RecipeError, TaskError
from dstrain.models.adapters import load_adapters, use_reference
from dstrain.models.folder import read_adapter
from dstrain.models.load import load_model, read_config
from dstrain.models.params import matches_pattern
from dstrain.models.weights import weights_fingerprint
from dstrain.tasks import make_task
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.module import TrainModule
from tests.adapters import SIZES, adapter, merged_by_peft
from tests.tiny import tiny_recipe


def loaded(at: Path, auto: Any = AutoModelForCausalLM) -> Any:
    model = ModelConfig(path=str(at))
    config = read_config(model)
    config.num_labels = 1
    return load_model(auto, model, config, 0)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_dora": True},
        {"use_rslora": True, "alpha_pattern": {"q_proj": 7}, "rank_pattern": {"v_proj": 2}},
        {"target_modules": ["q_proj"], "layers_to_transform": [1]},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"modules_to_save": ["lm_head"]},
        {"family": "mixtral"},  # peft adapts the experts, which are parameters
    ],
    ids=str,
)
def test_an_adapter_is_merged_as_peft_merges_it(settings: dict[str, Any], tmp_path: Path) -> None:
    at = adapter(tmp_path, **settings)
    ours, theirs = loaded(at), merged_by_peft(at)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert torch.allclose(ours.state_dict()[name], value, atol=1e-7), name
    assert any(
        not torch.equal(value, ours.state_dict()[name])
        for name, value in AutoModelForCausalLM.from_pretrained(str(tmp_path / "base")).state_dict().items()
    )
    assert all(parameter.requires_grad for parameter in ours.parameters())
    assert type(ours) is type(theirs)


def test_an_adapter_on_tied_embeddings_unties_them(tmp_path: Path) -> None:
    ours = loaded(adapter(tmp_path, tied=True, target_modules=["embed_tokens"]))
    assert not ours.config.tie_word_embeddings
    assert not torch.equal(ours.lm_head.weight, ours.model.embed_tokens.weight)
    assert all(parameter.requires_grad for parameter in ours.parameters())


def test_a_reward_model_goes_on_from_its_adapters_with_their_head(tmp_path: Path) -> None:
    auto = AutoModelForSequenceClassification
    at = adapter(tmp_path, auto, modules_to_save=["score"], task_type="SEQ_CLS")
    assert torch.equal(loaded(at, auto).score.weight, merged_by_peft(at, auto).score.weight)


def recipe(task: str, at: Path, tmp_path: Path) -> RunConfig:
    values = tiny_recipe(task, tmp_path)
    made: Any = make_task(RunConfig.model_validate(values))
    made.tokenizer.save_pretrained(str(tmp_path / "base"))
    return RunConfig.model_validate({**values, "model": {"path": str(at)}})


@pytest.mark.parametrize("task", ["sft", "rm"])
def test_a_task_says_what_it_is_and_trains_on_it(task: str, tmp_path: Path) -> None:
    at = adapter(tmp_path)
    made = make_task(recipe(task, at, tmp_path))
    made.checks.required_keys()
    made.checks.run()
    said = made.checks.info_messages()
    assert f"{at} is a LoRA adapter of {tmp_path / 'base'}: it is merged into these weights on loading" in said
    assert any("newly initialized from seed 0: score.weight" in line for line in said) == (task == "rm")
    model: Any = made.build_model()
    wanted = merged_by_peft(at).model.state_dict()
    assert all(torch.equal(value, wanted[name]) for name, value in model.model.state_dict().items())


def change(name: str, value: Any) -> Callable[[Path], None]:
    def of(at: Path) -> None:
        file = at / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))

    return of


def lose(at: Path) -> None:
    tensors = load_file(at / "adapter_model.safetensors")
    save_file(dict(list(tensors.items())[1:]), at / "adapter_model.safetensors")


@pytest.mark.parametrize(
    ("spoil", "wanted"),
    [
        (change("r", 8), r"q_proj\.lora_A\.weight is \(4, 16\) in its file and \(8, 16\) in the model"),
        (change("target_modules", ["nowhere"]), "the model has none of the modules that it adapts"),
        (change("target_modules", ["q_proj"]), "missing keys: none; unexpected keys: model.layers.0"),
        (lose, "missing keys: base_model.model"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_before_anything_starts(
    spoil: Callable[[Path], None], wanted: str, tmp_path: Path
) -> None:
    at = adapter(tmp_path)
    spoil(at)
    with pytest.raises(RecipeError, match=rf"^model\.path: the adapter in .* does not fit the model.*{wanted}"):
        make_task(recipe("sft", at, tmp_path)).checks.run()


def test_a_score_has_no_place_in_a_model_that_writes(tmp_path: Path) -> None:
    at = adapter(tmp_path, AutoModelForSequenceClassification, modules_to_save=["score"])
    (tmp_path / "writer").mkdir()
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).save_pretrained(str(tmp_path / "writer"))
    change("base_model_name_or_path", str(tmp_path / "writer"))(at)
    made: Any = make_task(RunConfig.model_validate(tiny_recipe("sft", tmp_path)))
    made.tokenizer.save_pretrained(str(at))
    values = tiny_recipe("sft", tmp_path) | {"model": {"path": str(at)}}
    with pytest.raises(RecipeError, match=r"unexpected keys: score\.weight"):
        make_task(RunConfig.model_validate(values)).checks.run()


def test_the_fingerprint_covers_adapter_and_base(tmp_path: Path) -> None:
    at = adapter(tmp_path)
    first = weights_fingerprint(ModelConfig(path=str(at)), 0)
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}, tmp_path / "base" / "model.safetensors")
    assert weights_fingerprint(ModelConfig(path=str(at)), 0) != first


def test_an_exported_adapter_imports_nothing_that_its_config_names(tmp_path: Path) -> None:
    at = adapter(tmp_path)
    change("megatron_config", {"tensor_model_parallel_size": 1})(at)
    with pytest.raises(RecipeError, match=r"megatron_config: .* is not supported"):
        load_adapters(AutoModelForCausalLM.from_pretrained(str(tmp_path / "base")), at)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modules_to_save", 5), ("modules_to_save", [5]), ("target_modules", 5), ("exclude_modules", {"a": 1}), ("r", "x"),
        ("rank_pattern", 7), ("rank_pattern", {"q_proj": "x"}), ("layers_to_transform", "x"), ("use_dora", "yes"),
        ("lora_alpha", []), ("layers_pattern", [[]]),
    ],
)  # fmt: skip
def test_a_setting_of_another_type_is_a_sentence(name: str, value: Any, tmp_path: Path) -> None:
    at = tmp_path / "adapter"
    at.mkdir()
    about = {
        "peft_type": "LORA",
        "base_model_name_or_path": "org/base",
        "r": 4,
        "target_modules": ["q_proj"],
        name: value,
    }
    (at / "adapter_config.json").write_text(json.dumps(about))
    (at / "adapter_model.safetensors").write_bytes(b"")
    wanted = re.escape(f"its {name} is {value!r}; export or download it again")
    for read in (lambda: read_adapter(str(at)), lambda: load_adapters(None, at)):
        with pytest.raises(RecipeError, match=wanted):
            read()


def test_settings_as_peft_writes_them_are_taken(tmp_path: Path) -> None:
    settings = {"target_modules": r".*\.q_proj", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 8.0},
                "layers_to_transform": None, "use_rslora": True, "lora_alpha": 16}  # fmt: skip
    assert read_adapter(str(adapter(tmp_path, **settings))) is not None


# Adapters: what of them is trained is decided once.


pytestmark = pytest.mark.usefixtures("fresh_cache")


def objective(task: str, folder: Path, **lora: Any) -> TrainModule:
    """A tiny policy whose first layer's adapters are frozen; its reference is the model without adapters."""
    values = tiny_recipe(task, folder)
    values["model"] |= {"lora": {"rank": 2, **lora}, "freeze": ["*.layers.0"]}
    return build_train_module(make_task(RunConfig.model_validate(values)))


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.parametrize("dora", [False, True])
def test_asking_the_reference_trains_no_frozen_adapter(task: str, dora: bool, tmp_path: Path) -> None:
    made: Any = objective(task, tmp_path, dora=dora)
    before, names = trained(made.model), set(made.stored_model.shapes())
    assert before == made.trainable_names
    assert before
    assert not any(".layers.0." in name for name in before)
    batch = made.task.collate([made.task.examples("train")[index] for index in range(2)])
    made.train()
    made(batch, only="stats" if made.task.loss_inputs.step_stats is not None else None)
    assert trained(made.model) == before
    assert set(made.stored_model.shapes()) == names


def test_the_model_answers_without_its_adapters_inside(tmp_path: Path) -> None:
    made: Any = objective("dpo", tmp_path)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        plain = made.model.get_base_model()(input_ids=ids).logits
        for name, parameter in made.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        with use_reference(made.model):
            assert torch.equal(made.model(input_ids=ids).logits, plain)
        assert not torch.equal(made.model(input_ids=ids).logits, plain)


# An adapter that is trained on.


def continued(task: str, at: Path, tmp_path: Path, **lora: Any) -> Any:
    """Return a task that trains the adapter of a folder on."""
    values = recipe(task, at, tmp_path).model_dump()
    values["model"]["lora"] = {"create_new_adapter": False, **lora}
    return make_task(RunConfig.model_validate(values))


@pytest.mark.parametrize(
    "settings",
    [
        {"use_dora": True},
        {"use_rslora": True, "alpha_pattern": {"q_proj": 7}, "rank_pattern": {"v_proj": 2}, "lora_alpha": 5},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_an_adapter_is_trained_on_as_peft_loads_it(settings: dict[str, Any], tmp_path: Path) -> None:
    at = adapter(tmp_path, **settings)
    ours = build_train_module(continued("sft", at, tmp_path)).model
    base = AutoModelForCausalLM.from_pretrained(str(tmp_path / "base"))
    theirs = PeftModel.from_pretrained(base, str(at), is_trainable=True)
    assert trained(ours) == trained(theirs)
    found, wanted = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_the_run_says_that_it_trains_the_adapter_on(tmp_path: Path) -> None:
    at = adapter(tmp_path, lora_alpha=12, target_modules=["q_proj", "v_proj"])
    made = continued("sft", at, tmp_path)
    lora = made.recipe.model.lora
    assert (lora.rank, lora.alpha, sorted(lora.targets), lora.dora) == (4, 12.0, ["q_proj", "v_proj"], False)
    made.checks.run()
    said = " ".join(made.checks.info_messages())
    assert f"{at} is a LoRA adapter of {tmp_path / 'base'}: it is trained on (rank 4, alpha 12)" in said
    merged = recipe("sft", at, tmp_path).model_dump()
    merged["model"]["lora"] = {}
    other = make_task(RunConfig.model_validate(merged))
    other.checks.run()
    assert "a new adapter is trained; model.lora.create_new_adapter: false trains this one on" in " ".join(
        other.checks.info_messages()
    )


def test_a_reward_model_gets_a_new_head_on_the_adapter_of_a_policy(tmp_path: Path) -> None:
    made = build_train_module(continued("rm", adapter(tmp_path), tmp_path)).model
    assert any("score.modules_to_save" in name for name in trained(made))


def test_the_reference_of_an_adapter_that_is_trained_on_is_that_adapter(tmp_path: Path) -> None:
    """Not its base: the initial policy is the base with the adapter."""
    module: Any = build_train_module(continued("dpo", adapter(tmp_path), tmp_path))
    task, before = module.task, trained(module.model)
    assert task.loss_inputs.reference.kind == "adapter"
    batch = task.collate([task.examples("train")[index] for index in range(2)])
    total, _ = module(batch)
    assert float(total.detach()) / batch.weight == pytest.approx(math.log(2), abs=1e-6)
    first = module._reference_outputs(batch)
    with torch.no_grad():
        for name, parameter in module.model.named_parameters():
            if name in before:
                parameter.add_(0.05)
    assert all(torch.equal(value, first[name]) for name, value in module._reference_outputs(batch).items())
    assert trained(module.model) == before == module.trainable_names
    assert set(module.stored_model.shapes()) == before, "checkpoints hold the adapter once"
    apart = task.reference.build()
    with torch.no_grad():
        outputs = task.loss_inputs.reference.outputs(apart, batch)
    assert all(torch.allclose(value, first[name], atol=1e-5) for name, value in outputs.items())


@pytest.mark.parametrize(
    ("lora", "wanted"),
    [
        ({"rank": 9}, r"model\.lora\.rank: is 9, but the adapter in .* has 4; leave it out"),
        ({"dora": True}, r"model\.lora\.dora: is True, but the adapter in .* has False; leave it out"),
    ],
)
def test_other_settings_than_the_adapters_are_refused(lora: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=wanted):
        continued("sft", adapter(tmp_path), tmp_path, **lora)


def test_what_is_no_adapter_cannot_be_trained_on(tmp_path: Path) -> None:
    at = adapter(tmp_path)
    with pytest.raises(
        RecipeError, match=r"create_new_adapter: is false, but model\.path \(.*base\) is no adapter folder"
    ):
        continued("sft", at.parent / "base", tmp_path)


# Settings of new adapters, by peft's names.


def test_rslora_scales_by_the_root_of_the_rank(tmp_path: Path) -> None:
    made: Any = objective("sft", tmp_path, rank=4, alpha=6.0, use_rslora=True)
    layers = [part for part in made.model.modules() if isinstance(part, LoraLayer)]
    assert {layer.scaling["default"] for layer in layers} == {6.0 / math.sqrt(4)}
    assert made.model.peft_config["default"].use_rslora


def test_a_target_that_is_not_in_the_model_is_named_with_those_that_are(tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path)
    values["model"] |= {"lora": {"targets": ["q_proj", "v_porj", "mlp.up_proj"]}}
    made = make_task(RunConfig.model_validate(values))
    wanted = (
        r"^model\.lora\.targets: v_porj is not in the model; these would match: down_proj, embed_tokens, gate_proj, "
    )
    with pytest.raises(RecipeError, match=wanted):
        made.checks.run()


def mixtral(tmp_path: Path, **lora: Any) -> Any:
    config = {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}
    values = tiny_recipe("sft", tmp_path)
    return make_task(RunConfig.model_validate({**values, "model": {"config": config, "lora": {"rank": 2, **lora}}}))


def test_experts_get_adapters_by_their_names(tmp_path: Path) -> None:
    made: Any = build_train_module(mixtral(tmp_path, targets=["q_proj", "experts.down_proj"]))
    adapted = {".".join(name.partition(".lora_A")[0].split(".")[-2:]) for name in trained(made.model)}
    assert adapted >= {"self_attn.q_proj", "mlp.experts"}


@pytest.mark.parametrize("other", [{"dora": True}, {"dropout": 0.1}])
def test_adapters_of_experts_are_refused_with_what_they_cannot_do(other: dict[str, Any], tmp_path: Path) -> None:
    wanted = r"^model\.lora\.targets: 'all-linear' adapts experts, which is not possible with dropout or dora; remove"
    with pytest.raises(RecipeError, match=wanted):
        mixtral(tmp_path, **other).checks.run()


@pytest.mark.parametrize("pattern", ["lora_A", "model.layers.0", "*.layers.0.mlp"])
def test_adapters_are_frozen_by_the_same_patterns_before_and_in_a_run(pattern: str, tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path)
    values["model"] |= {"lora": {"rank": 2}, "freeze": [pattern]}
    made = make_task(RunConfig.model_validate(values))
    made.checks.run()
    names = trained(build_train_module(made).model)
    assert names
    assert not any(matches_pattern(name.removeprefix("base_model.model."), pattern) for name in names)


def test_an_expression_that_matches_no_module_is_refused_before_a_run(tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path)
    values["model"] |= {"lora": {"targets": "layers.*q_proj"}}
    with pytest.raises(
        RecipeError, match=r"^model\.lora\.targets: 'layers\.\*q_proj': .*; these would match: down_proj"
    ):
        make_task(RunConfig.model_validate(values)).checks.run()


def test_lora_plus_needs_adapters(tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path) | {"optim": {"loraplus_lr_ratio": 16}}
    values["model"]["lora"] = None
    with pytest.raises(TaskError, match="loraplus_lr_ratio: is 16, but the run has no adapters"):
        make_task(RunConfig.model_validate(values))

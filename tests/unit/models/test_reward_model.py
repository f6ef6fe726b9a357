"""Reward models of families that transformers has none for: loaded, trained, saved and loaded again, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

import dstrain
from dstrain.config.schema import LoraConfig, ModelConfig, RunConfig
from dstrain.errors import RecipeError, TaskError, UsageError
from dstrain.models.adapters import add_adapters, merge_adapters
from dstrain.models.folder import SCORE_HEAD_FILE
from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing
from dstrain.models.load import build_meta_model, load_model, read_config
from dstrain.models.params import components_by_id, freeze
from dstrain.models.reward_model import AutoRewardModel, get_reward_model_class
from dstrain.tasks import make_task
from dstrain.tasks.rm import _no_cache_kwargs
from dstrain.training.export_checks import (
    check_exported_files,
    check_loaded_model,
    compute_digests,
    get_export_tensors,
    get_state_tensors,
)
from tests.tiny import tiny_recipe
from tests.vision_recipes import GEMMA3, IDEFICS3, TEXT, TOWER, llava

ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN_TOWER = {"hidden_size": 24, "depth": 2, "num_heads": 4, "out_hidden_size": 32, "intermediate_size": 36}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 28, **TOWER}
MODELS: dict[str, dict[str, Any]] = {
    "llava": llava(),
    "idefics3": IDEFICS3,
    "smolvlm": {**IDEFICS3, "model_type": "smolvlm"},
    "gemma3": {**GEMMA3, "mm_tokens_per_image": 16},
    "paligemma": {"text_config": {"model_type": "gemma", "head_dim": 8, **TEXT}, "vision_config": SIGLIP},
    "llava_next": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": llava()["vision_config"]},
    "llava_onevision": {"text_config": {"model_type": "llama", **TEXT}, "vision_config": SIGLIP},
    "mistral3": {"text_config": {"model_type": "mistral", "head_dim": 8, **TEXT}, "vision_config": {"model_type": "pixtral", **TOWER, "image_size": 28}},
    "qwen2_vl": {"text_config": {**TEXT, "rope_parameters": ROPE}, "vision_config": {"depth": 2, "embed_dim": 24, "num_heads": 4, "hidden_size": 32}},
    "qwen2_5_vl": {"text_config": {**TEXT, "rope_parameters": ROPE}, "vision_config": QWEN_TOWER},
}  # fmt: skip
MADE = [name for name in MODELS if name != "gemma3"]
"""Those without a class of transformers' own."""


def config_of(name: str) -> Any:
    config = read_config(ModelConfig(config={"model_type": name, **MODELS[name]}))
    config.num_labels = 1
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config.get_text_config(), token, 0)
    return config


def written(name: str, folder: Path) -> Any:
    """A model that writes text, saved in the folder."""
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config_of(name))
    model.save_pretrained(str(folder))
    return model


def loaded(folder: Path, seed: int = 0, **settings: Any) -> Any:
    model = ModelConfig(path=str(folder), **settings)
    config = read_config(model)
    config.num_labels = 1
    return load_model(AutoRewardModel(), model, config, seed)


def same(one: Any, other: Any) -> bool:
    first, second = get_state_tensors(one), get_state_tensors(other)
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def batch(name: str) -> dict[str, torch.Tensor]:
    """Two texts with an image each; the first is shorter."""
    tokens = {"llava": 4, "gemma3": 16, "idefics3": 4}[name]
    side = MODELS[name]["vision_config"]["image_size"]
    images = torch.rand((2, 1, 3, side, side) if name == "idefics3" else (2, 3, side, side))
    rows = [[5, *[9] * tokens, 6, 0, 0], [7, *[9] * tokens, 8, 4, 3]]
    mask = [[1] * (tokens + 2) + [0, 0], [1] * (tokens + 4)]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask), "pixel_values": images}


def asked(model: Any, values: dict[str, torch.Tensor]) -> torch.Tensor:
    model.config.image_token_id = 9
    return model(**values).logits


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_of_a_model_that_writes_are_all_there(name: str, tmp_path: Path) -> None:
    writer = written(name, tmp_path)
    made = loaded(tmp_path, seed=1)
    assert same(made.model, writer.model)
    assert {key for key in get_state_tensors(made) if not key.startswith("model.")} == {"score.weight"}
    assert made.score.weight.shape == (1, 32)
    assert made.score.weight.any()
    assert type(made).__name__ == type(writer.model).__name__.removesuffix("Model") + "ForSequenceClassification"
    again, other = loaded(tmp_path, seed=1), loaded(tmp_path, seed=2)
    assert same(made, again)
    assert not torch.equal(made.score.weight, other.score.weight)


@pytest.mark.slow
@pytest.mark.parametrize("name", MADE)
def test_what_is_saved_is_a_base_model_and_a_head(name: str, tmp_path: Path) -> None:
    made = load_model(AutoRewardModel(), ModelConfig(config={}), config_of(name), 3)
    made.save_pretrained(str(tmp_path), max_shard_size="20KB")
    check_exported_files(tmp_path, get_export_tensors(made))
    assert load_file(tmp_path / SCORE_HEAD_FILE).keys() == {"score.weight"}
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert same(AutoModel.from_pretrained(str(tmp_path)), made.model)
    assert same(AutoModelForImageTextToText.from_pretrained(str(tmp_path)).model, made.model)
    whole = AutoRewardModel.from_pretrained(str(tmp_path))
    check_loaded_model(whole, compute_digests(get_state_tensors(made)))
    assert same(dstrain.load_reward_model(tmp_path), made)
    assert same(loaded(tmp_path, seed=9), made)


@pytest.mark.parametrize("name", ["llava", "idefics3", "gemma3"])
def test_scores_are_read_at_the_last_token_and_survive_an_export(name: str, tmp_path: Path) -> None:
    made = load_model(AutoRewardModel(), ModelConfig(config={}), config_of(name), 3).eval()
    if name == "gemma3":
        torch.nn.init.normal_(made.model.multi_modal_projector.mm_input_projection_weight)  # drawn as 0
    values = batch(name)
    said = asked(made, values)
    assert said.shape == (2, 1)
    states = made.model(**values).last_hidden_state
    ends = values["attention_mask"].sum(1) - 1
    wanted = made.score(states[torch.arange(2), ends])
    assert torch.allclose(said, wanted, atol=1e-6)
    assert not torch.equal(said, asked(made, values | {"pixel_values": -values["pixel_values"]}))
    made.save_pretrained(str(tmp_path))
    again = dstrain.load_reward_model(tmp_path)
    assert not again.training
    assert torch.equal(asked(again, values), said)
    assert asked(dstrain.load_reward_model(str(tmp_path), torch.bfloat16), values).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["llava", "idefics3"])
def test_checkpointing_changes_no_gradient(name: str) -> None:
    gradients = []
    for switch in (False, True):
        made = load_model(AutoRewardModel(), ModelConfig(config={}), config_of(name), 3).train()
        if switch:
            enable_gradient_checkpointing(made)
        assert made.is_gradient_checkpointing == switch
        torch.manual_seed(0)
        asked(made, batch(name)).sum().backward()
        gradients.append({key: p.grad for key, p in made.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert "model.vision_model.encoder.layers.0.mlp.fc1.weight" in gradients[0] or name == "llava"
    assert all(torch.equal(value, gradients[1][key]) for key, value in gradients[0].items())


def test_nothing_is_kept_for_tokens_to_come() -> None:
    made = load_model(AutoRewardModel(), ModelConfig(config={}), config_of("llava"), 3)
    made.config.image_token_id = 9
    told: list[Any] = []
    made.model.register_forward_hook(lambda *args: told.append(args[-1].past_key_values))
    made(**batch("llava"), **_no_cache_kwargs(made))
    assert told == [None]
    assert made.config.text_config.use_cache, "as the family has it"


def test_a_folder_that_lacks_weights_beside_the_head_is_refused(tmp_path: Path) -> None:
    load_model(AutoRewardModel(), ModelConfig(config={}), config_of("llava"), 3).save_pretrained(str(tmp_path))
    file = tmp_path / "model.safetensors"
    kept = {name: value for name, value in load_file(file).items() if "linear_1" not in name}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(
        RecipeError,
        match=r"missing keys: model\.multi_modal_projector\.linear_1\.bias, model\.multi_modal_projector\.linear_1\.weight;",
    ):
        dstrain.load_reward_model(tmp_path)


def test_a_skeleton_has_the_names_and_the_parts() -> None:
    model = ModelConfig(config={"model_type": "llava", **MODELS["llava"]})
    bones = build_meta_model(AutoRewardModel(), model, config_of("llava"))
    made = load_model(AutoRewardModel(), model, config_of("llava"), 0)
    assert {key: p.shape for key, p in bones.named_parameters()} == {key: p.shape for key, p in made.named_parameters()}
    known = components_by_id(bones)
    assert [key for key, p in bones.named_parameters() if id(p) not in known] == ["score.weight"]
    freeze(bones, ["vision", "language", "projector"])
    assert [key for key, p in bones.named_parameters() if p.requires_grad] == ["score.weight"]


def test_weights_from_a_config_depend_on_the_seed_alone() -> None:
    first, second = (load_model(AutoRewardModel(), ModelConfig(config={}), config_of("llava"), 3) for _ in range(2))
    assert same(first, second)
    half = load_model(AutoRewardModel(), ModelConfig(config={}, dtype="bfloat16"), config_of("llava"), 3)
    assert torch.equal(half.score.weight, first.score.weight.bfloat16())


def test_merged_adapters_are_saved_as_a_base_model_and_a_head(tmp_path: Path) -> None:
    made = load_model(AutoRewardModel(), ModelConfig(config={}), config_of("llava"), 3)
    adapted = add_adapters(made, LoraConfig(rank=2, targets=["q_proj", "linear_1"]), ("score",), 0)
    for key, parameter in adapted.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter)
    values = batch("llava")
    said = asked(adapted.eval(), values)
    adapted.save_pretrained(str(tmp_path / "adapters"))
    with pytest.raises(UsageError, match="holds only adapters; export the run with --merge-lora"):
        dstrain.load_reward_model(tmp_path / "adapters")
    merged = merge_adapters(adapted)
    merged.save_pretrained(str(tmp_path / "merged"))
    check_exported_files(tmp_path / "merged", get_export_tensors(merged))
    again = dstrain.load_reward_model(tmp_path / "merged")
    assert same(again, merged)
    assert torch.allclose(asked(again, values), said, atol=1e-5)


def test_a_reward_model_of_texts_is_loaded_by_the_same_word(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **TEXT, num_labels=1, pad_token_id=0)
    assert get_reward_model_class(config).__name__ == "LlamaForSequenceClassification"
    made = AutoModelForSequenceClassification.from_config(config)
    made.save_pretrained(str(tmp_path))
    again = dstrain.load_reward_model(tmp_path)
    assert same(again, made)
    assert type(again) is type(made)


WRITERS: dict[str, dict[str, Any]] = {
    "cohere2": {},
    "granite": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
}
"""Families of texts without a class of transformers' own."""


@pytest.mark.parametrize("family", WRITERS)
def test_a_reward_model_is_made_of_a_family_that_writes_texts(family: str, tmp_path: Path) -> None:
    recipe = tiny_recipe("rm", tmp_path)
    known = AutoConfig.for_model(family)
    small = {name: value for name, value in TEXT.items() if name in {*known.to_dict(), *known.attribute_map}}
    settings = {"model_type": family, **small, **WRITERS[family]}
    source = ModelConfig(config=settings)
    writer = load_model(AutoModelForCausalLM, source, read_config(source), 3)
    writer.save_pretrained(str(tmp_path / "base"))
    make_task(RunConfig.model_validate(recipe)).export.save_extras(tmp_path / "base")
    recipe["model"] = {"path": str(tmp_path / "base")}
    recipe["batch"] = {**recipe["batch"], "packing": False}  # padding is what this is about
    task: Any = make_task(RunConfig.model_validate(recipe))
    task.checks.run()
    made = task.build_model()
    assert same(made.base_model, writer.base_model)
    examples = task.examples("train")
    batch = task.collate([examples[index] for index in range(4)])
    task.loss(made, batch).total.backward()
    assert all(p.grad is not None for p in made.parameters())
    assert (batch.tensors["attention_mask"] == 0).any()
    with torch.no_grad():
        together = task.scores(made.eval(), batch)
        alone = [task.scores(made, task.collate([examples[index]])) for index in range(4)]
        made.save_pretrained(str(tmp_path / "out"))
        again = dstrain.load_reward_model(tmp_path / "out")
        assert torch.equal(task.scores(again, batch), together)
    assert torch.allclose(together, torch.stack(alone, 1).flatten(), atol=1e-5), "padding changes no score"
    assert same(task.export.reload(tmp_path / "out"), made)
    assert same(AutoModelForCausalLM.from_pretrained(str(tmp_path / "out")).base_model, made.base_model)


def test_a_family_that_no_reward_model_can_be_made_of_is_refused_in_a_sentence(tmp_path: Path) -> None:
    recipe = tiny_recipe("rm", tmp_path)
    recipe["model"]["config"] = {"model_type": "pegasus", "vocab_size": 320, "d_model": 32}
    with pytest.raises(
        RecipeError, match=r"^model: transformers has no reward model of the pegasus family, and no causal base model"
    ):
        make_task(RunConfig.model_validate(recipe)).checks.run()


def test_folders_without_a_reward_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no model \(config\.json\); give a folder that `dstrain export` wrote"):
        dstrain.load_reward_model(tmp_path / "nothing")
    AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TEXT)).save_pretrained(str(tmp_path / "text"))
    with pytest.raises(TaskError, match="holds a LlamaForCausalLM, which gives no score"):
        dstrain.load_reward_model(tmp_path / "text")
    (tmp_path / "text" / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}'
    )
    (tmp_path / "text" / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=r"text: cannot be loaded \(.*no file named.*\); export it again"):
        dstrain.load_reward_model(tmp_path / "text")
    written("llava", tmp_path / "sees")
    with pytest.raises(TaskError, match="holds a LlavaForConditionalGeneration, which gives no score"):
        dstrain.load_reward_model(tmp_path / "sees")


def test_a_head_of_another_size_is_refused(tmp_path: Path) -> None:
    load_model(AutoRewardModel(), ModelConfig(config={}), config_of("llava"), 3).save_pretrained(str(tmp_path))
    config = AutoConfig.from_pretrained(str(tmp_path))
    config.num_labels = 3
    with pytest.raises(RecipeError, match=r"score\.weight': \(1, 32\)\}, and the model's head is \(3, 32\)"):
        AutoRewardModel.from_pretrained(str(tmp_path), config=config)


@pytest.mark.parametrize("kind", ["llama4", "florence2", "blip-2", "kosmos-2", "clip"])
def test_families_whose_base_model_gives_no_states_are_refused(kind: str) -> None:
    with pytest.raises(RecipeError, match=f"no reward model of the {kind} family, and no causal base model"):
        get_reward_model_class(AutoConfig.for_model(kind))

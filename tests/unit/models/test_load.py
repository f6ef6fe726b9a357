"""Models: the same weights from the same seed, and nothing else that decides them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

import dstrain
from dstrain.config.schema import ModelConfig
from dstrain.errors import RecipeError, UsageError
from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing
from dstrain.models.load import build_meta_model, load_model, read_config
from dstrain.models.weights import check_weight_files

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def build(seed: int = 0, **settings: Any) -> PreTrainedModel:
    model = ModelConfig(**({"config": LLAMA} | settings))
    config = read_config(model)
    config.num_labels = 1
    return load_model(AutoModelForSequenceClassification, model, config, seed)


def same(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    one, two = first.state_dict(), second.state_dict()
    return one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


def test_weights_from_a_config_depend_on_the_seed_alone() -> None:
    first = build(3)
    torch.rand(17)
    assert same(first, build(3, attn_implementation="eager"))
    assert not same(first, build(4))
    assert first.config.use_cache, "as transformers has it: an export that says no would be slow"
    drawn = first.state_dict()
    assert float(drawn["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.2)
    assert drawn["score.weight"].any()
    assert torch.equal(drawn["model.norm.weight"], torch.ones(16))


@pytest.mark.parametrize("start", ["config", "path"])
def test_what_is_saved_generates_with_one_token_a_pass(start: str, tmp_path: Path) -> None:
    values = {name: value for name, value in LLAMA.items() if name != "model_type"}
    config = AutoConfig.for_model("llama", **values)
    AutoModelForCausalLM.from_config(config).save_pretrained(str(tmp_path / "base"))
    (tmp_path / "base" / "generation_config.json").unlink()
    model = ModelConfig(config=LLAMA) if start == "config" else ModelConfig(path=str(tmp_path / "base"))
    made = load_model(AutoModelForCausalLM, model, read_config(model), 0)
    made.save_pretrained(str(tmp_path / "out"))
    again: Any = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out"))
    read: list[int] = []
    again.model.register_forward_pre_hook(
        lambda module, _, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    again.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert read == [3, 1, 1, 1]


def test_a_head_the_files_lack_is_drawn_from_the_seed(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_config(read_config(ModelConfig(config=LLAMA)))
    base.save_pretrained(str(tmp_path))
    made = [build(seed, config=None, path=str(tmp_path)) for seed in (1, 1, 2)]
    torch.rand(5)
    assert same(made[0], made[1])
    heads = [model.score.weight for model in made]
    assert heads[0].any()
    assert not torch.equal(heads[0], heads[2])
    bodies = [model.model.state_dict() for model in made]
    for name, value in base.model.state_dict().items():
        assert torch.equal(value, bodies[0][name])
        assert torch.equal(value, bodies[2][name])


def test_loaded_weights_are_float32_unless_asked_otherwise(tmp_path: Path) -> None:
    build(dtype="bfloat16").save_pretrained(str(tmp_path))
    assert build(config=None, path=str(tmp_path)).dtype == torch.float32
    assert build(config=None, path=str(tmp_path), dtype="bfloat16").dtype == torch.bfloat16


def test_a_skeleton_has_every_name_and_no_memory() -> None:
    model = ModelConfig(config=LLAMA)
    config = read_config(model)
    config.num_labels = 1
    bones = build_meta_model(AutoModelForSequenceClassification, model, config)
    assert {name: p.shape for name, p in bones.named_parameters()} == {
        name: p.shape for name, p in build().named_parameters()
    }
    assert all(p.is_meta for p in bones.parameters())


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"model_type": "lama"}, r"transformers has no model type 'lama'.*'llama'"),
        ({"hiden_size": 8, "vocabsize": 9}, r"hiden_size.*'hidden_size'(?s:.)*vocabsize.*'vocab_size'"),
        ({"num_attention_heads": 3}, r"model\.config: .*not a multiple of the number of attention heads"),
        ({"hidden_size": [1]}, r"model\.config: .*'hidden_size' expected int"),
    ],
)
def test_a_config_that_cannot_be_is_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(RecipeError, match=wanted):
        read_config(ModelConfig(config=LLAMA | changes))


def test_names_of_a_family_that_mean_the_same_are_known() -> None:
    assert read_config(ModelConfig(config={"model_type": "gpt2", "hidden_size": 8, "n_head": 2})).n_embd == 8


def test_whole_weights_pass_and_cut_ones_do_not(tmp_path: Path) -> None:
    build().save_pretrained(str(tmp_path), max_shard_size="4KB")
    model = ModelConfig(path=str(tmp_path))
    check_weight_files(model)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].write_bytes(shards[0].read_bytes()[:-1])
    with pytest.raises(RecipeError, match=rf"{shards[0].name} is damaged"):
        check_weight_files(model)


def test_a_pickle_with_code_as_weights_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "PWNED",)

    build().config.save_pretrained(str(tmp_path))
    torch.save({"weight": torch.ones(1), "evil": Evil()}, tmp_path / "pytorch_model.bin")
    wanted = r"model\.path: .*pytorch_model.bin holds more than tensors: .*so it was not read; if you trust the file"
    with pytest.raises(RecipeError, match=wanted):
        check_weight_files(ModelConfig(path=str(tmp_path)))
    assert not (tmp_path / "PWNED").exists()
    torch.save(build().state_dict(), tmp_path / "pytorch_model.bin")
    check_weight_files(ModelConfig(path=str(tmp_path)))


def test_what_may_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Permissions do not stop root, who may run the tests."""
    build().save_pretrained(str(tmp_path))
    model, refused, closed = ModelConfig(path=str(tmp_path)), PermissionError(13, "Permission denied"), Path.open

    def no_weights(path: Path, *rest: Any) -> Any:
        if path.suffix == ".safetensors":
            raise refused
        return closed(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", no_weights)
        wanted = r"model.safetensors cannot be read \(Permission denied\); check the permissions of the file"
        with pytest.raises(RecipeError, match=wanted):
            check_weight_files(model)

    def no_folder(path: Any) -> Any:
        raise refused

    with monkeypatch.context() as patch:
        patch.setattr("dstrain.models.weights.os.listdir", no_folder)
        with pytest.raises(
            RecipeError, match=r"cannot be read \(Permission denied\); check the permissions of the fol"
        ):
            check_weight_files(model)


def test_checkpointing_changes_no_gradient() -> None:
    gradients = []
    for switch in (False, True):
        model = build().train()
        if switch:
            enable_gradient_checkpointing(model)
        assert model.is_gradient_checkpointing == switch
        model.config.pad_token_id = 0
        model(input_ids=torch.tensor([[5, 6, 7], [8, 9, 0]])).logits.sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_weights_drawn_for_16_bits_are_the_cast_ones() -> None:
    exact, halved = build(3), build(3, dtype="bfloat16")
    assert {parameter.dtype for parameter in halved.parameters()} == {torch.bfloat16}
    assert halved.config.dtype == torch.bfloat16
    pairs = zip(exact.parameters(), halved.parameters(), strict=True)
    assert all(torch.equal(whole.bfloat16(), half) for whole, half in pairs)
    frequencies = {name: value for name, value in halved.named_buffers() if "inv_freq" in name}
    assert frequencies
    assert all(torch.equal(value, dict(exact.named_buffers())[name]) for name, value in frequencies.items())


@pytest.mark.parametrize(
    "values",
    [
        {"_attn_implementation": "evil/kernel"},
        {"attn_implementation": {"": "paged|evil/kernel@main:attention"}},
        {"experts_implementation": "evil/kernel"},
        {"attribute_map": {"mine": "_attn_implementation"}, "mine": "evil/kernel"},
        {"attribute_map": {"_attn_implementation_internal": "mine"}, "mine": "evil/kernel"},
    ],
)
def test_a_folders_config_fetches_no_code_from_the_hub(values: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | values))
    with pytest.raises(RecipeError, match=r"model.path: in the config of '.*' .*; remove the key from config.json, or"):
        read_config(ModelConfig(path=str(tmp_path)))
    with pytest.raises(UsageError, match=r"remove the key from config\.json"):
        dstrain.load_reward_model(tmp_path)


def test_kernels_of_a_part_of_the_model_are_found(tmp_path: Path) -> None:
    kernels = {"": "sdpa", "text_config": "evil/kernel"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "_attn_implementation": kernels}))
    with pytest.raises(RecipeError, match=r"_attn_implementation.* names code on the Hub \('evil/kernel'\)"):
        read_config(ModelConfig(path=str(tmp_path)))


def test_code_from_the_hub_takes_the_users_word(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"_attn_implementation": "mine/kernel"}))
    read = read_config(ModelConfig(path=str(tmp_path), trust_remote_code=True))
    assert read._attn_implementation == "mine/kernel"


def test_weights_that_an_initialization_leaves_unset_are_refused() -> None:
    """formats.md B2: openai-gpt trained on uninitialized memory, with values up to 1e16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from dstrain.models.load import _init_from_scratch

    def build(model_type: str, **sizes: int) -> Any:
        return _init_from_scratch(AutoModelForCausalLM, AutoConfig.for_model(model_type, **sizes), torch.float32, {})

    before = torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RecipeError, match=r"gives no first values to .* of a openai-gpt model"):
        build("openai-gpt", vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    build("gpt2", vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    assert torch.are_deterministic_algorithms_enabled() == before

"""The shape of a recipe's model, from each place where it is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import RecipeError, UsageError
from dstrain.planner.shapes import (
    FAMILIES,
    ModelShape,
    named_config,
    read_base_shape,
    read_shape,
    shape_from_config,
    shape_names,
)
from tests.unit.planner.recipes import made_config

KNOWN = {
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "llava-1.5-7b": 7_063_427_072, "llava-1.5-13b": 13_351_494_656, "qwen2.5-vl-3b": 3_754_622_976, "qwen2.5-vl-7b": 8_292_166_656,
}  # fmt: skip
"""Published numbers of parameters; that of LLaVA 1.5 13B is computed with the vocabulary of 32,064 of the 7B model."""
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 320}  # fmt: skip


def test_every_shipped_shape_has_the_parameters_of_its_model() -> None:
    counted = {name: shape_from_config(named_config(name)).count() for name in shape_names()}  # type: ignore[union-attr]
    assert counted == KNOWN


def test_a_hub_id_has_the_shape_of_its_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    shape = read_base_shape(ModelConfig(path="meta-llama/Llama-3.1-8B-Instruct"))
    assert shape is not None
    assert shape.count() == KNOWN["llama-3.1-8b"]


def test_a_hub_id_is_read_from_the_hub_cache_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder = tmp_path / "hub" / "models--org--model" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SMALL}))
    shape = read_base_shape(ModelConfig(path="org/model"))
    assert shape is not None
    assert shape.hidden == 32


def test_parameters_of_another_family_are_param_source_headers(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}))
    save_file(
        {"wte.weight": np.zeros((10, 16), np.float32), "h.0.mlp.c_fc.weight": np.zeros((16, 64), np.float32)},
        tmp_path / "model.safetensors",
    )
    shape = read_base_shape(ModelConfig(path=str(tmp_path)))
    assert shape is not None
    assert (shape.count(), shape.count("embedding"), shape.param_source) == (1184, 160, "safetensors headers")


def test_a_damaged_header_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "model.safetensors").write_bytes(b"nonsense of eight bytes and more")
    with pytest.raises(RecipeError, match=r"model.safetensors cannot be read .*; download it again"):
        read_base_shape(ModelConfig(path=str(tmp_path)))


@pytest.mark.slow  # imports the family and counts: ten seconds
def test_a_model_without_config_or_headers_is_counted_on_the_meta_device(tmp_path: Path) -> None:
    config = made_config(model={"config": {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 64},
                                "tokenizer": None}, data={"train": str(_records(tmp_path)), "max_length": 32})  # fmt: skip
    shape = read_shape(config)
    assert shape.param_source == "meta device"
    assert shape.count("embedding") == 300 * 32 + 64 * 32
    assert shape.layers == 2


def _records(folder: Path) -> Path:
    file = folder / "train.jsonl"
    turn = [{"role": "user", "content": "Hello there"}, {"role": "assistant", "content": "How are you?"}]
    file.write_text("".join(json.dumps({"messages": turn}) + "\n" for _ in range(20)))
    return file


def test_a_shape_without_that_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UsageError, match=r"--model-shape llama-3.1-8: there is no such shape; did you mean 'llama-3.1-8b'"
    ):
        named_config("llama-3.1-8")


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 4}}, {"lora": {"rank": 4, "dora": True}}, {"freeze": ["embed_tokens", "*.mlp.*"]},
                                     {"lora": {"rank": 2, "targets": ["q_proj", "v_proj"]}}, {"freeze": ["mlp", "model.layers.*.self_attn"]},
                                     {"lora": {"rank": 2}, "freeze": ["lora_A", "model.layers.0"]},
                                     {"lora": {"rank": 2, "dora": True, "targets": ["q_proj", "embed_tokens"]}}], ids=str)  # fmt: skip
@pytest.mark.parametrize("task", ["sft", "rm"])
def test_the_parameters_of_a_task_are_those_that_it_builds(task: str, changes: dict[str, Any], tmp_path: Path) -> None:
    from dstrain.training.list_parameters import list_parameters

    values = {
        "task": task,
        "model": {"config": {"model_type": "qwen3", **SMALL, "head_dim": 8}, **changes},
        "data": {"train": str(_pairs(tmp_path, task))},
    }
    config = RunConfig.model_validate(values)
    shape = read_shape(config)
    built = list_parameters(config)
    trained = sum(_numel(size) for _, size, is_trained in built if is_trained)
    # peft keeps the head that it replaces, which is not trained.
    replaced = sum(_numel(size) for name, size, _ in built if "original_module" in name)
    assert (shape.count(), shape.count(trainable=True)) == (
        sum(_numel(size) for _, size, _ in built) - replaced,
        trained,
    )


def _pairs(folder: Path, task: str) -> Path:
    if task == "sft":
        return _records(folder)
    file = folder / "pairs.jsonl"
    file.write_text(
        "".join(
            json.dumps({"prompt": "Hello", "chosen": f"Good day {i}", "rejected": "Go away"}) + "\n" for i in range(20)
        )
    )
    return file


def _numel(size: list[int]) -> int:
    found = 1
    for one in size:
        found *= one
    return found


def test_adapters_leave_the_head_and_embeddings_alone() -> None:
    config = made_config(model={"lora": {"rank": 8}})
    shape: ModelShape = read_shape(config)
    adapted = {
        tensor.name.partition(".lora")[0].rpartition(".")[2] for tensor in shape.tensors if tensor.part == "lora"
    }
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("wrong", [{"hidden_size": "abc"}, {"num_attention_heads": 0}])
def test_sizes_that_make_no_model_are_named(wrong: dict[str, Any]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(RecipeError, match=rf"^model\.config\.{name}: is {value!r}; correct it: a whole number from 1"):
        read_base_shape(ModelConfig(config={"model_type": "llama", **SMALL, **wrong}))


@pytest.mark.parametrize("header", [[1], {"wte.weight": {"dtype": "F32"}}])
def test_a_header_without_sizes_is_refused(tmp_path: Path, header: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(RecipeError, match=r"model\.safetensors cannot be read"):
        read_base_shape(ModelConfig(path=str(tmp_path)))


def test_targets_that_are_no_expression_are_refused() -> None:
    config = made_config(model={"lora": {"targets": "("}})
    with pytest.raises(RecipeError, match=r"model\.lora\.targets: .* is not a regular expression"):
        read_shape(config)


def test_a_preset_that_does_not_exist_is_an_error_of_plan() -> None:
    from dstrain.commands.plan import PlanRequest, make_report

    request = PlanRequest(recipe="demo-sft", ds_config="zero9", gpu_memory="24GiB")
    with pytest.raises(UsageError, match="ds_config zero9: there is no such preset"):
        make_report(request)


# Parameters counted from config.json are those of transformers' models.


_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 160}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, **_TEXT} for name in FAMILIES if not name.endswith("vl_text")},
    **{f"{name} by default": {"model_type": name} for name in FAMILIES if not name.endswith("vl_text")},
    "tied llama with biases": {"model_type": "llama", **_TEXT, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3 with wide heads": {"model_type": "qwen3", **_TEXT, "head_dim": 32},
    "llava": {"model_type": "llava", "text_config": {"model_type": "llama", **_TEXT},
              "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                "num_attention_heads": 2, "image_size": 28, "patch_size": 14}},
    "llava by default": {"model_type": "llava"},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "text_config": _TEXT, "vision_config": {"depth": 2, "hidden_size": 32,
                   "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}},
}  # fmt: skip


@pytest.mark.parametrize("name", _CONFIGS)
def test_the_tensors_of_a_config_are_those_of_the_model(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    values = dict(_CONFIGS[name])
    shape = shape_from_config(values)
    assert shape is not None
    model_type = values.pop("model_type")
    kind = AutoModelForImageTextToText if model_type in ("llava", "qwen2_5_vl") else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.for_model(model_type, **values))
    assert {tensor.name: tensor.shape for tensor in shape.tensors} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }


@pytest.mark.slow  # imports the family and counts: ten seconds
def test_another_family_is_counted_without_data_and_keeps_undeclared_settings() -> None:
    """head_dim of qwen3_moe is read by its modelling file only; without it heads would have 16 values."""
    values = {"model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 48, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 320, "num_experts": 4,
              "num_experts_per_tok": 2, "tie_word_embeddings": False}  # fmt: skip
    config = made_config(model={"config": values, "lora": {"rank": 4}}, data={"train": "nowhere.jsonl"})
    shape = read_shape(config)
    sizes = {tensor.name: tensor.shape for tensor in shape.tensors}
    assert sizes["model.layers.0.self_attn.q_proj.base_layer.weight"] == (4 * 32, 64)
    assert sizes["model.layers.0.self_attn.q_proj.lora_A.default.weight"] == (4, 64)
    assert (shape.intermediate, shape.experts_per_token, shape.tied) == (2 * 48, 2, False)
    assert shape.largest_module == max(320 * 64, 3 * 4 * 48 * 64)


def test_experts_in_files_of_their_own_are_one_module(tmp_path: Path) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **SMALL}))
    names = [
        f"model.layers.0.block_sparse_moe.experts.{index}.w{part}.weight" for index in range(4) for part in (1, 2, 3)
    ]
    save_file({name: np.zeros((32, 48), np.float32) for name in names}, tmp_path / "model.safetensors")
    shape = read_base_shape(ModelConfig(path=str(tmp_path)))
    assert shape is not None
    assert shape.largest_module == 12 * 32 * 48


def test_a_pattern_that_freezes_nothing_is_refused_as_in_a_run() -> None:
    with pytest.raises(RecipeError, match=r"^model\.freeze 'layers\.0': matches no parameter; names here begin with "):
        read_shape(made_config(model={"freeze": ["layers.0"]}))


def test_one_target_that_matches_nothing_is_refused_as_in_a_run() -> None:
    with pytest.raises(RecipeError, match=r"^model\.lora\.targets: \['query'\] match no linear layer"):
        read_shape(made_config(model={"lora": {"targets": ["q_proj", "query"]}}))


def test_targets_that_match_nothing_are_refused_with_the_names() -> None:
    config = made_config(model={"lora": {"targets": ["query"]}})
    with pytest.raises(
        RecipeError, match=r"model\.lora\.targets: \['query'\] match no linear layer .*; known here: down_proj, "
    ):
        read_shape(config)

"""A model that is built without values is the same model once it is filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.models.load import load_model, read_config
from dstrain.models.meta_init import materialize, meta_parameters
from dstrain.models.reward_model import AutoRewardModel
from dstrain.tasks import make_task
from tests.cells import SLOW
from tests.tiny import tiny_recipe
from tests.vision_recipes import GEMMA3, IDEFICS3, TEXT, llava

SMALL = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"intermediate_size": 48},
    "llama, tied": SMALL | {"intermediate_size": 48, "tie_word_embeddings": True},
    "qwen3": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "mixtral": SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "num_local_experts": 4},
    "gpt2": {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": SMALL | {"intermediate_size": 48},
    "opt": SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "bloom": {"vocab_size": 320, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_built_without_values_is_the_same_once_filled(family: str, dtype: str, tmp_path: Path) -> None:
    values = tiny_recipe("sft", tmp_path)
    values["model"] = {"config": {"model_type": family.split(",")[0], **FAMILIES[family]}, "dtype": dtype}
    task: Any = make_task(RunConfig.model_validate(values))
    whole = task.build_model().eval()
    with meta_parameters():
        empty = task.build_model()
    assert all(parameter.device.type == "meta" for parameter in empty.parameters())
    materialize(empty)
    there, wanted = empty.state_dict(), whole.state_dict()
    assert {name: (value.shape, value.dtype) for name, value in there.items()} == {
        name: (value.shape, value.dtype) for name, value in wanted.items()
    }
    assert len(list(empty.parameters())) == len(list(whole.parameters())), "what is tied is tied"
    empty.load_state_dict(wanted)
    for (name, ours), (_, theirs) in zip(whole.named_buffers(), empty.named_buffers(), strict=True):
        assert ours.dtype == theirs.dtype, name
        assert torch.equal(ours, theirs), name
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits, empty.eval()(input_ids=ids).logits)


SEEING: dict[str, dict[str, Any]] = {
    "llava": llava(),
    "gemma3": GEMMA3 | {"mm_tokens_per_image": 16},
    "idefics3": IDEFICS3,
    "qwen2_vl": {
        "text_config": {
            **TEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        },
        "vision_config": {"depth": 2, "embed_dim": 24, "num_heads": 4, "hidden_size": 32},
    },
}
SCORED = ("llama", "gemma3_text", "gpt2", "llava")


@pytest.mark.parametrize("dtype", [SLOW("float32"), "bfloat16"])  # files in fp32 are cast
@pytest.mark.parametrize(
    ("family", "kind"),
    [(family, "text") for family in FAMILIES]
    + [(family, "images") for family in SEEING]
    + [(family, "score") for family in SCORED],
)
def test_a_folders_model_built_without_its_weights_is_the_same_once_filled(
    family: str, kind: str, dtype: str, tmp_path: Path
) -> None:
    autos = {"text": AutoModelForCausalLM, "images": AutoModelForImageTextToText, "score": AutoRewardModel()}
    values = (FAMILIES | SEEING)[family]
    settings = {"model_type": family.split(",")[0], **values}
    source = ModelConfig(config=settings)
    written = load_model(AutoModelForImageTextToText if "text_config" in values else AutoModelForCausalLM, source,
                         read_config(source), 3)  # fmt: skip
    written.generation_config.temperature, written.generation_config.do_sample = 0.6, True
    written.save_pretrained(str(tmp_path / "base"))
    model = ModelConfig(path=str(tmp_path / "base"), dtype=dtype)

    def built() -> Any:
        config = read_config(model)
        config.num_labels = 1
        return load_model(autos[kind], model, config, 0).eval()

    whole = built()
    for file in (tmp_path / "base").glob("*.safetensors"):
        file.unlink()  # which is never opened again
    with meta_parameters():
        empty = built()
    materialize(empty)
    ours, theirs = empty.state_dict(), whole.state_dict()
    assert {name: (value.shape, value.dtype) for name, value in ours.items()} == {
        name: (value.shape, value.dtype) for name, value in theirs.items()
    }
    assert len(list(empty.parameters())) == len(list(whole.parameters())), "what is tied is tied"
    for (name, mine), (other, buffer) in zip(empty.named_buffers(), whole.named_buffers(), strict=True):
        assert (name, mine.dtype) == (other, buffer.dtype)
        assert torch.equal(mine, buffer), name
    assert empty.config.to_dict() == whole.config.to_dict()
    if whole.can_generate():
        assert empty.generation_config.to_dict() == whole.generation_config.to_dict()
        assert empty.generation_config.temperature == 0.6
    empty.load_state_dict(theirs)
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids).logits, empty(input_ids=ids).logits)


def test_afterwards_modules_have_values_again() -> None:
    with pytest.raises(KeyError), meta_parameters():
        raise KeyError
    assert torch.nn.Linear(2, 3).weight.device.type == "cpu"

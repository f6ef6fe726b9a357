"""The kinds of a model's layers are read from the source of its classes."""

from __future__ import annotations

import ast
import sys

import pytest

from dstrain.models.attention.layer_kinds import (
    LayerKinds,
    ModuleSource,
    find_wrapper_problem,
    read_classes,
    read_layer_kinds,
)

KINDS = {
    "llama": LayerKinds(attention=("LlamaAttention",)),
    "qwen3_5_text": LayerKinds(
        attention=("Qwen3_5Attention",), recurrent=("Qwen3_5GatedDeltaNet",), takes_lengths=("Qwen3_5GatedDeltaNet",)
    ),
    "jamba": LayerKinds(
        attention=("JambaAttention",), recurrent=("JambaMambaMixer",), without_arguments=("JambaMambaMixer",),
        restarts=("JambaMambaMixer",),
    ),
    "stablelm": LayerKinds(attention=("StableLmAttention",), without_arguments=("StableLmAttention",)),
    "lfm2": LayerKinds(attention=("Lfm2Attention",), recurrent=("Lfm2ShortConv",)),
    "deepseek_v3": LayerKinds(attention=("DeepseekV3Attention",)),
    "olmoe": LayerKinds(attention=("OlmoeAttention",), window_without_mask="OlmoeAttention"),
    "exaone": LayerKinds(attention=("LlamaAttention",)),  # another name of Llama's classes
    "unheard_of": LayerKinds(unknown="transformers has no text model of type unheard_of", may_read_padding=True),
}  # fmt: skip


@pytest.mark.parametrize("model_type", KINDS)
def test_kinds_are_those_of_the_classes(model_type: str) -> None:
    assert read_layer_kinds(model_type) == KINDS[model_type]


@pytest.mark.parametrize(
    "model_type", ["llava", "qwen3_vl", "qwen3_vl_moe", "glm4v", "internvl", "mistral3", "smolvlm"]
)
def test_wrappers_that_leave_everything_to_their_text_model_are_known(model_type: str) -> None:
    assert find_wrapper_problem(model_type) is None


ATTENTION = """
class Attention(nn.Module):
    def forward(self, hidden_states, attention_mask, cache=None, **kwargs):
        keys, values = cache.update(self.k(hidden_states), self.v(hidden_states), 0)
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        {before}
        return attention_interface(self, hidden_states, keys, values, attention_mask, scaling=1.0{more})
"""
MODULES = {
    "known": (ATTENTION.format(before="pass", more=", **kwargs"), None),
    "arguments are dropped": (ATTENTION.format(before="pass", more=""), "does not hand its arguments on"),
    "the function has another name": (
        ATTENTION.format(before="pass", more="").replace("attention_interface", "attend"),
        "does not call the attention function in the usual way",
    ),
    "a mask is changed": (
        ATTENTION.format(before="attention_mask = attention_mask + 1", more=", **kwargs"), "changes its mask",
    ),
    "an attention of its own": (
        "class Attention(nn.Module):\n    def forward(self, x, cache):\n        return cache.update(x, x, 0)",
        "does not call transformers' attention functions",
    ),
    "a state that no cache keeps": (
        "class Mixer(nn.Module):\n    def __init__(self):\n        self.conv = nn.Conv1d(1, 1, 4)\n"
        "    def forward(self, x):\n        return self.conv(x)",
        "has a convolution over tokens whose state no cache keeps",
    ),
    "an indexer": (
        "class Indexer(nn.Module):\n    def forward(self, x, cache):\n        return cache.update_indexer(x, 0)",
        "keeps more in its cache than keys, values and states (update_indexer)",
    ),
    "masks of chunks": (
        "class Model(nn.Module):\n    def forward(self, x):\n        return create_chunked_causal_mask(x)",
        "has masks of another kind (create_chunked_causal_mask)",
    ),
    "images in both directions": (
        "class Model(nn.Module):\n    def forward(self, x):\n        return create_causal_mask(x, or_mask_function=both)",
        "lets tokens attend to later ones (or_mask_function)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MODULES)
def test_what_mixes_tokens_in_another_way_is_told(case: str) -> None:
    source, problem = MODULES[case]
    (module,) = read_classes(ast.parse(source)).values()
    assert isinstance(module, ModuleSource)
    told = module.mixing_problem()
    assert (told or "").startswith(problem or "")
    assert (told is None) is (problem is None)


@pytest.mark.parametrize("model_type", ["rwkv", "xlstm", "minimax", "recurrent_gemma", "trocr", "deepseek_v4"])
def test_layers_that_may_read_padding_are_known(model_type: str) -> None:
    assert read_layer_kinds(model_type).may_read_padding


@pytest.mark.parametrize("model_type", ["llama", "mamba2", "qwen3_next", "gpt_oss"])
def test_layers_that_read_the_mask_are_known(model_type: str) -> None:
    assert not read_layer_kinds(model_type).may_read_padding


def test_a_layer_that_loses_the_groups_is_told() -> None:
    source = (
        ATTENTION.format(before="pass", more=", **kwargs")
        + """
class Layer(nn.Module):
    def __init__(self):
        self.attention = Attention()
    def forward(self, hidden_states, attention_mask):
        return self.attention(hidden_states, attention_mask)
"""
    )
    classes = read_classes(ast.parse(source))
    (call,) = classes["Layer"].incomplete_calls(classes, {"Attention"})
    assert ast.unparse(call.func) == "self.attention"


def test_the_source_is_read_without_torch() -> None:
    import subprocess

    code = "import sys; from dstrain.models.attention.layer_kinds import read_layer_kinds as read; read('llama'); "
    done = subprocess.run(
        [sys.executable, "-c", f"{code}print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"

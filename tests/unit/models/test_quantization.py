"""Quantization of a model's linear layers, by hand-made values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
)

from dstrain.errors import RecipeError
from dstrain.models.params import full_numel
from dstrain.models.quantization import dequantized_weights, import_bitsandbytes, quantize_model
from tests.vision_recipes import llava

bnb: Any = pytest.importorskip("bitsandbytes", reason="the extra [quantize] is not installed")

SHAPE = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip


def llama(auto: Any = AutoModelForCausalLM, **changes: Any) -> Any:
    torch.manual_seed(0)
    return auto.from_config(AutoConfig.for_model("llama", **SHAPE, **changes)).eval()


def kinds(model: torch.nn.Module) -> dict[str, str]:
    return {
        name: type(module).__name__ for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    }


@pytest.mark.parametrize(("kind", "name"), [("nf4", "Linear4bit"), ("int8", "Int8Linear")])
@pytest.mark.parametrize("auto", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_the_body_is_quantized_and_the_head_is_not(auto: Any, kind: Any, name: str) -> None:
    model = llama(auto)
    before = sum(parameter.numel() for parameter in model.parameters())
    summary = quantize_model(model, kind)
    found = kinds(model)
    assert {key for key, value in found.items() if value == "Linear"} <= {"lm_head", "score"}
    assert sum(value == name for value in found.values()) == summary.num_layers == 14
    assert sum(full_numel(parameter) for parameter in model.parameters()) == before, "two values in a byte are two"
    assert not any(p.requires_grad for p in model.model.layers.parameters() if not p.is_floating_point())


def test_layers_that_are_trained_in_full_are_not_quantized() -> None:
    model = llama()
    assert quantize_model(model, "nf4", ["k_proj", "mlp"]).num_layers == 6
    assert {name.rpartition(".")[2] for name, kind in kinds(model).items() if kind == "Linear4bit"} == {
        "q_proj", "v_proj", "o_proj"
    }  # fmt: skip


def test_a_quantized_layer_computes_with_the_nearest_values_of_its_blocks() -> None:
    """NF4 by hand: 16 levels (QLoRA, appendix E) times the largest magnitude of each 64 values, which itself is rounded."""
    levels = torch.tensor([
        -1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0,
        0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0,
    ])  # fmt: skip
    layer = torch.nn.Linear(64, 32, bias=False)
    model = torch.nn.Sequential(layer)
    blocks = layer.weight.detach().clone()  # (32, 64): a row is a block
    scales = blocks.abs().amax(1, keepdim=True)
    nearest = levels[(blocks[..., None] / scales[..., None] - levels).abs().argmin(-1)] * scales
    quantize_model(model, "nf4")
    found = model(torch.eye(64)).T
    # Double quantization rounds the scales to 8 bits: within 1 % of the largest.
    assert (found - nearest).abs().max() <= 0.01 * scales.max()


@pytest.mark.parametrize("shape", [(32, 32), (48, 40), (3, 64), (5, 7), (4, 96)])
def test_values_have_the_scales_of_their_blocks_on_a_cpu(shape: tuple[int, int]) -> None:
    bnb = import_bitsandbytes("model.quantize")
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    codes, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", blocksize=64)
    pairs = codes.flatten()
    values = state.code[torch.stack([pairs >> 4, pairs & 15], 1).flatten().long()][: weight.numel()]
    scales = state.absmax.repeat_interleave(64)[: weight.numel()]
    assert torch.equal(bnb.functional.dequantize_4bit(codes, state), (values * scales).view(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dequantized_weights_are_those_that_a_quantized_model_computes_with(dtype: torch.dtype) -> None:
    quantized, dequantized = llama().to(dtype), llama().to(dtype)
    quantize_model(quantized, "nf4")
    with dequantized_weights():
        quantize_model(dequantized, "nf4")
    assert set(kinds(dequantized).values()) == {"Linear"}
    ids = torch.arange(1, 33)[None]
    assert not torch.equal(dequantized.model.layers[0].mlp.up_proj.weight, llama().model.layers[0].mlp.up_proj.weight)
    with torch.no_grad():
        torch.testing.assert_close(quantized(ids).logits, dequantized(ids).logits)


def test_vision_tower_and_projector_keep_their_precision() -> None:
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**llava()))
    quantize_model(model, "nf4")
    quantized = [name for name, kind in kinds(model).items() if kind == "Linear4bit"]
    assert quantized
    assert all("language_model" in name for name in quantized)
    assert {"Linear"} == {kind for name, kind in kinds(model).items() if "vision" in name or "projector" in name}


def test_gradients_reach_the_input_and_not_the_weights() -> None:
    model = llama().train()
    quantize_model(model, "nf4")
    embedded = model.get_input_embeddings()(torch.arange(1, 9)[None]).detach().requires_grad_()
    model(inputs_embeds=embedded).logits.sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_product_keeps_no_input_and_has_the_gradient_of_its_values(kind: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
    quantize_model(model, kind)
    leaf = torch.randn(5, 64, dtype=torch.bfloat16, requires_grad=True)
    inputs = leaf * 2
    storage = StorageWeakRef(inputs.untyped_storage())
    product = model(inputs)
    del inputs
    assert storage.expired(), "gradient checkpointing recomputes what autograd saves, and nothing else"
    gradient = torch.randn_like(product)
    product.backward(gradient)
    weight = model(torch.eye(64, dtype=torch.bfloat16)) - model(torch.zeros(1, 64, dtype=torch.bfloat16))  # (64, 32)
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad.float(), 2 * gradient.float() @ weight.float().t(), rtol=0.05, atol=0.05)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model\.quantize: the model has no linear layer"):
        quantize_model(torch.nn.Embedding(4, 4), "nf4")


@pytest.mark.parametrize("num_passes", [0, 1])
def test_the_values_of_an_8_bit_layer_move_with_the_model(num_passes: int) -> None:
    """bitsandbytes' own layer computes with the old ones: a GPU would get a tensor of the CPU."""
    model = llama()
    quantize_model(model, "int8")
    layer = model.model.layers[0].mlp.up_proj
    for _ in range(num_passes):
        model(torch.arange(1, 9)[None])
    model._apply(torch.clone)
    holder = layer.state if num_passes else layer.weight
    assert holder.CB.data_ptr() == layer.weight.data_ptr()
    assert holder.SCB.shape == (96,)


def test_an_evaluation_leaves_the_training_as_it_was() -> None:
    """On a CPU with AVX512-BF16, bitsandbytes would repack the weights, and compute in bf16 from then on."""
    model, ids = llama().train(), torch.arange(1, 33)[None]
    quantize_model(model, "nf4")
    before = model(ids).logits
    with torch.no_grad():
        evaluated = model.eval()(ids).logits
    assert torch.equal(evaluated, before)
    assert torch.equal(model.train()(ids).logits, before)

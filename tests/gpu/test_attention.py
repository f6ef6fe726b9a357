"""On a GPU each kernel for packed batches computes what the reference path computes, and what padded rows give."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from dstrain.batch import PackedGroup
from dstrain.models.attention.by_group import attention_by_group
from dstrain.models.attention.layout import AttentionSettings, PackedLayout
from dstrain.models.attention.packed import (
    AttentionCall,
    accepts_varlen,
    choose_kernel,
    enable_packed_attention,
    packed_flex_attention,
    packed_varlen_attention,
)
from tests.unit.models.attention.packed_rows import gradient, made, packed, packed_logits, padded_logits

pytestmark = pytest.mark.usefixtures("only_gpu")
GROUPS = (
    PackedGroup(700, (300, 500)),
    PackedGroup(0, (260,)),
    PackedGroup(1, (40, 1)),
    PackedGroup(130, (64, 7, 200)),
    PackedGroup(0, (3,)),
)
WINDOWS = [None, 100]


def heads(dtype: torch.dtype, width: int = 64) -> list[torch.Tensor]:
    """Return query (1, 8, T, D), key and value (1, 2, T, D) on the GPU."""
    torch.manual_seed(0)
    tokens = sum(group.tokens for group in GROUPS)
    made = (torch.randn(1, tokens, count, width, device="cuda", dtype=dtype) for count in (8, 2, 2))
    return [one.transpose(1, 2).requires_grad_() for one in made]


def both(found: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output and the gradients of the inputs, in fp32."""
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(found)
    return [one.float() for one in (found.detach(), *torch.autograd.grad((found * weights).sum(), inputs))]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor], limit: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm() / other.norm()) <= limit


def reference(settings: AttentionSettings, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the reference path's output and gradients, in fp32."""
    wide = [one.detach().float().requires_grad_() for one in inputs]
    return both(attention_by_group(wide, settings, PackedLayout(GROUPS)), wide)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("width", [64, 128])
def test_varlen_attention_equals_the_reference(window: int | None, width: int) -> None:
    inputs, settings = heads(torch.bfloat16, width), AttentionSettings(scale=0.1, window=window)
    if not accepts_varlen(AttentionCall.of(inputs, settings)):
        pytest.skip("no varlen attention here")
    assert_close(
        both(packed_varlen_attention(inputs, settings, PackedLayout(GROUPS)), inputs), reference(settings, inputs), 1e-2
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-4), (torch.bfloat16, 1e-2)])
def test_flex_attention_equals_the_reference(
    window: int | None, softcap: float | None, dtype: torch.dtype, limit: float
) -> None:
    inputs, settings = heads(dtype), AttentionSettings(scale=0.1, window=window, softcap=softcap)
    assert_close(
        both(packed_flex_attention(inputs, settings, PackedLayout(GROUPS)), inputs), reference(settings, inputs), limit
    )


def test_flex_attention_with_sinks_equals_the_reference() -> None:
    inputs, sinks = heads(torch.float32), torch.randn(8, device="cuda", requires_grad=True)
    settings = AttentionSettings(scale=0.1, sinks=sinks)
    expected = both(attention_by_group(inputs, settings, PackedLayout(GROUPS)), [*inputs, sinks])
    assert_close(both(packed_flex_attention(inputs, settings, PackedLayout(GROUPS)), [*inputs, sinks]), expected, 1e-4)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_reference_in_16_bits_is_near_itself_in_32(window: int | None) -> None:
    inputs, settings = heads(torch.bfloat16), AttentionSettings(scale=0.1, window=window)
    assert_close(
        both(attention_by_group(inputs, settings, PackedLayout(GROUPS)), inputs), reference(settings, inputs), 1e-2
    )


def test_sixteen_bits_take_the_varlen_kernel_and_others_flex_attention() -> None:
    inputs = heads(torch.bfloat16)
    if not accepts_varlen(AttentionCall.of(inputs, AttentionSettings())):
        pytest.skip("no varlen attention here")
    full, dropout, softcap = AttentionSettings(), AttentionSettings(dropout=0.1), AttentionSettings(softcap=5.0)
    assert choose_kernel("sdpa", AttentionCall.of(inputs, full)) is packed_varlen_attention
    assert choose_kernel("sdpa", AttentionCall.of(heads(torch.float32), full)) is packed_flex_attention
    assert choose_kernel("sdpa", AttentionCall.of(inputs, dropout)) is attention_by_group
    assert choose_kernel("eager", AttentionCall.of(inputs, softcap)) is packed_flex_attention


@pytest.mark.parametrize("implementation", ["sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"])
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_packed_row_is_read_as_padded_rows(implementation: str, name: str) -> None:
    package = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}.get(implementation)
    if package and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    # Wide enough for flash kernels; flex attention needs heads of at least 16.
    model = made(name, torch.bfloat16, hidden_size=128, head_dim=32).cuda()
    batch = packed().to(torch.device("cuda"))
    expected = made(name, torch.float32, hidden_size=128, head_dim=32)
    expected.load_state_dict(model.state_dict())
    wanted = gradient(expected, padded_logits(expected, packed()))
    model.set_attn_implementation(implementation)
    enable_packed_attention(model)
    found = gradient(model, packed_logits(model, batch).float().cpu()).cpu()
    assert float((found - wanted).norm() / wanted.norm()) <= 5e-2


@pytest.mark.parametrize("groups", [GROUPS, tuple(PackedGroup(0, (length,)) for length in (300, 7, 64))])
@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "lfm2"])
def test_recurrent_layers_read_each_sequence_from_its_own_state(name: str, groups: tuple[PackedGroup, ...]) -> None:
    """With shared prompts, and without, where kernels of flash-linear-attention read the row at once if installed."""
    batch = packed(groups)
    model, expected = made(name).cuda(), made(name)
    expected.load_state_dict(model.state_dict())
    wanted = gradient(expected, padded_logits(expected, batch))
    enable_packed_attention(model)
    found = gradient(model, packed_logits(model, batch.to(torch.device("cuda"))).cpu()).cpu()
    assert float((found - wanted).norm() / wanted.norm()) <= 1e-3

"""FlexAttention and the varlen kernels' inputs give what the reference path gives; on a CPU, in small shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from dstrain.batch import PackedGroup
from dstrain.models.attention import by_group, packed
from dstrain.models.attention.by_group import attention_by_group
from dstrain.models.attention.layout import AttentionSettings, PackedLayout
from dstrain.models.attention.packed import (
    AttentionCall,
    PackedAttention,
    choose_kernel,
    compiles_attention,
    packed_flex_attention,
)
from tests.cells import SLOW
from tests.unit.models.attention.packed_rows import GROUPS

WINDOWS = [None, 16, 1]


def heads(kv_heads: int = 2, width: int = 16) -> list[torch.Tensor]:
    """Return query (1, 4, T, D), key and value (1, G, T, D) as layers give them, transposed."""
    tokens, draw = sum(group.tokens for group in GROUPS), torch.Generator().manual_seed(0)
    made = (torch.randn(1, tokens, count, width, generator=draw) for count in (4, kv_heads, kv_heads))
    return [one.transpose(1, 2).requires_grad_() for one in made]


def both(found: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the output and the gradients of the inputs."""
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    return [found.detach(), *torch.autograd.grad((found * weights).sum(), inputs)]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("window", "softcap", "with_sinks"),
    # Each value once; all pairs in `make test-all`.
    [
        (None, None, False),
        (16, 2.0, False),
        (1, None, True),
        SLOW(None, 2.0, True),
        SLOW(16, None, True),
        SLOW(1, 2.0, False),
    ],
)
def test_flex_attention_equals_the_reference(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    """Without gradients: torch has none for it on a CPU."""
    inputs = [one.detach() for one in heads()]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    settings = AttentionSettings(scale=0.3, window=window, softcap=softcap, sinks=sinks)
    expected = attention_by_group(inputs, settings, PackedLayout(GROUPS))
    with torch._dynamo.config.patch(disable=False):  # the variable TORCH_COMPILE_DISABLE of all tests
        found = packed_flex_attention(inputs, settings, PackedLayout(GROUPS))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def aligned_at_the_end(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *sizes: Any, **more: Any) -> Any:
    """A varlen kernel as its documentation describes it: causal, where the last query sees the last key."""
    cu_queries, cu_keys, max_queries, max_keys = sizes
    assert max_queries == int(cu_queries.diff().max())
    assert max_keys == int(cu_keys.diff().max())
    left, right = more["window_size"]
    assert right == 0
    found = []
    for at in range(len(cu_queries) - 1):
        q, (k, v) = query[cu_queries[at] : cu_queries[at + 1]], (x[cu_keys[at] : cu_keys[at + 1]] for x in (key, value))
        shift = len(k) - len(q)
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(shift)
        mask = mask if left == -1 else mask.triu(shift - left)
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        scale = more.get("scale", more.get("softmax_scale"))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
        found.append(out.transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("window", WINDOWS)
def test_a_varlen_kernel_gets_each_branch_with_its_prefix(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, settings = heads(), AttentionSettings(scale=0.3, window=window)
    monkeypatch.setattr(packed, "load_varlen_attn", lambda: aligned_at_the_end)
    expected = both(attention_by_group(inputs, settings, PackedLayout(GROUPS)), inputs)
    assert_equal(both(packed.packed_varlen_attention(inputs, settings, PackedLayout(GROUPS)), inputs), expected)


def test_a_flash_package_gets_each_branch_with_its_prefix() -> None:
    """Its function is transformers', with its names for the sequences."""
    inputs, asked = heads(), {}

    def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        asked.update(kwargs, mask=mask)
        rows = [one[0].transpose(0, 1) for one in (query, key, value)]
        sizes = (kwargs[f"{name}_{side}"] for name in ("cu_seq_lens", "max_length") for side in "qk")
        window = (kwargs["sliding_window"] - 1, 0)
        return aligned_at_the_end(*rows, *sizes, window_size=window, scale=kwargs["scaling"])[None], None

    kwargs = {"scaling": 0.3, "sliding_window": 16, "position_ids": torch.zeros(1, 1), "packed_groups": PackedLayout(GROUPS)}  # fmt: skip
    out, _ = PackedAttention("flash_attention_2", flash)(torch.nn.Identity(), *inputs, torch.ones(1, 1, 1, 1), **kwargs)
    assert asked["mask"] is None
    assert "position_ids" not in asked
    assert "packed_groups" not in asked
    settings = AttentionSettings(scale=0.3, window=16)
    torch.testing.assert_close(out, attention_by_group(inputs, settings, PackedLayout(GROUPS)), rtol=1e-4, atol=1e-5)


def test_rows_without_prefixes_are_not_copied_for_a_varlen_kernel() -> None:
    groups = tuple(group for group in GROUPS if not group.prefix)
    assert PackedLayout(groups).varlen_tensors(torch.device("cpu")).key_index is None


def test_a_cpu_computes_by_group() -> None:
    for name in ("sdpa", "flex_attention", "eager"):
        assert choose_kernel(name, AttentionCall.of(heads(), AttentionSettings())) is attention_by_group


def make_call(**changes: Any) -> AttentionCall:
    """Return a call on an H100 in bf16, changed."""
    values = {
        "device_type": "cuda", "dtype": torch.bfloat16, "width": 64, "capability": (9, 0), "settings": AttentionSettings()
    }  # fmt: skip
    values |= changes
    return AttentionCall(**({"value_width": values["width"]} | values))


VARLEN, FLEX = packed.packed_varlen_attention, packed_flex_attention
SOFTCAP, SINKS = AttentionSettings(softcap=5.0), AttentionSettings(sinks=torch.zeros(4))


@pytest.mark.parametrize(
    ("name", "changes", "kernel"),
    [
        ("sdpa", {}, VARLEN),
        ("sdpa", {"settings": AttentionSettings(window=16)}, VARLEN),
        ("sdpa", {"width": 8}, VARLEN),
        ("sdpa", {"width": 256}, VARLEN),
        ("sdpa", {"width": 264}, FLEX),
        ("sdpa", {"width": 20}, FLEX),
        ("sdpa", {"width": 12}, attention_by_group),  # the varlen kernel needs a multiple of 8, FlexAttention 16
        ("sdpa", {"width": 192, "value_width": 128}, FLEX),
        ("sdpa", {"width": 16, "value_width": 8}, attention_by_group),
        ("sdpa", {"dtype": torch.float32}, FLEX),
        ("sdpa", {"dtype": torch.float32, "width": 16}, FLEX),
        ("sdpa", {"dtype": torch.float32, "width": 8}, attention_by_group),
        ("sdpa", {"dtype": torch.float64}, attention_by_group),
        ("sdpa", {"dtype": torch.float16, "capability": (7, 5)}, FLEX),
        ("sdpa", {"dtype": torch.float16, "capability": (7, 5), "width": 8}, attention_by_group),
        ("sdpa", {"dtype": torch.float16, "capability": (6, 1)}, attention_by_group),
        ("sdpa", {"settings": AttentionSettings(dropout=0.1)}, attention_by_group),
        ("sdpa", {"settings": SOFTCAP}, FLEX),
        ("flex_attention", {}, FLEX),
        ("flex_attention", {"width": 8}, attention_by_group),
        ("flex_attention", {"settings": AttentionSettings(dropout=0.1)}, attention_by_group),
        ("eager", {}, attention_by_group),
        ("eager", {"settings": SOFTCAP}, FLEX),
        ("eager", {"settings": SINKS}, FLEX),
        ("eager", {"settings": SINKS, "width": 8}, attention_by_group),
    ],
)
def test_a_kernel_is_chosen_by_what_it_accepts(
    name: str, changes: dict[str, Any], kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "load_varlen_attn", lambda: aligned_at_the_end)
    assert choose_kernel(name, make_call(**changes)) is kernel


def test_without_a_varlen_kernel_and_sums_of_flex_attention_others_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.8."""
    monkeypatch.setattr(packed, "load_varlen_attn", lambda: None)
    monkeypatch.setattr(packed, "_has_flex_aux", lambda: False)
    assert choose_kernel("sdpa", make_call()) is packed_flex_attention
    assert choose_kernel("eager", make_call(settings=SINKS)) is attention_by_group


@pytest.mark.parametrize("window", WINDOWS)
def test_the_varlen_kernel_always_gets_a_window(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one torch 2.14 takes cuDNN on Hopper, which aligns the causal mask at the first query and key."""
    windows = []

    def varlen_attn(query: torch.Tensor, *_: Any, window_size: tuple[int, int], **__: Any) -> torch.Tensor:
        windows.append(window_size)
        return query

    monkeypatch.setattr(packed, "load_varlen_attn", lambda: varlen_attn)
    packed.packed_varlen_attention(heads(), AttentionSettings(window=window), PackedLayout(GROUPS))
    assert windows == [(-1 if window is None else window - 1, 0)]


@pytest.mark.parametrize(
    ("changes", "name", "dtype", "capability", "compiles"),
    [
        ({}, "auto", torch.bfloat16, (8, 0), False),
        ({}, "auto", torch.float32, (8, 0), True),
        ({}, "auto", torch.float16, (7, 5), True),
        ({"head_dim": 8}, "auto", torch.float32, (8, 0), False),
        ({}, "eager", torch.float32, (8, 0), False),
        ({}, "flash_attention_2", torch.bfloat16, (8, 0), False),
        ({}, "flex_attention", torch.bfloat16, (8, 0), True),
        ({"model_type": "gemma2"}, "auto", torch.bfloat16, (9, 0), True),  # its logits are capped
        ({"model_type": "gpt_oss"}, "auto", torch.bfloat16, (9, 0), True),
        ({"model_type": "deepseek_v3"}, "auto", torch.bfloat16, (9, 0), True),  # query 192 and value 128 wide
    ],
)
def test_what_a_run_compiles_is_told_by_its_config(
    changes: dict[str, Any], name: str, dtype: torch.dtype, capability: tuple[int, int], compiles: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(packed, "load_varlen_attn", lambda: aligned_at_the_end)
    values = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4} | changes
    config = AutoConfig.for_model(**values)
    assert compiles_attention(config, name, dtype, capability) is compiles


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("saved", ["kept", "computed again"])
def test_the_written_gradient_is_that_of_autograd(
    kv_heads: int, window: int | None, saved: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp64; `is_eager` takes torch's own gradients."""
    monkeypatch.setattr(by_group, "QUERY_BLOCK", 20)
    if saved == "computed again":  # from the third block on
        monkeypatch.setattr(by_group, "SAVED_BYTES", 10_000)
    inputs, layout = [one.double().detach().requires_grad_() for one in heads(kv_heads)], PackedLayout(GROUPS)
    written, own = (
        both(attention_by_group(inputs, AttentionSettings(scale=0.3, window=window, is_eager=eager), layout), inputs)
        for eager in (False, True)
    )
    for one, other in zip(written, own, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_in_bf16_its_error_is_that_of_torchs_kernel() -> None:
    """With logits of up to 30, which in bf16 would be off by 0.1."""
    draw = torch.Generator().manual_seed(0)
    exact = [torch.randn(1, 4, 200, 64, generator=draw) * size for size in (3, 3, 1)]
    half = [one.bfloat16().requires_grad_() for one in exact]
    wide = [one.detach().double().requires_grad_() for one in half]
    layout = PackedLayout((PackedGroup(0, (200,)),))
    expected = both(attention_by_group(wide, AttentionSettings(), layout), wide)
    found = both(attention_by_group(half, AttentionSettings(), layout), half)
    sdpa = torch.nn.functional.scaled_dot_product_attention(*half, is_causal=True).transpose(1, 2)
    for one, torchs, other in zip(found, both(sdpa, half), expected, strict=True):
        assert (one - other).norm() <= 1.5 * (torchs - other).norm()


def test_no_mask_is_larger_than_a_block_of_queries() -> None:
    """Nothing grows with the square of the row's length."""
    groups = (PackedGroup(600, (700, 50)), *[PackedGroup(0, (300,))] * 9)
    layout, tokens = PackedLayout(groups), sum(group.tokens for group in groups)
    inputs = [torch.randn(1, 1, tokens, 8) for _ in range(3)]
    for window in (None, 400):
        attention_by_group(inputs, AttentionSettings(window=window), layout)
    masks = [one for one in layout.cache.values() if isinstance(one, torch.Tensor)]
    assert masks
    assert all(one.shape[0] <= by_group.QUERY_BLOCK and one.shape[1] <= 400 + by_group.QUERY_BLOCK for one in masks)

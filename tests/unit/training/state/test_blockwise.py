"""8-bit optimizer state: blocks that are whole are loaded as they were, others are quantized again."""

from __future__ import annotations

import torch

from dstrain.training.state.blockwise import BLOCK, _Values

NUMBERS = torch.cat([torch.linspace(-0.99, -0.01, 127), torch.zeros(1), torch.linspace(0.01, 1.0, 128)])
"""Sorted, and without -1, as bitsandbytes' map is: a block whose largest value is negative is never exact."""


def values(codes: torch.Tensor, scales: torch.Tensor) -> _Values:
    return _Values(codes.to(torch.uint8), scales, torch.full((codes.numel(),), torch.nan))


def test_a_block_of_one_scale_keeps_its_codes() -> None:
    codes = torch.zeros(BLOCK, dtype=torch.long)  # -0.99 times the scale: quantized again, the scale would shrink
    found, scales = values(codes, torch.full((BLOCK,), 2.0)).as_blocks(NUMBERS)
    assert torch.equal(found, codes.to(torch.uint8))
    assert scales.tolist() == [2.0]


def test_a_block_of_two_scales_is_quantized_again() -> None:
    old = values(torch.full((BLOCK,), 255), torch.tensor([1.0, 4.0]).repeat_interleave(BLOCK // 2))
    codes, scales = old.as_blocks(NUMBERS)
    assert scales.tolist() == [4.0]
    torch.testing.assert_close(NUMBERS[codes.long()] * 4.0, old.numbers(NUMBERS), atol=0.02, rtol=0)


def test_padding_takes_the_scale_of_its_block_and_is_zero() -> None:
    scales = torch.full((BLOCK + 10,), 3.0)
    scales[BLOCK + 5 :] = torch.nan
    codes, found = values(torch.full((BLOCK + 10,), 7), scales).as_blocks(NUMBERS)
    assert found.tolist() == [3.0, 3.0]
    assert NUMBERS[codes[BLOCK + 5 :].long()].tolist() == [0.0] * 5
    assert codes[: BLOCK + 5].tolist() == [7] * (BLOCK + 5)


def test_values_that_were_stored_in_32_bits_are_quantized() -> None:
    plain = torch.linspace(-1, 1, BLOCK)
    mixed = _Values(torch.zeros(BLOCK, dtype=torch.uint8), torch.full((BLOCK,), torch.nan), plain)
    codes, scales = mixed.as_blocks(NUMBERS)
    assert scales.tolist() == [1.0]
    torch.testing.assert_close(NUMBERS[codes.long()], plain, atol=0.011, rtol=0)

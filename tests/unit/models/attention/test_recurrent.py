"""Recurrent layers of packed rows: each sequence begins in its own state, and branches in that of their prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dstrain.batch import PackedGroup
from dstrain.models.attention import recurrent
from dstrain.models.attention.layout import PackedLayout
from dstrain.models.attention.packed import enable_packed_attention
from dstrain.models.attention.recurrent import PackedRecurrence
from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing
from tests.unit.models.attention.packed_rows import gradient, made, packed, packed_logits, padded_logits

PLAIN = (PackedGroup(0, (33,)), PackedGroup(0, (1,)), PackedGroup(0, (12, 30)))


def recurrences(model: torch.nn.Module) -> list[PackedRecurrence]:
    forwards = [vars(module).get("forward") for module in model.modules()]
    return [forward for forward in forwards if isinstance(forward, PackedRecurrence)]


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2"])
def test_a_later_sequence_does_not_see_an_earlier_one(name: str) -> None:
    model, batch = made(name, torch.float64), packed(PLAIN)
    enable_packed_attention(model)
    before = packed_logits(model, batch)
    batch.tensors["input_ids"][0, :33] = 7
    after = packed_logits(model, batch)
    assert torch.equal(before[33:], after[33:])
    assert not torch.equal(before[:33], after[:33])


@pytest.mark.parametrize("name", ["qwen3_5_text", "bamba", "jamba"])
def test_gradients_flow_from_both_answers_into_the_prompt(name: str) -> None:
    model, batch = made(name, torch.float64), packed((PackedGroup(20, (9, 1)),))
    expected = gradient(model, padded_logits(model, batch))
    enable_packed_attention(model)
    model.train()
    enable_gradient_checkpointing(model)
    found = gradient(model, packed_logits(model, batch))
    assert float((found - expected).norm() / expected.norm()) <= 1e-6


def test_a_layer_without_initial_states_reads_the_prompt_again() -> None:
    jamba, qwen = made("jamba"), made("qwen3_5_text")
    for model in (jamba, qwen):
        enable_packed_attention(model)
    assert [one.restarts for one in recurrences(jamba)] == [True]
    assert [one.restarts for one in recurrences(qwen)] == [False]


def test_rows_of_one_call_have_similar_lengths() -> None:
    layout = PackedLayout(tuple(PackedGroup(0, (length,)) for length in (10, 100, 9, 8, 90, 7)))
    calls = recurrent.group_by_length(layout.segments, lambda segment: segment.length)
    assert [[segment.length for segment in call] for call in calls] == [[100, 90], [10, 9, 8], [7]]


def test_kernels_of_a_gpu_get_the_limits_of_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = made("qwen3_5_text"), packed(PLAIN)
    enable_packed_attention(model)
    (recurrence,) = recurrences(model)
    calls: list[dict[str, Any]] = []

    def base(hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        calls.append(kwargs)
        return hidden_states

    recurrence.base = base
    monkeypatch.setattr(recurrent, "reads_rows_at_once", lambda device_type, layout: True)
    packed_logits(model, batch)
    assert calls[0]["cu_seq_lens_q"].tolist() == [0, 33, 34, 46, 76]
    assert calls[0]["seq_idx"][0, [0, 33, 34, 75]].tolist() == [0, 1, 2, 3]
    assert calls[0]["seq_idx"].shape == (1, 76)


def test_a_shared_prompt_is_never_left_to_those_kernels() -> None:
    assert not recurrent.reads_rows_at_once("cuda", PackedLayout((PackedGroup(3, (2, 2)),)))
    assert not recurrent.reads_rows_at_once("cpu", PackedLayout(PLAIN))

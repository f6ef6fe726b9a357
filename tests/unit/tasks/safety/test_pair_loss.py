"""Each loss of safety-aware DPO is its paper's formula, worked out here by plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from dstrain.tasks.dpo import dpo_sigmoid
from dstrain.tasks.safety.pair_loss import image_preference, reward_anchor, safe_dpo, scaled_beta
from tests.vocabulary import sigmoid

H = torch.tensor([3.0, -2.0, 0.5], dtype=torch.float64)
"""Log-ratio of the preferred answer less that of the other."""


def test_safedpo_asks_for_an_offset_between_a_safe_and_an_unsafe_answer() -> None:
    one_safe = torch.tensor([True, False, True])
    wanted = [
        -math.log(sigmoid(0.1 * 3.0 - 10.0)),  # 9.70006...: the offset is in units of the reward, beta h
        -math.log(sigmoid(0.1 * -2.0)),
        -math.log(sigmoid(0.1 * 0.5 - 10.0)),
    ]
    assert safe_dpo(H, 0.1, one_safe, 10.0).tolist() == pytest.approx(wanted)
    assert wanted[0] == pytest.approx(9.7 + math.log(1 + math.exp(-9.7)))


def test_safedpo_without_an_offset_is_dpo() -> None:
    assert safe_dpo(H, 0.1, torch.ones(3), 0.0).tolist() == dpo_sigmoid(H, 0.1).tolist()


def test_an_offset_raises_the_gradient_of_pairs_that_are_not_yet_apart() -> None:
    logits = H.clone().requires_grad_()
    safe_dpo(logits, 0.1, torch.tensor([True, False, False]), 10.0).sum().backward()
    assert logits.grad is not None
    assert logits.grad.tolist() == pytest.approx([-0.1 * sigmoid(10 - 0.3), -0.1 * sigmoid(0.2), -0.1 * sigmoid(-0.05)])


def test_beta_grows_with_the_margin_up_to_one_plus_w() -> None:
    margin = torch.tensor([0.0, 1.0, 4.0, 1000.0], dtype=torch.float64)
    wanted = [0.1, 0.1 * (1 + 0.5 * (1 - math.exp(-0.25))), 0.1 * (1 + 0.5 * (1 - math.exp(-1.0))), 0.15]
    assert scaled_beta(0.1, margin, 0.5, 0.25).tolist() == pytest.approx(wanted)


def test_the_term_on_images_compares_one_answer_under_two_images() -> None:
    corrupted = torch.tensor([1.0, -2.0, 4.5], dtype=torch.float64)
    wanted = [-math.log(sigmoid(0.2 * 2.0)), math.log(2), -math.log(sigmoid(0.2 * -4.0))]
    assert image_preference(H, corrupted, 0.2).tolist() == pytest.approx(wanted)


def test_the_anchor_asks_for_a_reward_above_delta() -> None:
    wanted = [-math.log(sigmoid(0.3 - 0.25)), -math.log(sigmoid(-0.2 - 0.25)), -math.log(sigmoid(0.05 - 0.25))]
    assert reward_anchor(H, 0.1, 0.25).tolist() == pytest.approx(wanted)

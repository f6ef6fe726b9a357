"""The order of a pair follows its labels or scores: harmless first, helpful among the harmless."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from dstrain.tasks.safety.options import order_pairs, reward_margin

KINDS = {"numpy": np.array, "torch": lambda values: torch.tensor(values, dtype=torch.float64)}


@pytest.fixture(params=KINDS)
def column(request: pytest.FixtureRequest) -> Any:
    return KINDS[request.param]


NAN = float("nan")


def test_a_safe_answer_is_preferred_to_an_unsafe_one_and_two_unsafe_ones_are_dropped(column: Any) -> None:
    order = order_pairs({"chosen_safe": column([1.0, 1.0, 0.0, 0.0]), "rejected_safe": column([1.0, 0.0, 1.0, 0.0])})
    assert order.swap.tolist() == [False, False, True, False]
    assert order.keep.tolist() == [True, True, True, False]
    assert order.one_safe.tolist() == [False, True, True, False]
    assert order.both_safe.tolist() == [True, False, False, False]


def test_a_pair_with_an_unknown_label_keeps_its_order(column: Any) -> None:
    order = order_pairs({"chosen_safe": column([NAN, 0.0, NAN]), "rejected_safe": column([1.0, NAN, NAN])})
    assert order.keep.all()
    assert not (order.swap | order.one_safe | order.both_safe).any()


def test_a_score_at_the_threshold_is_safe(column: Any) -> None:
    columns = {"harmless_chosen": column([0.5, 0.49]), "harmless_rejected": column([0.4, 0.5])}
    order = order_pairs(columns, 0.5)
    assert order.one_safe.tolist() == [True, True]
    assert order.swap.tolist() == [False, True]


def test_scores_take_the_place_of_labels(column: Any) -> None:
    labels = {"chosen_safe": column([1.0]), "rejected_safe": column([0.0])}
    order = order_pairs(labels | {"harmless_chosen": column([-1.0]), "harmless_rejected": column([2.0])})
    assert order.swap.tolist() == [True]


def test_the_more_helpful_of_two_safe_answers_is_preferred(column: Any) -> None:
    columns = {
        "harmless_chosen": column([1.0, 1.0, 1.0, -1.0]),
        "harmless_rejected": column([2.0, 2.0, -1.0, -2.0]),
        "helpful_chosen": column([0.0, 3.0, 0.0, 0.0]),
        "helpful_rejected": column([5.0, 3.0, 5.0, 5.0]),
    }
    order = order_pairs(columns)
    assert order.swap.tolist() == [True, False, False, False], "a tie keeps the order; harmless comes first"
    assert order.keep.tolist() == [True, True, True, False]


def test_the_margin_is_harmless_between_safe_and_unsafe_and_helpful_between_safe_answers(column: Any) -> None:
    columns = {
        "margin": column([9.0, 9.0, 9.0]),
        "harmless_chosen": column([1.0, -3.0, -1.0]),
        "harmless_rejected": column([2.0, 2.0, -2.0]),
        "helpful_chosen": column([0.0, 4.0, 4.0]),
        "helpful_rejected": column([5.0, 0.0, 0.0]),
    }
    assert reward_margin(columns, order_pairs(columns)).tolist() == [5.0, 5.0, 0.0]


def test_a_margin_of_the_data_counts_in_its_order(column: Any) -> None:
    columns = {
        "margin": column([2.0, 2.0, 2.0, -1.0]),
        "chosen_safe": column([1.0, 0.0, 0.0, 1.0]),
        "rejected_safe": column([1.0, 1.0, 0.0, 1.0]),
    }
    assert reward_margin(columns, order_pairs(columns)).tolist() == [2.0, 0.0, 0.0, 0.0]


def test_without_a_helpful_model_every_margin_is_harmless(column: Any) -> None:
    columns = {
        "margin": column([9.0]),
        "harmless_chosen": column([3.0]),
        "harmless_rejected": column([1.0]),
    }
    assert reward_margin(columns, order_pairs(columns)).tolist() == [2.0]

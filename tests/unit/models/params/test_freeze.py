"""Names of parameters: what is frozen and what learns at its own rate."""

from __future__ import annotations

import pytest
import torch

from dstrain.config.schema import OptimConfig
from dstrain.errors import RecipeError
from dstrain.models.params import build_param_groups, freeze, matches_pattern


@pytest.mark.parametrize(
    ("pattern", "name", "wanted"),
    [
        ("embed_tokens", "model.embed_tokens.weight", True),
        ("*.embed_tokens", "model.embed_tokens.weight", True),
        ("model.layers.1", "model.layers.1.mlp.weight", True),
        ("model.layers.1", "model.layers.11.mlp.weight", False),
        ("model.layers.*.mlp", "model.layers.3.mlp.weight", True),
        ("mlp", "model.mlps.weight", False),
        ("score.weight", "score.weight", True),
    ],
)
def test_a_pattern_is_a_word_or_a_beginning_or_a_glob(pattern: str, name: str, wanted: bool) -> None:
    assert matches_pattern(name, pattern) == wanted


def model() -> torch.nn.Module:
    return torch.nn.ModuleDict({"tower": torch.nn.Linear(3, 4), "head": torch.nn.Linear(4, 1)})


def test_biases_and_norms_do_not_decay_and_groups_have_their_own_rate() -> None:
    optim = OptimConfig(lr=1e-3, weight_decay=0.1, groups={"head": {"lr": 1e-2, "weight_decay": 0.0}})
    groups = build_param_groups(model(), optim)
    told = sorted(
        (round(group.lr_scale, 6), group.weight_decay, sum(p.numel() for p in group.params)) for group in groups
    )
    assert told == [(1.0, 0.0, 4), (1.0, 0.1, 12), (10.0, 0.0, 5)]


def test_the_first_group_that_matches_counts_and_its_silence_means_the_default() -> None:
    optim = OptimConfig(
        lr=1e-2, weight_decay=0.1, groups={"head.bias": {"lr": 0}, "head": {"lr": 1e-3}, "tower": {"weight_decay": 0.2}}
    )
    net = model()
    found = {
        id(p): (group.lr_scale, group.weight_decay) for group in build_param_groups(net, optim) for p in group.params
    }
    told = {name: found[id(p)] for name, p in net.named_parameters()}
    assert told == {
        "tower.weight": (1.0, 0.2),
        "tower.bias": (1.0, 0.0),
        "head.weight": (pytest.approx(0.1), 0.1),
        "head.bias": (0.0, 0.0),
    }


def test_frozen_parameters_are_in_no_group() -> None:
    net = model()
    freeze(net, ["tower.w*"])
    assert [name for name, p in net.named_parameters() if not p.requires_grad] == ["tower.weight"]
    assert sum(len(group.params) for group in build_param_groups(net, OptimConfig())) == 3
    freeze(net, ["tower"])
    with pytest.raises(RecipeError, match=r"optim\.groups 'tower': matches no parameter; names here begin with head"):
        build_param_groups(net, OptimConfig(groups={"tower": {"lr": 1}}))


def test_every_pattern_that_matches_nothing_is_named() -> None:
    with pytest.raises(RecipeError) as caught:
        freeze(model(), ["tower", "haed", "x.*"])
    assert [fault.where for fault in caught.value.faults] == ["model.freeze 'haed'", "model.freeze 'x.*'"]


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(RecipeError, match="leaves no parameter to train"):
        freeze(model(), ["tower", "head"])

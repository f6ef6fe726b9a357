"""The place of a key is where it was written, or the nearest place known."""

from __future__ import annotations

from dstrain.errors import SourceMap, lookup


def test_a_key_without_a_place_has_that_of_its_neighbour() -> None:
    source = SourceMap("recipe.yaml", {"optim": {"lr": 1}}, {("optim", "lr"): "recipe.yaml:4"})
    assert source.get_location(("optim", "lr")) == "recipe.yaml:4 optim.lr"
    assert source.get_location(("optim",)) == "recipe.yaml:4 optim"
    assert source.get_location(("data",)) == "recipe.yaml data"
    assert source.get_location(()) == "recipe.yaml"


def test_a_value_is_looked_up_through_blocks_and_lists() -> None:
    values = {"train": [{"path": "a"}]}
    assert lookup(values, ("train", 0, "path")) == "a"
    assert lookup(values, ("train", 1, "path")) is None
    assert lookup(values, ("other",)) is None

"""Tasks on text that load their model in their own way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import RecipeError
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.sft import SFT


@dataclass(frozen=True, kw_only=True)
class OwnSource(ModelSource):
    def load(self, model: ModelConfig) -> Any:
        raise AssertionError


@dataclass(frozen=True, kw_only=True)
class Own(SFT):
    source_class = OwnSource


def test_where_a_task_loads_in_its_own_way_a_path_means_anything() -> None:
    recipe = RunConfig.model_validate({"task": "sft", "model": {"path": "./mine"}, "data": {"train": "x.jsonl"}})
    Own(recipe=recipe).checks.required_keys()
    with pytest.raises(RecipeError, match="is not a folder"):
        SFT(recipe=recipe).checks.required_keys()

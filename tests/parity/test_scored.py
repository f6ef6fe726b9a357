"""A reward model that sees starts from the same weights at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.test_init import equal
from tests.vision_recipes import GEMMA3, IDEFICS3, llava
from tests.workers import Workers

CASES = "tests.parity.scored_cases:"


@pytest.mark.parametrize("values", [llava(), IDEFICS3, GEMMA3], ids=lambda values: values["model_type"])
@pytest.mark.parametrize("origin", ["drawn", "of a model that writes", "exported"])
def test_a_reward_model_that_sees_is_the_same_at_every_stage(
    origin: str, values: dict[str, Any], tmp_path: Path, one: Workers, two: Workers
) -> None:
    settings: dict[str, Any] = {"config": values}
    if origin != "drawn":
        folders = {"of a model that writes": tmp_path / "writer", "exported": tmp_path / "scored"}
        one(CASES + "save", values=values, writer=str(tmp_path / "writer"), scored=str(tmp_path / "scored"))
        settings = {"path": str(folders[origin])}
    wanted = one(CASES + "started", kind="zero0", settings=settings)[0]
    assert wanted["weights"]["score.weight"].any()
    for found in two(CASES + "started", kind="zero3", settings=settings):
        assert found["sharded"]
        assert found["parts"] == wanted["parts"]
        assert equal(found["weights"], wanted["weights"])

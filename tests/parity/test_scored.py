"""A reward model that sees starts from the same weights at every stage."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.cells import mark_slow
from tests.parity.test_init import equal
from tests.vision_recipes import GEMMA3, IDEFICS3, llava
from tests.workers import Workers

CASES = "tests.parity.scored_cases:"
FAMILIES = {values["model_type"]: values for values in (llava(), IDEFICS3, GEMMA3)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("origin", "family"),
    mark_slow(
        product(("drawn", "of a model that writes", "exported"), FAMILIES),
        [("drawn", "idefics3"), ("of a model that writes", "llava"), ("exported", "gemma3")],  # each in two other cells
    ),
)
def test_a_reward_model_that_sees_is_the_same_at_every_stage(
    origin: str, family: str, tmp_path: Path, one: Workers, two: Workers
) -> None:
    values = FAMILIES[family]
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

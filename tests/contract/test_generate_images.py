"""Answers about images are the same however many processes write them, and no rank waits for one whose prompts show none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.test_generate import GENERATE
from tests.vision_recipes import named_recipe
from tests.vocabulary import RUN, write_recipe
from tests.workers import Workers

SECONDS = 60.0
"""After which a call counts as hung; each takes a few."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, one: Workers) -> Path:
    """The folder of a run that has learnt to end its answers, with its data beside it."""
    folder = tmp_path_factory.mktemp("run")
    _, values = named_recipe("vlm", folder)
    values |= {"steps": 80, "optim": {"lr": 1e-2}, "batch": {"total": 8, "micro": 8}}
    write_recipe(folder, values)
    one(RUN, recipe=str(folder / "recipe.yaml"), run_dir=str(folder / "run"))
    return folder


def asked(folder: Path, shows: list[int]) -> list[str]:
    """A held-out question about so many images for each, written into `asked.jsonl`; their answers."""
    told = (folder / "eval.jsonl").read_text().splitlines()
    lines = [told[3 * index + count] for index, count in enumerate(shows)]
    (folder / "asked.jsonl").write_text("\n".join(lines))
    return [json.loads(line)["messages"][1]["content"] for line in lines]


@pytest.mark.slow  # answers about images on two ranks: contract/test_docqa
@pytest.mark.parametrize(
    ("shows", "batch"),
    [
        ([0, 0, 1], 1),
        ([2, 0, 0], 2),
        ([0, 1, 0, 0, 0], 2),
        ([1], 1),
        ([0, 0, 0], 1),
    ],
)
def test_answers_do_not_depend_on_who_sees_an_image(
    shows: list[int], batch: int, trained: Path, one: Workers, two: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = asked(trained, shows)
    question = {
        "folder": str(trained / "run"),
        "data": str(trained / "asked.jsonl"),
        "sampling": {"max_new_tokens": 24, "batch": batch},
    }
    alone = one(GENERATE, **question)[0]
    assert [row["answer"].strip() for row in alone] == wanted, "it has learnt to answer, and sees the colours"
    monkeypatch.setattr(two, "_timeout", SECONDS)
    for hold in (None, "zero3"):
        for found in two(GENERATE, **question, ds_config=hold):
            assert found == alone, hold

"""No rank waits for another where one has images and another has none, and the steps are those of one process.

At stage 3 every rank takes part in gathering each weight, at stages 1 and 2 in summing each gradient: a rank that skipped
the tower would leave the others waiting. A batch without an image gets a blank one.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.schema import RunConfig
from dstrain.errors import DataError
from dstrain.tasks import make_task
from tests.cells import SLOW
from tests.parity.image_cases import Course
from tests.vision_recipes import GEMMA3, IDEFICS3, named_recipe
from tests.workers import WorkerError, Workers

CASES = "tests.parity.image_cases:"
SECONDS = 200.0
"""After which a call counts as hung; each takes a few."""
SEEN = [sample for sample in range(64) if sample % 3]
"""Samples with one image or two."""
BLIND = [sample for sample in range(64) if sample % 3 == 0]
"""Samples with none."""

ONE_RANK = Course(
    [[[SEEN[4 * i : 4 * i + 2], SEEN[4 * i + 2 : 4 * i + 4]], [BLIND[2 * i : 2 * i + 1], BLIND[2 * i + 1 : 2 * i + 2]]]
     for i in range(5)]
)  # fmt: skip
SOME_PASSES = Course(
    [
        [[[1, 2], [3], [6]], [[9], [12], [4, 5]]],
        [[[15], [7], [8, 10]], [[11], [18, 21], [24]]],
        [[[27], [30], [33]], [[36], [39], [42]]],
        [[[13, 45], [48], [14]], [[51], [16, 17], [54]]],
    ]
)
TAIL_SEEN = Course([*SOME_PASSES.steps[:2], [[[19], [57], []], [[], [], []]]])
"""Fillers stand in for the first sample of the step."""
TAIL_BLIND = Course([*SOME_PASSES.steps[:2], [[[57], [19], []], [[], [], []]], [[[60], [], []], [[], [], []]]])
LOOKS = Course(
    ONE_RANK.steps[:3],
    [[31, 32, 34, 35, 30, 33, 36, 39], [40, 41, 42], [63, 0, 3]],  # the second rank's half has no image
)
COURSES = {
    "one rank never sees an image": ("vlm", ONE_RANK),
    "images in some passes, others on each rank": ("vlm", SOME_PASSES),
    "the last passes stand in for one with an image": ("vlm", TAIL_SEEN),
    "the last passes stand in for one without": ("vlm", TAIL_BLIND),
    "there is no image at all": ("vlm, text alone", TAIL_BLIND),
    "looks in between": ("vlm", LOOKS),
}
TOWERS: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"model": {"freeze": ["vision"]}},
    "projector alone": {"model": {"freeze": ["vision", "language"]}},
}
FAST = (
    ("one rank never sees an image", "trained", 3),
    ("the last passes stand in for one with an image", "trained", 2),
)
GRID = [
    one if one in FAST else SLOW(*one)
    for one in product(COURSES, TOWERS, range(4))
    if one[:2] != ("there is no image at all", "projector alone")  # refused: see below
]


@pytest.fixture
def brisk(two: Workers, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """Two processes that have imported all, and may not take long from now on."""
    two(CASES + "ready")
    monkeypatch.setattr(two, "_timeout", SECONDS)
    return two


@pytest.fixture(scope="module")
def definition(one: Workers) -> Any:
    """What plain PyTorch does in one process, with all samples of a step in one batch."""
    found: dict[str, Any] = {}

    def of(key: str, task: str, course: Course, changes: dict[str, Any]) -> Any:
        if key not in found:
            found[key] = one(CASES + "losses", task=task, kind="torch", course=course, changes=changes)[0]
        return found[key]

    return of


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tower", "stage"), GRID)
def test_no_rank_waits_where_images_are_uneven(
    name: str, tower: str, stage: int, brisk: Workers, definition: Any
) -> None:
    task, course = COURSES[name]
    changes = TOWERS[tower]
    found = brisk(CASES + "losses", task=task, kind=f"zero{stage}", course=course, changes=changes)
    wanted = definition(f"{name}, {tower}", task, course, changes)
    some = [0] * 9 if "alone" in task else [0, 1, 2] * 3
    for told in found:
        assert told["images"] == some
        assert all(map(math.isfinite, told["losses"]))
        assert told["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
    assert len(set(wanted["losses"])) == len(wanted["losses"]) == len(course.steps) + len(course.looks)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3": ("vlm", {"model": {"config": GEMMA3}, "data": {"max_length": 128}}),
    "Idefics 3": ("vlm", {"model": {"config": IDEFICS3}, "data": {"max_length": 128}}),
    "rewards": ("rm, with images", {}),
    "rewards, adapters": ("rm, with images", {"model": {"lora": {"rank": 4}}}),
    "rewards, Gemma 3": ("rm, with images", {"model": {"config": GEMMA3}, "data": {"max_length": 128}}),
    "rewards, Idefics 3": ("rm, with images", {"model": {"config": IDEFICS3}, "data": {"max_length": 128}}),
}


@pytest.mark.parametrize("course", ["one rank never sees an image", "the last passes stand in for one without"])
@pytest.mark.parametrize(("name", "stage"), [SLOW(name, stage) for name in OTHERS for stage in range(4)])
def test_no_rank_waits_whatever_the_family_and_the_task(
    name: str, stage: int, course: str, brisk: Workers, definition: Any
) -> None:
    task, changes = OTHERS[name]
    run = {"task": task, "course": COURSES[course][1], "changes": changes}
    wanted = definition(f"{name}, {course}", **run)
    for told in brisk(CASES + "losses", kind=f"zero{stage}", **run):
        assert told["losses"] == pytest.approx(wanted["losses"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("tower", "stage"), [("trained", 1), ("trained", 2), ("trained", 3), ("frozen", 3)])
def test_without_a_blank_image_they_would_not_end(tower: str, stage: int) -> None:
    """One rank's call meets another call of the other's, and gloo ends the process, or both wait: these tests can fail."""
    own = Workers(2)
    try:
        own(CASES + "ready")
        own._timeout = 30
        with pytest.raises(WorkerError, match=r"died with code|hung"):
            own(CASES + "losses", task="vlm", kind=f"zero{stage}", course=ONE_RANK, changes=TOWERS[tower], blank=False)
    finally:
        own.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "model", "refused"),
    [
        ("vlm", {"freeze": ["vision", "language"]}, True),
        ("vlm", {"freeze": ["language"]}, True),
        ("vlm", {"freeze": ["vision"]}, False),
        ("vlm", {"freeze": ["vision", "language"], "lora": {"rank": 2}}, False),
        ("rm", {"freeze": ["vision", "language"]}, False),
    ],
)
def test_where_images_alone_teach_there_are_some(
    task: str, model: dict[str, Any], refused: bool, tmp_path: Path
) -> None:
    """Else no weight that learns gets a gradient, which DeepSpeed meets with an IndexError at stages 1 and 2."""
    for kind, words in (
        ("text alone", "no record has an image, and model.freeze leaves no parameter"),
        ("with images", ""),
    ):
        _, values = named_recipe(f"{task}, {kind}", tmp_path)
        made = make_task(RunConfig.model_validate(values | {"model": values["model"] | model}))
        with pytest.raises(DataError, match=words) if refused and words else nullcontext():
            assert made.examples("train")
        assert made.examples("eval"), "what only evaluates learns nothing"


PAIRS = Course([[[SEEN[2 * i : 2 * i + 2]], [BLIND[2 * i : 2 * i + 2]]] for i in range(10)])
REFERENCES: dict[str, dict[str, Any]] = {
    "in memory": {},
    "remembered": {"options": {"precompute_ref_log_probs": True}},
    "adapters switched off": {"model": {"lora": {"rank": 4}}},
}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [SLOW(0), SLOW(1), 2, SLOW(3)])
def test_answers_kept_are_those_asked_online(stage: int, brisk: Workers) -> None:
    first, moved = Course(PAIRS.steps[:1]), {"moved": True}
    run = {"task": "dpo, with images", "kind": f"zero{stage}", "course": first}
    online, kept = (
        brisk(CASES + "losses", changes=moved | REFERENCES[name], **run)[0]["losses"][0]
        for name in ("in memory", "remembered")
    )
    assert online != pytest.approx(math.log(2), abs=1e-4), "the policy has moved away from it"
    assert kept == pytest.approx(online, abs=1e-6)

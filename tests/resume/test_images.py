"""A run that sees goes on anywhere, and alters its images as if it had never stopped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import Loader, StepSampler
from dstrain.tasks import Task, make_task
from tests.resume.test_elastic import by_step, close
from tests.vision_recipes import named_recipe
from tests.vocabulary import RUN, metric_rows, read_events, write_recipe
from tests.workers import Workers

ALTERED = {"horizontal_flip": 0.5, "random_translate": True}


def vision_values(folder: Path, **options: Any) -> dict[str, Any]:
    """A vlm whose tower is frozen, 6 samples per step."""
    _, values = named_recipe("vlm, things", folder)
    values["model"] |= {"freeze": ["vision"]}
    values |= {"steps": 9, "batch": {"total": 6, "micro": 2}, "save": {"every": 3, "keep": 9}, "options": options}
    return values | {"precision": "fp32"}


@pytest.fixture
def workers(one: Workers, two: Workers, three: Workers) -> Mapping[int, Workers]:
    return {1: one, 2: two, 3: three}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("recipe")
    write_recipe(folder, vision_values(folder, **ALTERED))
    return str(folder / "recipe.yaml")


@pytest.fixture(scope="module")
def whole(recipe: str, tmp_path_factory: pytest.TempPathFactory, two: Workers) -> tuple[Any, list[dict[str, Any]]]:
    """What an unbroken run took and left, by stage 3 on two processes."""
    folder = tmp_path_factory.mktemp("whole")
    return two(RUN, recipe=recipe, run_dir=str(folder), sets=["ds_config=zero3"]), metric_rows(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "processes"), [("zero2", 1), ("zero1", 3), ("zero3", 3)])
def test_a_run_with_a_frozen_tower_goes_on_elsewhere(
    preset: str, processes: int, recipe: str, whole: Any, tmp_path: Path, workers: Mapping[int, Workers]
) -> None:
    run = {"recipe": recipe, "run_dir": str(tmp_path)}
    workers[2](RUN, **run, sets=["ds_config=zero3"], crash_at=5)
    again = workers[processes](RUN, **run, sets=[f"ds_config={preset}"])
    taken, left = whole
    assert by_step(again) == by_step(taken)[3:], "the same samples in each step"
    close(metric_rows(tmp_path), left)
    (told,) = read_events(tmp_path, "resharded")
    assert told["step"] == 3


@pytest.mark.slow
def test_altered_images_leave_other_losses(recipe: str, whole: Any, tmp_path: Path, two: Workers) -> None:
    """Else the losses above would not show whether images are altered alike."""
    for option in ("horizontal_flip", "random_translate"):
        sets = [
            "ds_config=zero3",
            f"options.{option}=false" if option == "random_translate" else "options.horizontal_flip=0",
        ]
        two(RUN, recipe=recipe, run_dir=str(tmp_path / option), sets=sets)
        ours = [row["loss"] for row in metric_rows(tmp_path / option)]
        assert ours != pytest.approx([row["loss"] for row in whole[1]], rel=1e-4), option


def images(task: Task, samples: int, world_size: int, accumulate: int) -> Iterator[dict[int, torch.Tensor]]:
    """Of each step after `samples`: sample -> (N, 3, H, W), its images as the model sees them, whichever rank they are for."""
    examples: Any = task.examples("train")
    plan = StepSampler(
        sizes=(len(examples),), seed=3, samples_per_step=9, world_size=world_size, accumulate=accumulate,
        total_samples=200,
    )  # fmt: skip
    ranks = [Loader(examples=examples, collate=task.collate, sampler=plan, rank=rank) for rank in range(world_size)]
    for passes in zip(*(loader.iter_steps(samples) for loader in ranks), strict=True):
        step: dict[int, torch.Tensor] = {}
        for batch in (batch for of_rank in passes for batch in of_rank.batches if not batch.is_filler):
            counts = [len(examples[sample]["images"]) for sample in batch.samples]
            if any(counts):
                step |= zip(batch.samples, batch.vision["pixel_values"].split(counts), strict=True)
        yield step


def test_images_are_altered_by_their_place_in_the_run_alone(tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(vision_values(tmp_path, **ALTERED)))
    whole = [*images(task, 0, 1, 1)]
    assert len(whole) == 23
    for samples, world_size, accumulate in ((0, 2, 1), (36, 1, 3), (36, 3, 2), (90, 4, 1)):
        found = [*images(task, samples, world_size, accumulate)]
        assert len(found) == 23 - samples // 9
        for ours, theirs in zip(found, whole[samples // 9 :], strict=True):
            shown = [sample for sample, pixels in theirs.items() if len(pixels)]
            assert shown
            assert all(torch.equal(ours[sample], theirs[sample]) for sample in shown)
    seen = {step[sample].numpy().tobytes() for step in whole for sample in step if sample == 1}
    assert len(seen) == 3, "in each epoch it looks otherwise"

"""Safety options of dpo: pairs are reordered and dropped, terms are added, and what does not fit is refused."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.batch import Batch
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import DataError, RecipeError, TaskError
from dstrain.tasks import Task, make_task
from dstrain.tasks.safety.options import SafetyOptions
from dstrain.tasks.safety.pair_loss import SafePairs, with_pair_weight
from dstrain.tasks.safety.safe_dpo import HARMLESS_COLUMNS, corrupt_image, order_dataset
from dstrain.training.build_model import build_model, build_reference
from dstrain.training.engine.module import TrainModule
from dstrain.training.precompute_outputs import OutputsJob, add_frozen_outputs
from tests.parity.cases import move
from tests.tiny import tiny_recipe
from tests.vision_recipes import named_recipe, picture
from tests.vocabulary import sigmoid, write_jsonl

pytestmark = pytest.mark.usefixtures("fresh_cache")


def made(folder: Path, name: str = "dpo, safe", safety: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return the task of a named recipe; `safety` replaces its safety options."""
    _, recipe = named_recipe(name, folder)
    block = recipe.get("options", {}) if safety is None else {"safety": safety}
    return make_task(RunConfig.model_validate(recipe | {"options": block | options}))


def with_references(task: Task) -> Any:
    job = OutputsJob(
        task=task, ds_config={"zero_optimization": {"stage": 0}}, micro_batch_size=3, world=SingleProcessWorld()
    )
    return add_frozen_outputs(job, [task.examples("train")])[0]


def look(task: Any, ids: list[int], batch: Batch | None = None) -> tuple[float, dict[str, tuple[float, float]]]:
    """(sum of the loss, name -> (sum, weight)) of a policy moved away from its reference."""
    batch = batch or make_batch(with_references(task), task.collate, ids, 0)
    module = TrainModule(task, build_model(task), build_reference(task)).eval()  # the batch has the scores already
    move(module.model)
    with torch.no_grad():
        total, metrics = module(batch)
    return float(total), {name: (float(value), float(weight)) for name, (value, weight) in metrics.items()}


def log_ratios(task: Any, ids: list[int]) -> list[tuple[float, float]]:
    """Log-ratios of the data's chosen and rejected answers, one pair at a time, by the metrics of plain dpo."""
    plain = replace(task, safety=SafetyOptions())
    found = []
    for index in ids:
        _, metrics = look(plain, [], make_batch(with_references(task), plain.collate, [index], 0))
        found.append((metrics["reward_chosen"][0] / task.beta, metrics["reward_rejected"][0] / task.beta))
    return found


# Training pairs of the recipe by index % 8: 0 is dropped, 1, 4 and 5 are swapped, 2 has a safe chosen and an unsafe
# rejected answer, 3, 6 and 7 have two safe ones. Dropped pairs are no samples, so sample ids are counted without them.


def test_pairs_of_two_unsafe_answers_are_no_samples_of_training(tmp_path: Path) -> None:
    train, test = (made(tmp_path).examples(split) for split in ("train", "eval"))
    assert (len(train), len(test)) == (56, 16)
    assert [train[index]["sample"] for index in range(8)] == [1, 2, 3, 4, 5, 6, 7, 9]
    assert train.sizes == (56,)
    assert (train.report["pairs_reordered"], train.report["pairs_dropped"]) == (24, 8)
    assert (test.report["pairs_reordered"], test.report["pairs_dropped"]) == (6, 2)
    assert train.report["skipped"] == 0, "they are no bad records"


def test_held_out_pairs_of_two_unsafe_answers_have_no_weight(tmp_path: Path) -> None:
    task = made(tmp_path)
    test = task.examples("eval")
    batch = task.collate([test[index] for index in (0, 1, 2, 8)])
    assert batch.weight == 2
    assert batch.samples == (0, 1, 2, 8)
    whole, metrics = look(task, [], batch)
    alone, others = look(task, [], task.collate([test[index] for index in (1, 2)]))
    assert whole == pytest.approx(alone, rel=1e-5)
    assert {name: value for name, (value, _) in metrics.items()} == pytest.approx(
        {name: value for name, (value, _) in others.items()}, rel=1e-4, abs=1e-5
    )


def test_the_loss_is_worked_out_by_hand(tmp_path: Path) -> None:
    """SafeDPO with MM-DPO's beta and mDPO's anchor; delta 2, w and the anchor's weight 0.5, k 0.5."""
    task, ids = made(tmp_path), [0, 1, 2, 3, 6]  # swapped, chosen safe, both safe, swapped, both safe
    margins = [0.0, 1.0, 1.5, 0.0, 1.0]  # (record % 5) / 2 of records 1, 2, 3, 4, 7; a margin against the order is 0
    wanted = 0.0
    for (chosen, rejected), index, margin in zip(log_ratios(task, ids), ids, margins, strict=True):
        swapped, one_safe = index in (0, 3), index in (0, 1, 3)
        preferred, other = (rejected, chosen) if swapped else (chosen, rejected)
        beta = 0.1 * (1 + 0.5 * (1 - math.exp(-0.5 * margin)))
        wanted -= math.log(sigmoid(beta * (preferred - other) - 2.0 * one_safe))
        wanted -= 0.5 * math.log(sigmoid(0.1 * preferred))
    assert look(task, ids)[0] == pytest.approx(wanted, rel=1e-5)


def test_margins_are_means_over_harmless_and_over_helpful_pairs(tmp_path: Path) -> None:
    task, ids = made(tmp_path), [0, 1, 2, 3, 6]
    ratios = log_ratios(task, ids)
    differences = [0.1 * (chosen - rejected) for chosen, rejected in ratios]
    _, metrics = look(task, ids)
    assert metrics["harmless_margin"] == (pytest.approx(-differences[0] + differences[1] - differences[3], rel=1e-4), 3)
    assert metrics["helpful_margin"] == (pytest.approx(differences[2] + differences[4], rel=1e-4), 2)
    assert metrics["margin"][0] == pytest.approx(metrics["harmless_margin"][0] + metrics["helpful_margin"][0], rel=1e-5)


def test_plain_dpo_logs_the_same_margins_and_keeps_its_loss(tmp_path: Path) -> None:
    safe, logged, plain = made(tmp_path), made(tmp_path, safety={}), made(tmp_path, "dpo")
    named_recipe("dpo, safe", tmp_path)  # the data with labels again
    ids = [1, 2, 3, 4, 7]  # nothing is dropped, so records and samples have one number
    assert len(logged.examples("train")) == 64
    loss, metrics = look(logged, ids)
    found, others = look(plain, ids)
    assert loss == found, "to the bit"
    assert {name: metrics[name] for name in others} == others
    _, of_safe = look(safe, [0, 1, 2, 3, 6])
    assert metrics["harmless_margin"] == pytest.approx(of_safe["harmless_margin"], rel=1e-5)
    assert metrics["helpful_margin"] == pytest.approx(of_safe["helpful_margin"], rel=1e-5)


def test_records_without_labels_count_in_neither_margin(tmp_path: Path) -> None:
    _, metrics = look(made(tmp_path, "dpo", safety={}), [1, 2])
    assert (metrics["harmless_margin"], metrics["helpful_margin"]) == ((0, 0), (0, 0))


def scored(batch: Batch, **columns: list[float]) -> Batch:
    return batch.with_tensors({name: torch.tensor(values) for name, values in columns.items()})


SCORES = {
    "harmless_chosen": [0.6, 0.0, 0.9, 0.4],
    "harmless_rejected": [0.7, 0.5, 0.1, 0.4],
    "helpful_chosen": [1.0, 9.0, 9.0, 9.0],
    "helpful_rejected": [2.0, 1.0, 1.0, 1.0],
}
"""With a threshold of 0.5: two safe answers, safe rejected, safe chosen, two unsafe ones."""


def test_scores_of_a_step_give_the_loss_of_the_pairs_that_are_kept(tmp_path: Path) -> None:
    task = replace(
        made(tmp_path, "dpo", safety={}),
        safety=SafetyOptions(method="safedpo", harmless_rm="rm", harmless_threshold=0.5),
    )
    examples = made(tmp_path, "dpo").examples("train")
    batch = scored(make_batch(examples, task.collate, [3, 9, 4, 7], 0), **SCORES)
    assert batch.weight == 4, "known before the scores"
    weighed = with_pair_weight(task.safety, batch)
    assert weighed.weight == 3
    first = {name: values[:3] for name, values in SCORES.items()}
    kept = scored(make_batch(examples, task.collate, [3, 9, 4], 0), **first)
    loss, _ = look(task, [], weighed)
    assert loss == pytest.approx(look(task, [], kept)[0], rel=1e-6)
    wanted = 0.0
    for (chosen, rejected), swapped, one_safe in zip(
        log_ratios(made(tmp_path, "dpo", safety={}), [3, 9, 4]), (True, True, False), (False, True, True), strict=True
    ):
        wanted -= math.log(sigmoid(0.1 * (rejected - chosen if swapped else chosen - rejected) - 10.0 * one_safe))
    assert loss == pytest.approx(wanted, rel=1e-5)


def test_scores_of_a_step_count_what_they_reorder_and_drop(tmp_path: Path) -> None:
    options = SafetyOptions(method="safedpo", harmless_rm="rm", scoring="online", harmless_threshold=0.5)
    task = made(tmp_path, "dpo")
    batch = scored(make_batch(task.examples("train"), task.collate, [3, 9, 4, 7], 0), **SCORES)
    metrics = SafePairs.from_batch(options, batch).metrics(torch.zeros(2, 4))
    assert {"reordered", "dropped"} <= set(options.metric_names) <= metrics.keys()
    assert (metrics["reordered"], metrics["dropped"]) == ((2, 4), (1, 4))


@pytest.mark.parametrize("name", SCORES)
def test_a_score_that_is_not_finite_gives_the_batch_no_finite_weight(name: str, tmp_path: Path) -> None:
    """The weight is summed over the ranks, so that all of them end the step with an error; a comparison would hide it."""
    task = replace(
        made(tmp_path, "dpo", safety={}),
        safety=SafetyOptions(method="safedpo", harmless_rm="rm", harmless_threshold=0.5),
    )
    faulty = SCORES | {name: [math.nan, *SCORES[name][1:]]}
    batch = scored(make_batch(made(tmp_path, "dpo").examples("train"), task.collate, [3, 9, 4, 7], 0), **faulty)
    assert math.isnan(with_pair_weight(task.safety, batch).weight)


def test_the_length_baseline_is_about_the_preferred_answers(tmp_path: Path) -> None:
    pair = {"prompt": "How?", "chosen": "So, and so.", "rejected": "No.", "margin": 0}
    labels = [(True, False), (False, True), (False, False), (False, True)]
    _, recipe = named_recipe("dpo, safe", tmp_path)
    write_jsonl(tmp_path / "eval.jsonl", [pair | {"chosen_safe": one, "rejected_safe": two} for one, two in labels])
    task = make_task(RunConfig.model_validate(recipe))
    assert task.checks.baselines(task.examples("eval")) == {"length_baseline": pytest.approx(1 / 3)}  # type: ignore[arg-type]


IMAGES = "dpo, safe, with images"


def test_corrupted_images_stand_in_rows_after_the_pairs(tmp_path: Path) -> None:
    task = made(tmp_path, IMAGES)
    examples = [task.examples("train")[index] for index in (0, 1, 2, 3)]  # records 1 to 4, with 1, 2, 0 and 1 images
    batch = task.collate(examples)
    padded = task.recipe.model_copy(update={"batch": task.recipe.batch.model_copy(update={"packing": False})})
    ids, plain = batch.tensors["input_ids"], replace(task, safety=SafetyOptions(), recipe=padded).collate(examples)
    assert (len(ids), batch.tensors["corrupted_pairs"].tolist()) == (8 + 3, [0, 1, 3])
    assert ids[:8].equal(plain.tensors["input_ids"])
    for row, (index, side) in enumerate([(0, 4), (1, 0), (3, 4)]):  # records 1 and 4 are swapped
        assert ids[8 + row].equal(ids[side + index]), "the preferred answer"
        assert batch.tensors["loss_mask"][8 + row].equal(batch.tensors["loss_mask"][side + index])
    pixels = batch.vision["pixel_values"]
    assert len(pixels) == 12
    assert pixels[:4].equal(pixels[4:8])
    assert all(not pixels[image].equal(pixels[8 + image]) for image in range(4))
    again = task.collate(list(reversed(examples))).vision["pixel_values"]
    assert again[8].equal(pixels[11]), "the same copy of an image in whatever batch"


def test_a_batch_without_images_has_no_more_rows(tmp_path: Path) -> None:
    task = made(tmp_path, IMAGES)
    batch = task.collate([task.examples("train")[index] for index in (2, 5)])  # records 3 and 6
    assert len(batch.tensors["input_ids"]) == 4 + batch.dummy_rows
    assert look(task, [2, 5])[1]["image_margin"] == (0, 0)


def test_the_term_on_images_is_worked_out_by_hand(tmp_path: Path) -> None:
    options = {"method": "safedpo", "delta": 0.0}
    ids = [0, 1, 2, 3]
    task = made(tmp_path, IMAGES, safety=options | {"image_weight": 0.7})
    with_term, metrics = look(task, ids)
    without, _ = look(made(tmp_path, IMAGES, safety=options), ids)
    wanted = 0.0
    margins = []
    for index in (0, 1, 3):  # those with images
        _, alone = look(task, [index])
        margins.append(alone["image_margin"][0])
        wanted -= 0.7 * math.log(sigmoid(margins[-1]))
    assert with_term - without == pytest.approx(wanted, rel=1e-4)
    # Differences of fp32 log-probabilities of about 1e2, rounded otherwise in another batch.
    assert metrics["image_margin"] == (pytest.approx(sum(margins), rel=1e-3), 3)
    assert min(map(abs, margins)) > 1e-5, "another image, another log-ratio"


def test_a_cached_reference_saw_the_same_corrupted_images(tmp_path: Path) -> None:
    ids = [0, 1, 2, 3, 20]
    online, cached = (look(made(tmp_path, IMAGES, **more), ids) for more in ({}, {"precompute_ref_log_probs": True}))
    assert cached[0] == pytest.approx(online[0], rel=1e-6)
    # A difference of sums of hundreds in fp32.
    assert cached[1]["image_margin"] == pytest.approx(online[1]["image_margin"], abs=1e-5)


def test_what_changes_the_corrupted_images_changes_the_key_of_cached_references(tmp_path: Path) -> None:
    keys = [
        made(tmp_path, IMAGES, safety={"image_weight": 1.0} | more).loss_inputs.reference.key
        for more in ({}, {"crop_max_area": 0.3}, {"method": "safedpo"})
    ]
    assert len({str(one) for one in keys}) == 3
    assert made(tmp_path, "dpo").loss_inputs.reference.key == {}
    assert made(tmp_path).loss_inputs.reference.key == {}, "labels reorder in the loss, not in the reference"


def test_a_text_only_model_has_no_term_on_images(tmp_path: Path) -> None:
    wanted = r"^options\.safety\.image_weight: compares images, and llama is a text-only model"
    with pytest.raises(RecipeError, match=wanted):
        made(tmp_path, safety={"image_weight": 1.0}).checks.run()


def test_data_without_an_image_have_no_term_on_images(tmp_path: Path) -> None:
    task = made(tmp_path, "dpo, text alone", safety={"image_weight": 1.0})
    with pytest.raises(DataError, match=r"data\.train: no record has an image, and options\.safety\.image_weight"):
        task.examples("train")


def test_data_of_unsafe_answers_alone_are_refused(tmp_path: Path) -> None:
    task = made(tmp_path)
    pair = {"prompt": "How?", "chosen_safe": 0, "rejected_safe": 0, "margin": 1}
    write_jsonl(tmp_path / "train.jsonl", [pair | {"chosen": f"So {n}.", "rejected": "No."} for n in range(4)])
    with pytest.raises(DataError, match="both answers of all 4 pairs are labelled unsafe"):
        task.examples("train")


def test_the_range_of_the_scores_is_said_where_no_answer_is_safe(tmp_path: Path) -> None:
    dataset = made(tmp_path, "dpo").examples("train")
    scores = {name: np.linspace(-3, place, len(dataset.store)) for place, name in enumerate(HARMLESS_COLUMNS)}
    options = SafetyOptions(method="safedpo", harmless_rm="rm", harmless_threshold=2)
    wanted = r"no answer of its \d+ pairs has a harmless score of at least 2, and all scores are from -3 to 1; lower"
    with pytest.raises(DataError, match=wanted):
        order_dataset(replace(dataset, output_columns=scores), options, "train")


@pytest.mark.parametrize(("split", "name"), [("train", "training"), ("eval", "held-out")])
def test_few_pairs_that_a_threshold_leaves_are_a_warning_with_the_quantiles(
    split: Literal["train", "eval"], name: str, tmp_path: Path
) -> None:
    dataset = made(tmp_path, "dpo").examples("train")
    count = len(dataset.store)
    scores = {column: np.linspace(-3, place, count) for place, column in enumerate(HARMLESS_COLUMNS)}
    ordered = order_dataset(
        replace(dataset, output_columns=scores),
        SafetyOptions(method="safedpo", harmless_rm="rm", harmless_threshold=0.9),
        split,
    )
    (warning,) = [value for key, value in ordered.counts.items() if key == "selection_warning"]
    assert re.match(rf"\d of {count} pairs of the {name} data are left, since the others have two unsafe", str(warning))
    assert "options.safety.harmless_threshold 0.9; quantiles of the scores: 5% -2.8" in str(warning)
    most = order_dataset(
        replace(dataset, output_columns=scores),
        SafetyOptions(method="safedpo", harmless_rm="rm", harmless_threshold=-2),
        split,
    )
    assert "selection_warning" not in most.counts


def test_a_source_of_unsafe_answers_alone_is_named(tmp_path: Path) -> None:
    _, recipe = named_recipe("dpo, safe", tmp_path)
    pair = {"prompt": "How?", "chosen_safe": 0, "rejected_safe": 0, "margin": 1}
    unsafe = write_jsonl(
        tmp_path / "unsafe.jsonl", [pair | {"chosen": f"So {n}.", "rejected": "No."} for n in range(4)]
    )
    recipe["data"]["train"] = [str(tmp_path / "train.jsonl"), str(unsafe)]
    task: Any = make_task(RunConfig.model_validate(recipe))
    wanted = (
        "data.train: both answers of all 4 pairs of source 2 are labelled unsafe; correct the labels, remove the source"
    )
    with pytest.raises(DataError, match=wanted):
        task.examples("train")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"safety": {"dleta": 1}},
            r"options\.safety\.dleta: is not an option of options\.safety; did you mean 'delta'",
        ),
        ({"safety": {"delta": "x"}}, r"options\.safety\.delta: is 'x', but input should be a valid number"),
        ({"safety": {"delta": True}}, r"options\.safety\.delta: is True, but input should be a number"),
        ({"safety": 3}, r"options\.safety: is 3, but input should be a block of options; write safety: \{"),
        ({"safety": {"method": "safe"}}, r"options\.safety\.method: is 'safe'"),
        ({"safety": {"delta": -1}}, r"options\.safety: delta is -1, but it must be at least 0"),
        ({"safety": {"crop_max_area": 0}}, "crop_max_area is 0"),
        ({"safety": {"delta": 5}}, "delta is 5, but it has no effect here; write method: safedpo, or leave it out"),
        ({"safety": {"method": "safedpo", "harmless_threshold": 1}}, "name a reward model in harmless_rm, or leave"),
        ({"safety": {"scaling_rate": 1}}, "scaling_rate is 1, .* set scaling_weight above 0"),
        ({"safety": {"crop_max_area": 0.3}}, r"crop_max_area is 0\.3, .* set image_weight above 0"),
        ({"safety": {"anchor_delta": 1}}, "anchor_delta is 1, .* set anchor_weight above 0"),
        ({"safety": {"image_weight": 1, "scoring": "online"}}, "write scoring: cached"),
        ({"safety": {"method": "safedpo"}, "rpo_alpha": 1.0}, "leave out rpo_alpha"),
        ({"safety": {"anchor_weight": 1.0}, "loss_type": "ipo"}, "leave out loss_type"),
        ({"safety": {"method": "safedpo"}, "loss_type": "orpo"}, "leave out loss_type"),
        ({"safety": {"method": "safedpo"}, "loss_type": "simpo", "rpo_alpha": 1}, "loss_type and rpo_alpha"),
        ({"safety": {"scaling_weight": 1.0}, "label_smoothing": 0.1}, "leave out label_smoothing"),
        (
            {
                "safety": {"method": "safedpo", "harmless_rm": "rm", "image_weight": 1},
                "precompute_ref_log_probs": True,
            },
            "precompute_ref_log_probs does not know",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=words):
        make_task(RunConfig.model_validate(tiny_recipe("dpo", tmp_path) | {"options": options}))


def test_all_faults_of_a_block_are_reported_at_once(tmp_path: Path) -> None:
    options = {"bta": 1, "safety": {"dleta": 1, "method": "x"}}
    with pytest.raises(TaskError) as error:
        make_task(RunConfig.model_validate(tiny_recipe("dpo", tmp_path) | {"options": options}))
    assert all(name in str(error.value) for name in ("options.bta", "options.safety.dleta", "options.safety.method"))


@pytest.mark.parametrize("loss_type", ["ipo", "orpo", "simpo"])
def test_metrics_alone_go_with_every_loss(loss_type: str, tmp_path: Path) -> None:
    _, metrics = look(made(tmp_path, safety={}, loss_type=loss_type), [1, 2, 3])
    assert metrics["harmless_margin"][1] == 2


def test_best_may_be_the_harmless_margin_where_it_is_logged(tmp_path: Path) -> None:
    recipe = tiny_recipe("dpo", tmp_path) | {"eval": {"metric": "harmless_margin", "best": "max"}}
    make_task(RunConfig.model_validate(recipe | {"options": {"safety": {}}}))
    with pytest.raises(TaskError, match="'harmless_margin' is not a metric of task dpo"):
        make_task(RunConfig.model_validate(recipe))


def test_a_scaled_beta_needs_margins(tmp_path: Path) -> None:
    task = made(tmp_path, "dpo", safety={"scaling_weight": 0.5})
    with pytest.raises(DataError, match=r"no 'margin', which options\.safety\.scaling_weight needs"):
        task.examples("train")


def test_records_without_labels_are_bad_records_of_safedpo(tmp_path: Path) -> None:
    wanted = r"no 'chosen_safe'; write true or false, rename a column with data\.columns, or leave out options\.safety\.method"
    with pytest.raises(DataError, match=wanted):
        made(tmp_path, "dpo", safety={"method": "safedpo"}).examples("train")
    with pytest.raises(DataError, match=r"no 'chosen_safe'"):
        made(tmp_path, "dpo", safety={"method": "safedpo", "harmless_rm": ""}).examples("train")


# A corrupted image is a random part of the image, in its size, fixed by seed, sample and number.


@pytest.mark.parametrize("size", [(60, 40), (7, 300), (1, 1), (640, 480)])
def test_a_corrupted_image_keeps_its_size(size: tuple[int, int]) -> None:
    assert corrupt_image(picture(0, size), (0, 3, 0), 0.2).size == size


def test_the_key_fixes_the_corrupted_image() -> None:
    image = picture(1)
    pixels = [
        np.asarray(corrupt_image(image, key, 0.2)) for key in ((0, 3, 0), (0, 3, 0), (1, 3, 0), (0, 4, 0), (0, 3, 1))
    ]
    assert (pixels[0] == pixels[1]).all()
    assert all((pixels[0] != other).any() for other in pixels[2:])


def test_a_corrupted_image_shows_at_most_the_allowed_share() -> None:
    """The red channel counts columns, the green one rows: their ranges are the sides of the crop."""
    columns, rows = np.meshgrid(np.arange(200), np.arange(200))
    image = Image.fromarray(np.stack([columns, rows, columns], -1).astype(np.uint8))
    shares = []
    for sample in range(200):
        pixels = np.asarray(corrupt_image(image, (0, sample, 0), 0.2)).astype(int)
        sides = [np.ptp(pixels[..., channel]) + 1 for channel in (0, 1)]
        shares.append(sides[0] * sides[1] / 200**2)
    assert max(shares) <= 0.2 * 1.05, "rounded to pixels"
    assert min(shares) >= 0.01 * 0.8
    assert np.mean(shares) == pytest.approx(0.105, abs=0.01), "uniform between 0.01 and 0.2"


def test_the_crop_of_a_corrupted_image_lies_anywhere() -> None:
    columns, _ = np.meshgrid(np.arange(200), np.arange(200))
    image = Image.fromarray(np.stack([columns] * 3, -1).astype(np.uint8))
    shown = {
        column for sample in range(100) for column in np.unique(np.asarray(corrupt_image(image, (0, sample, 0), 0.2)))
    }
    assert min(shown) < 5
    assert max(shown) > 194


@pytest.mark.parametrize("base", ["dstrain.tasks.dpo.DPO", "dstrain.tasks.safety.safe_dpo.SafeDPO"])
def test_a_task_of_a_user_with_safety_derives_from_safe_dpo(base: str, tmp_path: Path) -> None:
    module, _, name = base.rpartition(".")
    lines = [f"import {module} as parent", "from dataclasses import dataclass", "@dataclass(frozen=True, kw_only=True)"]
    file = tmp_path / "own.py"
    file.write_text("\n".join([*lines, f"class Own(parent.{name}):", "    pass", ""]))
    config = RunConfig.model_validate({"task": str(file), "options": {"safety": {"method": "safedpo"}}})
    if name == "SafeDPO":
        assert type(make_task(config)).__name__ == "Own"
    else:
        with pytest.raises(TaskError, match=r"options\.safety: is set, but Own derives .*; derive it from .*SafeDPO"):
            make_task(config)
    plain = make_task(config.model_copy(update={"options": {}}))
    assert type(plain).__name__ == "Own"

"""Learning from single answers: the loss as its paper has it, and a reference point that belongs to a whole step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dstrain.batch import Batch
from dstrain.config.schema import OptimConfig, RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import TaskError
from dstrain.models.params import build_param_groups
from dstrain.tasks import Task, make_task
from dstrain.tasks.kto import KTO, kto
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.module import TrainModule, compute_step_stats, with_step_stats
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.evaluate import Evaluation
from dstrain.training.precompute_outputs import OutputsJob, add_frozen_outputs
from tests.parity.cases import move
from tests.tiny import tiny_recipe
from tests.vocabulary import sigmoid

pytestmark = pytest.mark.usefixtures("fresh_cache")


RATIO = torch.tensor([2.0, -1.0, 0.5, -3.0], dtype=torch.float64)
DESIRABLE = torch.tensor([True, True, False, False])


def test_the_loss_is_ktos() -> None:
    """By hand, with beta 0.5 and z0 0.3: 1 - s(0.85), 1 - s(-0.65), 1 - s(-0.1), 1 - s(1.65)."""
    found = kto(RATIO, DESIRABLE, torch.tensor(0.3, dtype=torch.float64), 0.5)
    assert found.tolist() == pytest.approx([0.2994328, 0.6570105, 0.5249792, 0.1611089], abs=1e-7)
    wanted = [1 - sigmoid(0.5 * (r - 0.3)) for r in (2.0, -1.0)] + [1 - sigmoid(0.5 * (0.3 - r)) for r in (0.5, -3.0)]
    assert found.tolist() == pytest.approx(wanted)


def test_with_an_anchor_of_0_it_is_apo_zero() -> None:
    wanted = [1 - sigmoid(0.5 * r) for r in (2.0, -1.0)] + [sigmoid(0.5 * r) for r in (0.5, -3.0)]
    assert kto(RATIO, DESIRABLE, 0.0, 0.5).tolist() == pytest.approx(wanted)


SEED = 6
"""With it the moved policies below make answers to other prompts likelier, so that z0 is above 0."""


def made(folder: Path, options: dict[str, Any] | None = None, **model: Any) -> Task:
    recipe = tiny_recipe("kto", folder) | {"options": options or {}, "seed": SEED}
    recipe["model"] = recipe["model"] | model
    return make_task(RunConfig.model_validate(recipe))


def test_labels_of_one_kind_and_few_held_out_samples_are_warnings(tmp_path: Path) -> None:
    both = made(tmp_path)
    train: Any = both.examples("train")
    assert both.checks.data_warnings(train, None) == []
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    (tmp_path / "train.jsonl").write_text("\n".join(line for line in lines if '"label": true' in line))
    task = make_task(both.recipe)
    warnings = task.checks.data_warnings(task.examples("train"), None)
    assert len(warnings) == 1
    assert "samples of the training data have the same label" in warnings[0]
    held_out: Any = both.examples("eval")
    first = held_out.select(np.arange(len(held_out)) < 1)
    (warning,) = both.checks.data_warnings(train, first)
    assert warning.startswith("the held-out data have 1 sample: metrics of so few say little")


def read(task: Task, ids: list[int]) -> Batch:
    asking = OutputsJob(
        task=task, ds_config={"zero_optimization": {"stage": 0}}, micro_batch_size=3, world=SingleProcessWorld()
    )
    examples = add_frozen_outputs(asking, [task.examples("train")])[0]
    assert examples is not None
    return make_batch(examples, task.collate, ids, 0)


def take(objective: TrainModule, *batches: Batch) -> tuple[float, dict[str, float]]:
    """(loss, metrics) per answer of a step over these batches."""
    sums: dict[str, list[float]] = {}
    with torch.no_grad():
        for batch in with_step_stats(objective, objective.loss_inputs, batches, SingleProcessWorld()):
            total, metrics = objective(batch)
            for name, (value, weight) in [("loss", (total, batch.weight)), *metrics.items()]:
                sums.setdefault(name, []).append(torch.tensor([float(value), float(weight)]))  # type: ignore[arg-type]
    means = {name: float(sum(pairs)[0] / sum(pairs)[1]) for name, pairs in sums.items()}  # type: ignore[index]
    return means.pop("loss"), means


KINDS: dict[str, dict[str, Any]] = {
    "model": {},
    "cached": {"options": {"precompute_ref_log_probs": True}},
    "adapter": {"lora": {"rank": 4}},
    "adapters, cached": {"options": {"precompute_ref_log_probs": True}, "lora": {"rank": 4}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_half_of_each_weight(kind: str, tmp_path: Path) -> None:
    """Where policy and reference are one, r and z0 are 0."""
    more = {**KINDS[kind], "options": {**KINDS[kind].get("options", {}), "undesirable_weight": 3.0}}
    task = made(tmp_path, **more)
    assert task.reference.kind == kind.split()[-1]
    batch = read(task, [3, 9, 4, 60, 31])
    wanted = batch.tensors["desirable"]
    assert 0 < wanted.sum() < 5
    loss, metrics = take(build_train_module(task), batch)
    assert loss == pytest.approx(torch.where(wanted, 0.5, 1.5).mean().item(), abs=1e-6)
    assert metrics["kl"] == pytest.approx(0, abs=1e-5)


def moved(task: Task) -> TrainModule:
    """A policy that is no longer its reference."""
    objective = build_train_module(task)
    move(objective.model)
    return objective


def likely(model: torch.nn.Module, ids: Any, loss_mask: Any) -> float:
    """log p of the learnt tokens of one sequence, without padding and without ours."""
    row = torch.tensor([list(map(int, ids))])
    table = model(input_ids=row).logits[0, :-1].double().log_softmax(-1)
    each = table.gather(-1, row[0, 1:, None]).squeeze(-1)
    return float(each[torch.tensor(list(map(int, loss_mask)))[1:] == 1].sum())


def test_a_step_is_what_the_paper_says(tmp_path: Path) -> None:
    """Every number anew from the models: rewards, the mean over mismatched answers, losses and metrics."""
    task = made(tmp_path, {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7})
    objective, ids = moved(task), [3, 9, 4, 60, 31, 8]
    examples: Any = task.examples("train")
    assert objective.reference_model is not None
    with torch.no_grad():
        policy, reference = objective.model.eval(), objective.reference_model.model
        logps = [likely(policy, examples[i]["answer"], examples[i]["answer_loss_mask"]) for i in ids]
        ratio = [
            logp - likely(reference, examples[i]["answer"], examples[i]["answer_loss_mask"])
            for logp, i in zip(logps, ids, strict=True)
        ]
        crossed = [
            likely(policy, examples[i]["mismatched"], examples[i]["mismatched_loss_mask"])
            - likely(reference, examples[i]["mismatched"], examples[i]["mismatched_loss_mask"])
            for i in ids
        ]
    z0 = sum(crossed) / 6
    assert z0 > 0.1, "else the reference point is not tried"
    good = [bool(examples[i]["desirable"]) for i in ids]
    losses = [
        1.5 * (1 - sigmoid(0.3 * (r - z0))) if wanted else 0.7 * (1 - sigmoid(0.3 * (z0 - r)))
        for r, wanted in zip(ratio, good, strict=True)
    ]
    found, metrics = take(objective, read(task, ids))
    assert found == pytest.approx(sum(losses) / 6, rel=1e-5)
    assert metrics["kl"] == pytest.approx(z0, abs=1e-4)
    sides = {"chosen": [at for at in range(6) if good[at]], "rejected": [at for at in range(6) if not good[at]]}
    for side, places in sides.items():
        assert metrics[f"reward_{side}"] == pytest.approx(sum(0.3 * ratio[at] for at in places) / len(places), abs=1e-4)
        assert metrics[f"logp_{side}"] == pytest.approx(sum(logps[at] for at in places) / len(places), rel=1e-5)
    right = [(r > z0) if wanted else (r < z0) for r, wanted in zip(ratio, good, strict=True)]
    assert metrics["accuracy"] == pytest.approx(sum(right) / 6)


def test_a_divergence_below_0_counts_as_0(tmp_path: Path) -> None:
    task = made(tmp_path)
    objective, batch = moved(task), read(task, [3, 9, 4])
    batch = batch.with_tensors(compute_step_stats(objective, [batch], SingleProcessWorld())[0])
    with torch.no_grad():
        losses = [float(objective(batch.with_tensors({"kl": torch.tensor(z0)}))[0]) for z0 in (-5.0, 0.0, 2.0)]
    assert losses[0] == losses[1] != losses[2]


def test_nothing_is_learnt_through_the_reference_point(tmp_path: Path) -> None:
    objective = moved(made(tmp_path))
    for told in compute_step_stats(objective, [read(objective.task, [3, 9])], SingleProcessWorld()):
        assert not any(value.requires_grad for value in told.values())


def test_the_reference_point_is_the_whole_steps(tmp_path: Path) -> None:
    task = made(tmp_path)
    objective = moved(task)
    together = take(objective, read(task, [3, 9, 4, 60, 31]))
    assert together[1]["kl"] > 0.1
    parts = [read(task, [3]), read(task, [9, 4, 60]), read(task, [31]), read(task, [7]).as_filler()]
    assert take(objective, *parts)[0] == pytest.approx(together[0], rel=1e-6)
    kls = {float(told["kl"]) for told in compute_step_stats(objective, parts, SingleProcessWorld())}
    assert len(kls) == 1
    alone = {
        round(float(compute_step_stats(objective, [part], SingleProcessWorld())[0]["kl"]), 4) for part in parts[:3]
    }
    assert len(alone) == 3, "else this test says nothing"


def test_an_evaluation_does_not_depend_on_how_it_is_cut(tmp_path: Path) -> None:
    task = made(tmp_path)
    objective = moved(task)
    groups = build_param_groups(objective.model, OptimConfig(name="sgd"))
    engine = TorchEngine(objective, groups, OptimConfig(name="sgd"), torch.device("cpu"))
    examples: Any = task.examples("eval")
    rows = [Evaluation(task, examples, micro).run(engine) for micro in (1, 3, 16)]
    assert rows[0]["kl"] > 0.1
    for row in rows[1:]:
        assert row["loss"] == pytest.approx(rows[0]["loss"], rel=1e-6)
        assert row["kl"] == pytest.approx(rows[0]["kl"], rel=1e-4)


def test_the_reference_is_asked_once_in_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    refer = KTO.reference_outputs
    monkeypatch.setattr(
        KTO, "reference_outputs", lambda self, model, batch: asked.extend(batch.samples) or refer(self, model, batch)
    )
    task = made(tmp_path)
    take(build_train_module(task), read(task, [3, 9]), read(task, [4]))
    assert asked == [3, 9, 4]


def test_a_task_without_a_survey_pays_nothing(tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(tiny_recipe("rm", tmp_path)))
    batches = [make_batch(task.examples("train"), task.collate, [1, 2], 0)]  # type: ignore[arg-type]
    assert with_step_stats(torch.nn.Identity(), task.loss_inputs, batches, SingleProcessWorld()) is batches


def test_apo_zero_has_no_divergence(tmp_path: Path) -> None:
    task = made(tmp_path, {"loss_type": "apo_zero_unpaired"})
    batch = read(task, [3, 9, 4, 60])
    assert not any("mismatched" in name for name in batch.tensors)
    objective = moved(task)
    loss, metrics = take(objective, batch)
    with_kl = made(tmp_path)
    other = TrainModule(with_kl, objective.model, objective.reference_model.model)  # type: ignore[union-attr]
    told = {
        **compute_step_stats(other, [read(with_kl, [3, 9, 4, 60])], SingleProcessWorld())[0],
        "kl": torch.tensor(0.0),
    }
    with torch.no_grad():
        assert float(other(read(with_kl, [3, 9, 4, 60]).with_tensors(told))[0]) / 4 == pytest.approx(loss, rel=1e-6)
    assert "kl" not in metrics


def test_answers_kept_are_those_asked_online(tmp_path: Path) -> None:
    other = make_task(RunConfig.model_validate(tiny_recipe("kto", tmp_path) | {"seed": 7}))
    other.build_model().save_pretrained(tmp_path / "other")
    other.export.save_extras(tmp_path / "other")
    ref, ids = {"ref_model": str(tmp_path / "other")}, [5, 17, 60, 2]
    online, kept = made(tmp_path, ref), made(tmp_path, ref | {"precompute_ref_log_probs": True})
    found = [take(build_train_module(task), read(task, ids)) for task in (online, kept)]
    assert found[0][0] != pytest.approx(0.5, abs=1e-4), "another reference"
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-6)
    assert found[1][1] == pytest.approx(found[0][1], abs=1e-4)


def test_answers_of_one_side_alone_are_learnt_too(tmp_path: Path) -> None:
    task = made(tmp_path)
    examples: Any = task.examples("train")
    wanted = [at for at in range(20) if examples[at]["desirable"]][:4]
    _, metrics = take(moved(task), read(task, wanted))
    assert math.isfinite(metrics["reward_chosen"])
    assert math.isnan(metrics["reward_rejected"]), "0 of weight 0, which the meter leaves out"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0.0}, "beta is 0"),
        ({"desirable_weight": -1.0}, "desirable_weight is -1"),
        ({"desirable_weight": 0.0, "undesirable_weight": 0.0}, "both 0"),
        ({"loss_type": "bco"}, "loss_type"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=words):
        made(tmp_path, options)


def test_best_cannot_go_by_a_divergence_that_is_not_there(tmp_path: Path) -> None:
    recipe = tiny_recipe("kto", tmp_path) | {"eval": {"metric": "kl"}}
    made_so = make_task(RunConfig.model_validate(recipe))
    with pytest.raises(ValueError, match="has no metric kl"):
        replace(made_so, loss_type="apo_zero_unpaired")  # type: ignore[call-arg]

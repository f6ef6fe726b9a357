"""Every task is tested by existing: the packaged ones, and one in a file of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dstrain.batch import Batch
from dstrain.config import read_recipe
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.world import SingleProcessWorld
from dstrain.tasks import Task, builtin_tasks, make_task, task_options
from dstrain.tasks.common.text import TextTask
from dstrain.training.build_model import build_model, build_reference
from dstrain.training.engine.module import TrainModule, with_step_stats
from tests.tiny import tiny_recipe

TINY = str(Path(__file__).with_name("tiny.py"))


@pytest.fixture(params=[*builtin_tasks(), TINY], ids=[*builtin_tasks(), "a file"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    recipe = {"task": TINY} if request.param == TINY else tiny_recipe(request.param, tmp_path)
    made = make_task(RunConfig.model_validate(recipe))
    made.checks.run()
    return made


def objective_around(task: Task, model: torch.nn.Module) -> TrainModule:
    return TrainModule(task, model, build_reference(task))


def learn(objective: TrainModule, batch: Batch) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
    """What one forward pass sums up, after a survey of its batch where the task asks for one."""
    (ready,) = with_step_stats(objective, objective.loss_inputs, [batch], SingleProcessWorld())
    return objective(ready)


def sums(
    task: Task, model: torch.nn.Module, ids: list[int], filler: bool = False
) -> tuple[float, dict[str, tuple[float, float]], float]:
    examples = task.examples("train")
    assert examples
    batch = make_batch(examples, task.collate, [] if filler else ids, ids[0])
    with torch.no_grad():
        total, metrics = learn(objective_around(task, model), batch)
    return (
        float(total),
        {name: (float(value), float(weight)) for name, (value, weight) in metrics.items()},
        batch.weight,
    )


def check_names(task: Task, metrics: Mapping[str, tuple[float, float]]) -> None:
    """Check that the loss gives the metrics that the task names, or sums of which they are made, apart from generated answers."""
    generated = task.prompts.metrics if isinstance(task, TextTask) else None
    reported = {name for name in metrics if not name.startswith("_")}
    made = task.finish_metrics(dict.fromkeys(metrics, (1.0, 1.0)))
    assert reported | made.keys() == {*task.metric_names} - {*(generated.names if generated else ())}


def test_every_option_says_what_it_does(task: Task) -> None:
    for option in task_options(type(task)):
        assert option.help.endswith("."), option.name


def test_a_loss_is_a_sum_over_its_samples(task: Task) -> None:
    model = task.build_model().eval()
    ids = [3, 0, 11, 7, 20]
    together = sums(task, model, ids)
    alone = [sums(task, model, [index]) for index in ids]
    assert together[0] == pytest.approx(sum(total for total, _, _ in alone), rel=1e-5)
    assert together[2] == sum(weight for _, _, weight in alone)
    for name, (value, weight) in together[1].items():
        assert value == pytest.approx(sum(metrics[name][0] for _, metrics, _ in alone), rel=1e-5, abs=1e-6)
        assert weight == pytest.approx(sum(metrics[name][1] for _, metrics, _ in alone))
    check_names(task, together[1])


def test_a_tiny_recipe_reads_clean(tmp_path: Path) -> None:
    for name in builtin_tasks():
        recipe = tiny_recipe(name, tmp_path)
        (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(recipe))
        assert read_recipe(tmp_path / "tiny.yaml").config == RunConfig.model_validate(recipe)


def test_a_share_is_no_more_than_its_weight(task: Task) -> None:
    _, metrics, weight = sums(task, task.build_model().eval(), list(range(12)))
    assert weight > 0
    for name, (value, of) in metrics.items():
        if name.startswith("_"):  # a state of `finish_metrics`
            continue
        assert 0 < of <= weight, name
        if "accuracy" in name or "match" in name:
            assert 0 <= value <= of, name


def test_a_filler_adds_nothing(task: Task) -> None:
    total, metrics, weight = sums(task, task.build_model().eval(), [4], filler=True)
    assert total == weight == 0
    check_names(task, metrics)
    assert all(pair == (0, 0) for pair in metrics.values())


def test_a_model_is_built_the_same_twice(task: Task) -> None:
    first, second = (dict(task.build_model().state_dict()) for _ in range(2))
    assert first.keys() == second.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def test_every_trained_parameter_gets_a_gradient(task: Task) -> None:
    model = build_model(task)
    examples: Any = task.examples("train")
    learn(objective_around(task, model), make_batch(examples, task.collate, list(range(16)), 0))[0].backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)

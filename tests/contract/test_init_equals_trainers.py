"""A converted recipe trains what the trainer's own code trains: the same tokens, labels, steps and rates, as recorded.

tests/contract/trainers has the recordings; its record_*.py make them anew, with the trainer installed. Where the numbers
differ by design, `dstrain init --from` says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.commands.init_from import convert_file
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config import RunConfig, resolve_batch, resolve_steps
from dstrain.schedule import compute_lr, warmup_steps
from dstrain.tasks import make_task
from tests.contract.trainers.inputs import CASES, HERE, write_inputs

FILES = {"TRL": "trl", "LLaMA-Factory": "llama_factory", "axolotl": "axolotl"}
RECORDED = {
    trainer: json.loads((HERE / f"{name}.json").read_text())
    for trainer, name in FILES.items()
    if (HERE / f"{name}.json").is_file()
}
NAMES = [name for name, case in CASES.items() if name in RECORDED.get(case["trainer"], {})]


class Converted:
    """A case as a recipe, and what the trainer gave for it."""

    def __init__(self, name: str, folder: Path) -> None:
        write_inputs(name, folder)
        self.case = CASES[name]
        made = convert_file(folder / "theirs.yaml", self.case["task"])
        self.differences = "\n".join(made.differences)
        (folder / "recipe.yaml").write_text(made.text)
        self.theirs: dict[str, Any] = RECORDED[self.case["trainer"]][name]
        self.config: RunConfig = resolve_recipe(TrainRequest(recipe=str(folder / "recipe.yaml"))).config
        self.count = self.case["data"][1]

    @property
    def has_line_break(self) -> bool:
        return "the line break that a template writes after the end of a turn is learnt there" in self.differences


@pytest.fixture
def converted(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Converted:
    monkeypatch.chdir(tmp_path)
    return Converted(request.param, tmp_path)


def split(example: Any, task: Any) -> list[tuple[list[int], list[int]]]:
    """Return ids and mask of each sequence of an example."""
    rows = []
    for name in (name for name in task.token_columns if name in example):
        ids = [int(token) for token in example[name]]
        if "loss_mask" in example:
            mask = [int(one) for one in example["loss_mask"]]
        else:
            start = int(
                example[f"{name}_prompt_length"] if f"{name}_prompt_length" in example else example["prompt_length"]
            )
            mask = [int(at >= start) for at in range(len(ids))]
        rows.append((ids, mask))
    return rows


@pytest.mark.parametrize("converted", NAMES, indirect=True)
def test_the_tokens_and_labels_are_those_of_the_trainer(converted: Converted) -> None:
    task: Any = make_task(converted.config)
    examples = task.examples("train")
    newline = task.tokenizer.encode("\n", add_special_tokens=False)
    end = task.tokenizer.eos_token_id
    for index, expected in enumerate(converted.theirs["rows"]):
        rows = split(examples[index], task)
        assert len(rows) == len(expected)
        for (ids, mask), (their_ids, their_mask) in zip(rows, expected, strict=True):
            labels = [0, *their_mask[1:]]  # nothing predicts the first token
            if converted.has_line_break:
                after_end = [at for at in range(1, len(their_ids)) if their_ids[at - 1 : at + 1] == [end, *newline]]
                labels = [0 if at in after_end else one for at, one in enumerate(labels)]
            last = len(labels) - labels[::-1].index(1)
            assert ids == their_ids[:last], (task.tokenizer.decode(ids), task.tokenizer.decode(their_ids))
            assert mask == labels[:last]


@pytest.mark.parametrize("converted", NAMES, indirect=True)
def test_the_steps_and_rates_are_those_of_the_trainer(converted: Converted) -> None:
    config, rates = converted.config, converted.theirs["rates"]
    batch = resolve_batch(config.batch, 1)
    steps, _ = resolve_steps(config, converted.count, batch.total)
    assert converted.theirs["steps"] == len(rates)
    per_epoch = -(-converted.count // batch.total)
    if config.epochs is not None and converted.count % batch.total:
        assert "the last step of an epoch has the records that are left" in converted.differences
        assert (steps, len(rates)) == (
            -(-int(config.epochs * converted.count) // batch.total),
            per_epoch * config.epochs,
        )
        steps = len(rates)
    assert steps == len(rates)
    optim = config.optim
    ours = [
        compute_lr(step, schedule=optim.schedule, steps=steps, warmup=optim.warmup, peak=float(optim.lr or 0))
        for step in range(steps)
    ]
    rising = warmup_steps(steps, optim.warmup)
    if rising:
        assert "its first step has a rate of peak / steps of the warmup, and 0 there" in converted.differences
    assert ours[:rising] == pytest.approx(rates[1 : rising + 1])
    assert ours[rising:] == pytest.approx(rates[rising:])
    assert yaml.safe_load(converted.case["config"])["learning_rate"] == pytest.approx(max(ours), rel=0.2)


@pytest.mark.parametrize("trainer", FILES)
def test_three_configurations_of_each_trainer_are_recorded(trainer: str) -> None:
    assert len([name for name in NAMES if CASES[name]["trainer"] == trainer]) == 3
    assert RECORDED[trainer]["versions"]

"""Task files written for the version before keep working, and a notice names each new member."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dstrain.batch import Batch
from dstrain.config.schema import RunConfig
from dstrain.errors import TaskError, UsageError
from dstrain.tasks import Task, find_task, make_task

PLAIN = """
from dataclasses import dataclass
import torch
from dstrain.batch import Batch
from dstrain.errors import UsageError
from dstrain.tasks.base import Loss, Task

@dataclass(frozen=True, kw_only=True)
class Old(Task):
    heads = ("score",)

    def examples(self, split): return [1, 2]
    def collate(self, examples): return Batch(tensors={}, weight=1.0, samples=())
    def build_model(self): return torch.nn.Linear(1, 1)
    def loss(self, model, batch): return Loss(torch.tensor(3.0))

    @property
    def reference(self): return "model"
    @property
    def surveys(self): return True
    def build_reference(self): return torch.nn.Linear(2, 2)
    def refer(self, model, batch): return {"ref": torch.ones(1)}
    def survey(self, model, batch): return {"mean": torch.ones(1)}
    def check_named(self): raise UsageError("no data.train")
    def check(self): raise UsageError("no model")
    def notices(self): return ["a notice"]
    def warnings(self): return ["a warning"]
    def convert(self, record): return record["text"]
    def save_extras(self, folder): (folder / "extra").write_text("x")
    def outputs(self, model, batch): return super().outputs(model, batch) + 1
"""
DERIVED = """
from dataclasses import dataclass
from dstrain.tasks.dpo import PreferenceOptimization

@dataclass(frozen=True, kw_only=True)
class Own(PreferenceOptimization):
    def texts(self, record):
        return [text.upper() for text in super().texts(record)]

    def refer(self, model, batch):
        return {name: -column for name, column in super().refer(model, batch).items()}

    def warnings(self):
        return [*super().warnings(), "its own"]
"""

OWN_TOKENIZER = """
from dataclasses import dataclass
from functools import cached_property
from dstrain.tasks.sft import SFT

@dataclass(frozen=True, kw_only=True)
class Own(SFT):
    @cached_property
    def tokenizer(self):
        made = super().tokenizer
        made.padding_side = "left"
        return made
"""

SCORED = """
from dataclasses import dataclass
import torch
from dstrain.tasks.base import Loss
from dstrain.tasks.pairs import PairTask
from dstrain.tasks.policy import PolicyTask

@dataclass(frozen=True, kw_only=True)
class Own(PairTask, PolicyTask):
    def refer(self, model, batch): return {"ref": torch.ones(1)}
    def more(self, examples): return {"more": torch.ones(len(examples))}
    def loss(self, model, batch): return Loss(torch.tensor(3.0))
"""


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Task]:
    def make(text: str, **recipe: object) -> Task:
        (tmp_path / "task.py").write_text(text)
        return make_task(RunConfig.model_validate({**recipe, "task": str(tmp_path / "task.py")}))

    return make


def test_old_members_of_a_task_take_the_place_of_the_new_ones(
    load: Callable[..., Task], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task, model = load(PLAIN), torch.nn.Linear(1, 1)
    batch = Batch(tensors={}, weight=1.0, samples=())
    reference, step_stats = task.loss_inputs.reference, task.loss_inputs.step_stats
    assert (reference.kind, reference.config) == ("model", task.recipe.model)
    assert reference.build().in_features == 2
    assert reference.outputs(model, batch)["ref"].tolist() == [1.0]
    assert step_stats is not None
    assert step_stats(model, batch)["mean"].tolist() == [1.0]  # type: ignore[union-attr]
    with pytest.raises(UsageError, match=r"no data\.train"):
        task.checks.required_keys()
    with pytest.raises(UsageError, match="no model"):
        task.checks.run()
    assert (task.checks.info_messages(), task.checks.warnings()) == (["a notice"], ["a warning"])
    assert task.checks.parse_record is not None
    assert task.checks.parse_record({"text": "so"}) == "so"
    assert task.checks.baselines([]) == {}, "what it does not give stays"
    assert task.export.modules_to_save == ("score",)
    assert task.export.outputs(model, batch).item() == 4.0, "super() reaches dstrain's own"
    task.export.save_extras(tmp_path)
    assert (tmp_path / "extra").is_file()
    told = capsys.readouterr().err
    for old, new in (("refer", "loss_inputs"), ("check", "checks.run"), ("heads", "export.modules_to_save")):
        assert f"Old: `{old}` is now `{new}`" in told


def test_a_task_derived_from_ours_may_override_by_old_names(
    load: Callable[..., Task], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = find_task("dpo").tiny(tmp_path)  # type: ignore[attr-defined]
    task = load(DERIVED, **recipe)
    record = {"prompt": "a ", "chosen": "b", "rejected": "c"}
    assert [*task.iter_texts(record)] == ["A ", "B", "C"]  # type: ignore[attr-defined]
    assert task.loss_inputs.reference.outputs.__name__ == "refer"
    task.checks.run()
    assert task.checks.warnings() == ["its own"]
    assert "`texts` is now `iter_texts`" in capsys.readouterr().err


def test_a_method_of_an_old_name_is_one_that_was_abstract(load: Callable[..., Task], tmp_path: Path) -> None:
    task = load(SCORED, **find_task("dpo").tiny(tmp_path))  # type: ignore[attr-defined]
    batch = Batch(tensors={}, weight=1.0, samples=())
    assert set(task.loss_inputs.reference.outputs(torch.nn.Linear(1, 1), batch)) == {"ref"}
    assert "more" in task.extra_tensors([])  # type: ignore[attr-defined]


@pytest.mark.parametrize("member", ["auto = 'AutoModel'", "def load(self, model): return None"])
def test_an_old_member_that_nothing_calls_is_refused(load: Callable[..., Task], tmp_path: Path, member: str) -> None:
    derived = DERIVED.replace("class Own(PreferenceOptimization):", f"class Own(PreferenceOptimization):\n    {member}")
    for _ in range(2):
        with pytest.raises(TaskError, match="no longer called; override `source_class`"):
            load(derived, **find_task("dpo").tiny(tmp_path))  # type: ignore[attr-defined]


def test_a_survey_without_surveys_stays_uncalled(load: Callable[..., Task]) -> None:
    task = load(PLAIN.replace("def surveys(self): return True", "def other(self): return True"))
    assert task.loss_inputs.step_stats is None


def test_a_tokenizer_of_its_own_may_start_from_the_recipes(load: Callable[..., Task], tmp_path: Path) -> None:
    task = load(OWN_TOKENIZER, **find_task("sft").tiny(tmp_path))  # type: ignore[attr-defined]
    assert task.tokenizer.padding_side == "left"  # type: ignore[attr-defined]
    assert task.model_source.tokenizer is task.tokenizer  # type: ignore[attr-defined]


def test_a_task_has_twelve_members() -> None:
    (body,) = (node.body for node in ast.parse(inspect.getsource(Task)).body if isinstance(node, ast.ClassDef))
    own = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    own += [ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)]
    assert sorted(own) == sorted([
        "recipe", "metric_names", "learning_rate", "data_keys", "examples", "collate", "build_model", "loss",
        "loss_inputs", "checks", "export", "needs_images",
    ])  # fmt: skip

"""Distillation: the divergence over k tokens and a tail, the teacher's outputs, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import dstrain.tasks.common.model_source
from dstrain.batch import Batch
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import DataError, TaskError
from dstrain.models.heads import MAX_CHUNK_BYTES
from dstrain.planner.shapes import read_properties
from dstrain.tasks import make_task
from dstrain.tasks.distill import Distill, class_log_probs, divergence, top_classes
from dstrain.training.build_model import build_train_module
from dstrain.training.precompute_outputs import OutputsJob, add_frozen_outputs, build_cache_key, iter_model_jobs
from tests.tiny import tiny_recipe

pytestmark = pytest.mark.usefixtures("fresh_cache")

VOCABULARY = 320
KEPT = {"precompute_ref_log_probs": True}


def logits_of_both(tokens: int = 11) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a student and a teacher, (7, tokens)."""
    draw = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 7, tokens, generator=draw, dtype=torch.float64) * 3
    return student.requires_grad_(), teacher


@pytest.mark.parametrize("loss_type", ["forward_kl", "reverse_kl"])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_all_tokens_give_the_whole_divergence(loss_type: str, temperature: float) -> None:
    student, teacher = logits_of_both()
    classes, ids = top_classes(teacher, 11, 11, temperature)
    found = divergence(class_log_probs(student, ids, temperature), classes, loss_type)
    sides = [(one / temperature).log_softmax(-1) for one in (student, teacher)]
    p, q = sides[::-1] if loss_type == "forward_kl" else sides
    wanted = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
    grads = [torch.autograd.grad(value.sum(), student)[0] for value in (found, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["forward_kl", "reverse_kl"])
def test_other_tokens_are_one_class(loss_type: str) -> None:
    student, teacher = logits_of_both()
    classes, ids = top_classes(teacher, 3, 11, 2.0)
    found = divergence(class_log_probs(student, ids, 2.0), classes, loss_type)
    for row in range(7):
        p, q = ((one[row].detach() / 2).softmax(-1) for one in (teacher, student))
        top = p.argsort(descending=True)[:3]
        assert ids[row].tolist() == top.tolist()
        sides = [torch.cat([one[top], 1 - one[top].sum(keepdim=True, dim=0)]) for one in (p, q)]
        p, q = sides if loss_type == "forward_kl" else sides[::-1]
        assert found[row].item() == pytest.approx((p * (p / q).log()).sum().item(), rel=1e-9)


def test_a_tail_without_digits_has_its_gradient() -> None:
    """1 - p is 0 in fp32 where a token has nearly all the mass; its log is not."""
    logits = torch.tensor([[40.0, 0.0, 1.0, -2.0]], requires_grad=True)
    classes = class_log_probs(logits, torch.tensor([[0]]), 1.0)
    assert classes[0, 1].item() == pytest.approx(float(np.log(np.exp(0) + np.exp(1) + np.exp(-2)) - 40), rel=1e-6)
    for loss_type in ("forward_kl", "reverse_kl"):
        (grad,) = torch.autograd.grad(
            divergence(classes, classes.detach() - 0.1, loss_type).sum(), logits, retain_graph=True
        )
        assert grad.isfinite().all()


def test_a_row_without_a_token_is_nothing_to_learn() -> None:
    """A model's head may have more rows than its tokenizer has tokens: Qwen 2.5's have, and each size another number."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]])
    classes, ids = top_classes(logits, 2, 3, 1.0)
    assert ids.tolist() == [[2, 1]]
    assert classes[0].exp().tolist() == pytest.approx(logits[0, :3].softmax(-1)[[2, 1, 0]].tolist())


def made(folder: Path, **options: Any) -> Distill:
    folder.mkdir(exist_ok=True)
    recipe = tiny_recipe("distill", folder)
    task: Any = make_task(RunConfig.model_validate(recipe | {"options": recipe["options"] | options}))
    return task


def job(task: Distill, **more: Any) -> OutputsJob:
    world = {"ds_config": {"zero_optimization": {"stage": 0}}, "micro_batch_size": 3, "world": SingleProcessWorld()}
    return OutputsJob(**{"task": task, **world, **more})  # type: ignore[arg-type]


def step(task: Distill, ids: list[int]) -> tuple[torch.Tensor, dict[str, float], torch.Tensor]:
    """Return the loss of a task at its start, its metrics, and the gradient of the head."""
    (examples,) = add_frozen_outputs(job(task), [task.examples("train")])
    assert examples is not None
    objective = build_train_module(task)
    total, metrics = objective(make_batch(examples, task.collate, ids, 0))
    total.backward()
    head: Any = objective.model.lm_head
    return total.detach(), {name: float(value) for name, (value, _) in metrics.items()}, head.weight.grad


def plain_loss(task: Distill, ids: list[int]) -> tuple[float, float, torch.Tensor]:
    """Return loss, divergence and gradient of the head from whole logits, a sample at a time."""
    student: Any = task.build_model()
    teacher: Any = task.reference.build()
    student.train(), teacher.eval()
    total, divergence_sum, examples = torch.zeros(()), 0.0, task.examples("train")
    assert examples is not None
    for index in ids:
        row = torch.tensor(examples[index]["input_ids"]).long()[None]
        at = torch.tensor(examples[index]["loss_mask"]).nonzero().squeeze(-1)
        logits, target = student(row).logits[0, at - 1], row[0, at]
        with torch.no_grad():
            p = (teacher(row).logits[0, at - 1] / task.temperature).softmax(-1)
        q = (logits / task.temperature).softmax(-1)
        top = p.topk(min(task.top_k, VOCABULARY)).indices
        sides = [one.gather(-1, top) for one in (p, q)]
        if task.top_k < VOCABULARY:
            sides = [torch.cat([one, 1 - one.sum(-1, keepdim=True)], -1) for one in sides]
        kl = F.kl_div(sides[1].log(), sides[0], reduction="sum")
        divergence_sum += float(kl.detach())
        ce = F.cross_entropy(logits, target, reduction="sum")
        total = total + (1 - task.ce_weight) * task.temperature**2 * kl + task.ce_weight * ce
    total.backward()
    return float(total.detach()), divergence_sum, student.lm_head.weight.grad


@pytest.mark.parametrize("top_k", [VOCABULARY, 1000, 6])
@pytest.mark.parametrize("kept", [True, False])
def test_a_loss_is_that_of_whole_logits(top_k: int, kept: bool, tmp_path: Path) -> None:
    task = made(tmp_path, top_k=top_k, temperature=1.7, ce_weight=0.3, precompute_ref_log_probs=kept)
    ids = [5, 17, 60, 2]
    total, metrics, grad = step(task, ids)
    wanted, kl, wanted_grad = plain_loss(task, ids)
    assert float(total) == pytest.approx(wanted, rel=1e-6)
    assert metrics["kl"] == pytest.approx(kl, abs=1e-5), "a small sum of differences"
    torch.testing.assert_close(grad, wanted_grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("loss_type", ["forward_kl", "reverse_kl"])
def test_chunks_and_rows_change_nothing(loss_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = made(tmp_path, loss_type=loss_type)
    batch = task.recipe.batch.model_copy(update={"packing": False})
    padded = replace(task, recipe=task.recipe.model_copy(update={"batch": batch}))
    assert (task.packing.is_packed, padded.packing.is_packed) == (True, False)
    found = [step(one, [3, 9, 4]) for one in (task, padded)]
    monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", 4 * VOCABULARY * 5)
    found += [step(one, [3, 9, 4]) for one in (task, padded)]
    for total, metrics, grad in found[1:]:
        torch.testing.assert_close(total, found[0][0], rtol=1e-6, atol=0)
        assert metrics == pytest.approx(found[0][1], abs=1e-5)
        torch.testing.assert_close(grad, found[0][2], rtol=1e-5, atol=1e-6)


def test_a_student_that_is_its_teacher_has_no_divergence(tmp_path: Path) -> None:
    task = made(tmp_path, ce_weight=0.0)
    model = task.recipe.model.model_copy(update={"path": task.teacher, "config": None, "tokenizer": None})
    same = replace(task, recipe=task.recipe.model_copy(update={"model": model}))
    total, metrics, grad = step(same, [0, 1, 2])
    assert abs(float(total)) < 1e-5
    assert abs(metrics["kl"]) < 1e-5
    assert grad.abs().max() < 1e-5


def test_a_kept_output_is_an_array_for_each_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    load = dstrain.tasks.common.model_source.load_model
    monkeypatch.setattr(dstrain.tasks.common.model_source, "load_model", lambda *args: built.append("") or load(*args))
    monkeypatch.setattr("dstrain.training.precompute_outputs.ROWS_PER_ENTRY", 10)
    task = made(tmp_path, **KEPT)
    built.clear()
    splits = [task.examples("train"), task.examples("eval")]
    first = add_frozen_outputs(job(task), splits)
    assert len(built) == 1, "one teacher for both splits"
    again = add_frozen_outputs(job(task), splits)
    assert len(built) == 1, "all of it is in the cache"
    for old, new in zip(first, again, strict=True):
        assert old is not None
        assert new is not None
        for index in range(len(old)):
            targets = int(old[index]["loss_mask"].sum())
            assert old[index]["teacher_ids"].shape == (targets, 8)
            assert old[index]["teacher_log_probs"].shape == (targets, 9)
            for name in ("teacher_ids", "teacher_log_probs"):
                assert np.array_equal(old[index][name], new[index][name])
                base = old[index][name]
                while isinstance(base, np.ndarray) and not isinstance(base, np.memmap):
                    base = base.base
                assert base is not None, "mapped from its file, which the processes of a host share"
    online, kept = (step(made(tmp_path, **more), [5, 17, 60, 2]) for more in ({}, KEPT))
    assert float(kept[0]) == pytest.approx(float(online[0]), rel=1e-6)


def test_what_changes_the_outputs_changes_their_key(tmp_path: Path) -> None:
    def key(**options: Any) -> str:
        task = made(tmp_path, **KEPT, **options)
        (found,) = iter_model_jobs(job(task))
        store: Any = task.examples("train").store  # type: ignore[union-attr]
        return str(build_cache_key(found, store, ""))

    assert len({key(), key(top_k=9), key(temperature=2.0)}) == 3
    assert key(ce_weight=0.1, loss_type="reverse_kl") == key(), "options of the loss ask nothing new"


def test_a_teacher_without_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refer = Distill.reference_outputs

    def broken(self: Distill, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {
            name: value * (torch.nan if value.is_floating_point() else 1)
            for name, value in refer(self, model, batch).items()
        }

    monkeypatch.setattr(Distill, "reference_outputs", broken)
    task = made(tmp_path, **KEPT)
    with pytest.raises(DataError, match=r"teacher_log_probs of samples \[0, 1.*is not finite"):
        add_frozen_outputs(job(task), [task.examples("train")])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_k": 0}, "top_k is 0"),
        ({"temperature": 0.0}, "temperature is 0, but it must be above 0"),
        ({"ce_weight": 1.0}, "ce_weight is 1, but it must be at least 0 and below 1"),
        ({"loss_type": "kl"}, "loss_type"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=words):
        made(tmp_path, **options)


def test_the_planner_counts_a_teacher_in_memory(tmp_path: Path) -> None:
    held, kept = (read_properties(made(tmp_path, **more).recipe) for more in ({}, KEPT))
    assert (held.reference, kept.reference) == ("model", "cached")
    assert held.reference_model is not None
    assert held.reference_model.path == str(tmp_path / "teacher")


def test_a_teacher_that_is_gone_leaves_a_student_usable(tmp_path: Path) -> None:
    task = made(tmp_path)
    shutil.copytree(tmp_path / "teacher", tmp_path / "tokenizer")
    model = task.recipe.model.model_copy(update={"tokenizer": str(tmp_path / "tokenizer")})
    shutil.rmtree(tmp_path / "teacher")
    again = replace(task, recipe=task.recipe.model_copy(update={"model": model}))
    assert "options.teacher: its config cannot be read" in again.packing.message

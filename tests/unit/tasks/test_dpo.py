"""Preference optimization: each loss as its paper has it, and a reference that answers the same however it is kept."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dstrain.tasks.common.model_source
import dstrain.training.precompute_outputs
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import DataError, TaskError
from dstrain.models.heads import MAX_CHUNK_BYTES, HeadInput
from dstrain.tasks import Task, dpo, make_task
from dstrain.tasks.dpo import DPO
from dstrain.training.build_model import build_train_module
from dstrain.training.precompute_outputs import OutputsJob, add_frozen_outputs, build_cache_key, iter_model_jobs
from tests.tiny import tiny_recipe
from tests.vision_recipes import named_recipe
from tests.vocabulary import sigmoid

pytestmark = pytest.mark.usefixtures("fresh_cache")


LN2 = math.log(2)
PLAIN = {"zero_optimization": {"stage": 0}}


H = torch.tensor([0.0, 1.5, -4.0], dtype=torch.float64)
"""log-ratio of the chosen answer less that of the rejected one."""


def test_the_sigmoid_loss_is_dpos() -> None:
    assert dpo.dpo_sigmoid(H, 0.1).tolist() == pytest.approx([-math.log(sigmoid(0.1 * h)) for h in H.tolist()])


def test_label_smoothing_mixes_in_the_other_label() -> None:
    wanted = [-0.8 * math.log(sigmoid(0.1 * h)) - 0.2 * math.log(sigmoid(-0.1 * h)) for h in H.tolist()]
    assert dpo.dpo_sigmoid(H, 0.1, 0.2).tolist() == pytest.approx(wanted)


def test_the_robust_loss_is_unbiased_under_flipped_labels() -> None:
    robust, flipped = dpo.robust_dpo(H, 0.3, 0.2), dpo.robust_dpo(-H, 0.3, 0.2)
    wanted = [-(0.8 * math.log(sigmoid(0.3 * h)) - 0.2 * math.log(sigmoid(-0.3 * h))) / 0.6 for h in H.tolist()]
    assert robust.tolist() == pytest.approx(wanted)
    assert (0.8 * robust + 0.2 * flipped).tolist() == pytest.approx(dpo.dpo_sigmoid(H, 0.3).tolist())


def test_ipo_pulls_to_one_over_two_beta() -> None:
    assert dpo.ipo(H, 0.25).tolist() == pytest.approx([4.0, 0.25, 36.0])


def test_the_hinge_is_flat_beyond_its_margin() -> None:
    assert dpo.hinge(H, 1.0).tolist() == pytest.approx([1.0, 0.0, 5.0])


def test_simpo_asks_for_a_margin() -> None:
    assert dpo.simpo(H, 2.0, 0.5).tolist() == pytest.approx([-math.log(sigmoid(2 * h - 0.5)) for h in H.tolist()])


def test_the_odds_ratio_is_orpos() -> None:
    chosen, rejected = torch.tensor([0.8]).double().log(), torch.tensor([0.5]).double().log()
    assert dpo.orpo(chosen, rejected).item() == pytest.approx(-math.log(sigmoid(math.log((0.8 / 0.2) / 1.0))))


def test_odds_are_finite_where_an_answer_is_nearly_sure() -> None:
    means = torch.tensor([-1e-9, -1e-30, 0.0], requires_grad=True)
    loss = dpo.orpo(means, torch.full((3,), -2.0)).sum()
    loss.backward()
    assert loss.isfinite()
    assert means.grad is not None
    assert means.grad.isfinite().all()


@pytest.mark.parametrize("count", [1, 7])
def test_log_probs_are_those_of_the_softmax_in_whatever_pieces(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 5, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (2, 5))
    wanted = logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", 4 * 11 * count)
    scores = HeadInput(torch.nn.Identity(), logits, ()).score_targets(logits.flatten(0, 1), targets.flatten())
    found = scores.log_probs.view_as(targets)
    torch.testing.assert_close(found, wanted)
    grads = [torch.autograd.grad((value * torch.arange(5)).sum(), logits)[0] for value in (found, wanted)]
    torch.testing.assert_close(*grads)


def made(folder: Path, options: dict[str, Any] | None = None, **more: Any) -> Task:
    recipe = tiny_recipe("dpo", folder) | {"options": options or {}}
    recipe["model"] = recipe["model"] | more
    return make_task(RunConfig.model_validate(recipe))


def asking(task: Task, **more: Any) -> OutputsJob:
    return OutputsJob(**{"task": task, "ds_config": PLAIN, "micro_batch_size": 3, "world": SingleProcessWorld()} | more)


def look(task: Task, ids: list[int]) -> tuple[float, dict[str, float]]:
    """(loss, metrics) per pair of a task at its start."""
    examples = add_frozen_outputs(asking(task), [task.examples("train")])[0]
    assert examples is not None
    batch = make_batch(examples, task.collate, ids, 0)
    with torch.no_grad():
        total, metrics = build_train_module(task)(batch)
    return float(total) / batch.weight, {name: float(value / weight) for name, (value, weight) in metrics.items()}


KINDS: dict[str, dict[str, Any]] = {
    "model": {},
    "cached": {"options": {"precompute_ref_log_probs": True}},
    "adapter": {"lora": {"rank": 4}},
    "adapters, cached": {"options": {"precompute_ref_log_probs": True}, "lora": {"rank": 4}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_loss_is_ln_2(kind: str, tmp_path: Path) -> None:
    task = made(tmp_path, **KINDS[kind])
    assert task.reference.kind == kind.split()[-1]
    loss, metrics = look(task, [3, 9, 4, 60, 31])
    assert loss == pytest.approx(LN2, abs=1e-6)
    assert metrics["margin"] == pytest.approx(0, abs=1e-5)


FIRST = {"ipo": 25.0, "hinge": 1.0, "robust": LN2}
"""The loss where policy and reference are one, at beta 0.1."""


@pytest.mark.parametrize("loss_type", FIRST)
def test_other_losses_begin_where_their_formula_says(loss_type: str, tmp_path: Path) -> None:
    loss, _ = look(made(tmp_path, {"loss_type": loss_type, "beta": 0.1}), [0, 1, 2])
    assert loss == pytest.approx(FIRST[loss_type], abs=2e-6 * max(FIRST[loss_type], 1))


@pytest.mark.parametrize("name", ["dpo", "dpo, with images"])
def test_answers_kept_are_those_asked_online(name: str, tmp_path: Path) -> None:
    _, recipe = named_recipe(name, tmp_path)
    other = make_task(RunConfig.model_validate(recipe | {"seed": 7}))
    other.build_model().save_pretrained(tmp_path / "other")
    other.export.save_extras(tmp_path / "other")
    ids = [5, 17, 60, 2]
    online, kept = (
        look(
            make_task(RunConfig.model_validate(recipe | {"options": {"ref_model": str(tmp_path / "other"), **more}})),
            ids,
        )
        for more in ({}, {"precompute_ref_log_probs": True})
    )
    assert online[0] != pytest.approx(LN2, abs=1e-4), "another reference"
    assert kept[0] == pytest.approx(online[0], abs=1e-6)
    assert kept[1] == pytest.approx(online[1], abs=1e-5)


def test_with_kept_answers_no_reference_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    load = dstrain.tasks.common.model_source.load_model
    monkeypatch.setattr(dstrain.tasks.common.model_source, "load_model", lambda *args: built.append("") or load(*args))
    task = made(tmp_path, {"precompute_ref_log_probs": True})
    first = add_frozen_outputs(asking(task), [task.examples("train"), task.examples("eval")])
    assert len(built) == 1, "the reference answers for both splits"
    second = add_frozen_outputs(asking(task), [task.examples("train"), task.examples("eval")])
    assert len(built) == 1
    build_train_module(task)
    assert len(built) == 2, "the policy, and nothing beside it"
    for old, new in zip(first, second, strict=True):
        assert old is not None
        assert new is not None
        assert [old[i]["ref_chosen_logps"] for i in range(9)] == [new[i]["ref_chosen_logps"] for i in range(9)]


def test_answers_that_were_broken_off_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dstrain.training.precompute_outputs, "ROWS_PER_ENTRY", 10)
    task = made(tmp_path, {"precompute_ref_log_probs": True})
    asked: list[int] = []
    refer = DPO.reference_outputs

    def counted(self: Any, model: Any, batch: Any) -> Any:
        asked.extend(batch.samples)
        if len(asked) > 45:
            raise KeyboardInterrupt
        return refer(self, model, batch)

    monkeypatch.setattr(DPO, "reference_outputs", counted)
    with pytest.raises(KeyboardInterrupt):
        add_frozen_outputs(asking(task), [task.examples("train")])
    monkeypatch.setattr(DPO, "reference_outputs", refer)
    kept = set(asked[:40])
    asked.clear()
    monkeypatch.setattr(
        DPO,
        "reference_outputs",
        lambda self, model, batch: asked.extend(batch.samples) or refer(self, model, batch),
    )
    broken, whole = add_frozen_outputs(asking(task), [task.examples("train"), None])[0], made(tmp_path)
    assert broken is not None
    assert kept.isdisjoint(asked)
    assert len(kept) + len(asked) == len(broken) == len(whole.examples("train") or ())


def key(task: Task, **more: Any) -> str:
    store: Any = task.examples("train").store  # type: ignore[union-attr]
    (found,) = iter_model_jobs(asking(task, **more))
    return str(build_cache_key(found, store, dstrain.training.precompute_outputs._weights_fingerprint(found)))


def test_what_changes_the_answers_changes_their_key(tmp_path: Path) -> None:
    options = {"precompute_ref_log_probs": True}
    task = made(tmp_path, options)
    recipe = task.recipe
    shorter = replace(
        task, recipe=recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 46})})
    )
    keys = [
        key(task),
        key(made(tmp_path, options, attn_implementation="eager")),
        key(task, ds_config=PLAIN | {"bf16": {"enabled": True}}),
        key(replace(task, recipe=recipe.model_copy(update={"seed": 3}))),
        key(shorter),
        key(made(tmp_path, options, config=recipe.model.config | {"hidden_size": 64})),  # type: ignore[operator]
    ]
    assert len(set(keys)) == len(keys)
    assert key(made(tmp_path, options | {"beta": 0.3}, lora={"rank": 2})) == keys[0], (
        "the policy's options ask nothing new"
    )


def test_a_reference_without_numbers_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        DPO,
        "reference_outputs",
        lambda self, model, batch: {"ref_chosen_logps": torch.full((int(batch.weight),), np.nan)},
    )
    task = made(tmp_path, {"precompute_ref_log_probs": True})
    with pytest.raises(DataError, match="is not finite"):
        add_frozen_outputs(asking(task), [task.examples("train")])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0.0}, "beta is 0"),
        ({"label_smoothing": 0.5}, "below 0.5"),
        ({"label_smoothing": 0.1, "loss_type": "ipo"}, "no meaning"),
        ({"simpo_gamma": 1.0}, "simpo_gamma has no meaning for loss_type sigmoid"),
        ({"loss_type": "orpo", "rpo_alpha": 1.0}, "rpo_alpha"),
        ({"loss_type": "simpo", "precompute_ref_log_probs": True}, "no reference"),
        ({"loss_type": "dpo"}, "loss_type"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=words):
        made(tmp_path, options)


def test_an_sft_term_is_the_mean_over_the_chosen_answers_tokens(tmp_path: Path) -> None:
    without, metrics = look(made(tmp_path), [7])
    with_it, _ = look(made(tmp_path, {"rpo_alpha": 2.0}), [7])
    task = made(tmp_path)
    examples: Any = task.examples("train")
    tokens = len(examples[7]["chosen"]) - int(examples[7]["prompt_length"])
    assert with_it - without == pytest.approx(-2.0 * metrics["logp_chosen"] / tokens, rel=1e-5)


def test_an_answer_that_fills_the_whole_sequence_is_learnt_from_its_second_token(tmp_path: Path) -> None:
    """Nothing predicts the first one; so it is where the answer leaves the prompt no room."""
    whole = {"chosen": np.arange(5, 12), "rejected": np.arange(6, 9), "prompt_length": 0.0, "margin": 0.0, "sample": 0}
    task = made(tmp_path)
    batch = task.collate([whole])
    assert batch.tensors["loss_mask"].tolist() == [[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]
    with torch.no_grad():
        assert task.loss(
            task.build_model(), batch.with_tensors(build_train_module(task)._reference_outputs(batch))
        ).total.isfinite()

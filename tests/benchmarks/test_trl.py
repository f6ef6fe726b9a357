"""dstrain's losses are TRL's, where both follow one formula; where they do not, the difference is the one we know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import write_pairs
from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task

pytest.importorskip("trl", reason="TRL is not installed; pip install trl==1.16.0")

from benchmarks.trl_dpo import KINDS, made_recipe, with_torch
from benchmarks.trl_side import ORPO, made_side, ordered

LOSSES = [name for name, kind in KINDS.items() if kind.agrees and "precompute_ref_log_probs" not in kind.options]


def dpo(name: str, folder: Path) -> Any:
    """The task of one kind of loss, for 5 steps."""
    train = write_pairs(folder / "pairs.jsonl", 16, 12)
    return make_task(RunConfig.model_validate(made_recipe(KINDS[name], train, 5, 3e-3)))


@pytest.mark.parametrize("name", LOSSES)
def test_five_steps_have_the_losses_of_trl(name: str, tmp_path: Path) -> None:
    task = dpo(name, tmp_path)
    side = made_side(KINDS[name].trainer, task, ordered(task), **KINDS[name].settings)
    side.trainer.train()
    ours = with_torch(task)
    assert ours == pytest.approx(side.losses, abs=1e-4)
    assert ours[-1] != pytest.approx(ours[0], abs=1e-3), "nothing was learnt, so nothing was compared"


def test_orpo_differs_from_trl_by_its_sft_term_alone(tmp_path: Path) -> None:
    """TRL sums -log p over the prompt too, and divides by all tokens of the batch; dstrain sums the answer's, by pair."""
    from dstrain.tasks.common.forward import answer_log_probs

    task = dpo("orpo", tmp_path)
    side = made_side(ORPO, task, ordered(task))
    first = next(iter(side.trainer.get_train_dataloader()))
    loss, said = side.trainer.get_batch_loss_metrics(side.trainer.model, first)
    model, batch = task.build_model(), task.collate(ordered(task)[: task.recipe.batch.total])
    sums, lengths = answer_log_probs(model, batch).sum(-1).detach(), batch.tensors["loss_mask"].sum(-1)
    learns_chosen = -(sums / lengths).chunk(2)[0].mean()
    ours = task.loss(model, batch).total.detach() / batch.weight
    assert float(ours - learns_chosen) == pytest.approx(float(loss.detach()) - said["nll_loss"], abs=1e-5)
    assert float(learns_chosen) != pytest.approx(said["nll_loss"], abs=1e-4)

"""An evaluation keeps the limit of tokens of the recipe, and so do precomputed outputs; both stay the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dstrain.batch import Batch, StepResult
from dstrain.data.loading.loader import eval_micro_batches
from dstrain.tasks.common.task import as_dataset
from dstrain.training.evaluate import Evaluation
from tests.parity.cases import made

LIMIT = 300


@pytest.mark.parametrize("task", ["rm", "sft", "kto"])
def test_an_evaluation_of_passes_of_tokens_has_the_same_metrics(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluate(batch: dict[str, Any], micro: int) -> tuple[dict[str, float], list[int]]:
        run = made(task, "torch", 1, {"batch": batch})
        computed: list[int] = []
        forward = run.engine.evaluate

        def count(batch: Batch) -> StepResult:
            computed.append(batch.tensors["input_ids"].numel())
            return forward(batch)

        monkeypatch.setattr(run.engine, "evaluate", count)
        row = Evaluation(run.task, as_dataset(run.examples), micro).run(run.engine)
        return {name: value for name, value in row.items() if not name.endswith("_per_second")}, computed

    wanted, _ = evaluate({"total": 8, "micro": 4}, 4)
    found, computed = evaluate({"total": 8, "tokens_per_micro": LIMIT}, 1)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert max(computed) <= LIMIT
    assert len({*computed}) > 1


def test_an_evaluation_is_divided_once(monkeypatch: pytest.MonkeyPatch) -> None:
    divided: list[int] = []
    monkeypatch.setattr(
        "dstrain.training.evaluate.eval_micro_batches",
        lambda count, *more: divided.append(count) or eval_micro_batches(count, *more),
    )
    run = made("rm", "torch", 1, {"batch": {"total": 8, "micro": 4}})
    evaluation = Evaluation(run.task, as_dataset(run.examples), 4)
    first, again = ({**evaluation.run(run.engine)} for _ in range(2))
    assert all(first[name] == again[name] for name in first if not name.endswith("_per_second"))
    assert divided == [len(run.examples)]
    replace(evaluation, micro_batch_size=2).run(run.engine)
    assert divided == [len(run.examples)] * 2, "batches of another shape"


def test_a_signal_ends_an_evaluation_after_the_pass() -> None:
    """It ran to its end, whatever it took: longer than a scheduler waits before SIGKILL."""
    run = made("rm", "torch", 1, {"batch": {"total": 8, "micro": 4}})
    asked = iter((False, True))
    evaluation = Evaluation(run.task, as_dataset(run.examples), 1)
    assert evaluation.run(run.engine, lambda: next(asked)) == {}
    assert [*asked] == []


def test_reference_log_probs_keep_the_limit_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    columns = []
    for batch in ({"total": 8, "micro": 4}, {"total": 8, "tokens_per_micro": LIMIT}):
        monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / str(len(columns))))
        run = made("dpo", "torch", 1, {"batch": batch, "options": {"precompute_ref_log_probs": True}})
        columns.append([run.examples[index]["ref_chosen_logps"] for index in range(len(run.examples))])
    np.testing.assert_allclose(columns[1], columns[0], rtol=1e-5)

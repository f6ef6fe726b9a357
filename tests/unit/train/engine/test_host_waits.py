"""Between a batch and the update of the weights, the host waits for a GPU only where the list below says so.

A CPU never waits, so the operators are counted that would wait on a GPU; tests/gpu/test_syncs.py counts the waits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dstrain.data.loading.loader import make_batch
from tests.host_reads import host_reads
from tests.parity.cases import made

SGD = {"optim": {"name": "sgd", "lr": 1.0, "clip": 0.0}}
OWN = {
    "rm": [],
    "dpo": [],
    "sft": [],
    "vlm": [],
    "docqa": [],
    "protein": [],
    "temporal": [],
    # The mean over a step, which all ranks need before its losses.
    "kto": ["torch.tensor dstrain/train/engine/module.py:compute_step_stats"],
}
"""Task -> waits of dstrain's own code before the norm of the gradient is read."""
ON_A_CPU = {
    "torch.tensor dstrain/models/attention/layout.py:_to_device",  # on a GPU from pinned memory, without a wait
    "nonzero dstrain/models/heads.py:is_argmax",  # on a GPU an argmax
}
"""Operators of dstrain's own code that it calls on a CPU only."""
NORM = "_local_scalar_dense dstrain/train/engine/torch.py:step"
OF_TRANSFORMERS = {
    "_ignore_causal_mask_sdpa",  # a mask is given: does it hide anything?
    "get_placeholder_mask",  # as many image tokens as features?
    "torch_compilable_check",
    "masked_scatter_backward",
}
"""Functions of transformers and torch that wait in every forward or backward pass."""


PADDED = {"batch": {"packing": False}}


@pytest.mark.parametrize(("task", "form"), [*((task, {}) for task in OWN), ("rm", PADDED), ("sft", PADDED)])
def test_a_step_waits_for_no_value_but_the_listed_ones(task: str, form: dict[str, Any]) -> None:
    run = made(task, "torch", 1, SGD | form)
    batches = [make_batch(run.examples, run.task.collate, [0, 1, 2], 0)]
    run.engine.step(batches, 0.0)  # buffers that are made once
    found = [where for where in host_reads(lambda: run.engine.step(batches, 0.0)) if where not in {NORM, *ON_A_CPU}]
    own = [where for where in found if not any(name in where for name in OF_TRANSFORMERS)]
    assert own == OWN[task]


def test_values_that_the_host_reads_are_found() -> None:
    values = torch.arange(4.0)
    assert [one.split()[0] for one in host_reads(lambda: float(values.sum()))] == ["_local_scalar_dense"]
    assert [one.split()[0] for one in host_reads(lambda: values[values > 1])] == ["index"]
    assert [one.split()[0] for one in host_reads(lambda: values.nonzero())] == ["nonzero"]
    assert not host_reads(lambda: torch.where(values > 1, values, 0.0).sum())

"""Waits and copies of a training step, a log row and an evaluation, counted by the emulated runtime."""

from __future__ import annotations

import json

import pytest

from tests.emulated.conftest import EmulatedRun

ONCE = {"stream_syncs": 1, "copies_to_host": 1}
"""The host reads one value, or several in one copy; the rest is 0."""
STEPS = {
    "sft zero0": ONCE,
    "sft zero1": ONCE,  # four micro-batches, summed in fp32
    "sft zero2": ONCE,  # four micro-batches
    "sft zero3": ONCE,  # four micro-batches
    "rm zero2": ONCE,
    "dpo zero2": ONCE,
    "prm zero2": ONCE,
    "kto zero2": {"stream_syncs": 2, "copies_to_host": 2},  # and the mean over a step, which its losses need
    "vlm zero2": ONCE,
    "docqa zero2": ONCE,
    "temporal zero2": ONCE,  # rows with a mask of their padding
    **{f"sft zero{stage} 2": ONCE for stage in range(4)},  # two processes
}
"""Run -> waits and copies of a step that are not 0: the norm of the gradients, which decides whether to update."""
OF_A_BATCH, OF_A_TOKEN = 4, 1
"""Waits of a batch of generated answers, and of each of their tokens: transformers asks whether ids of the prompts are
negative, whether they are padded (twice), and whether all answers have ended; the answers are copied at once."""


@pytest.mark.cuda_emulated
def test_the_host_waits_for_the_norm_alone(emulated_run: EmulatedRun) -> None:
    done = emulated_run(["-m", "tests.emulated.count_cells", *STEPS], timeout=900, EMU_GPUS="2")
    assert done.returncode == 0, done.stdout
    counts = json.loads(done.stdout.splitlines()[-1])
    assert {name: counts[name]["step"] for name in STEPS} == STEPS
    # A row of metrics is one copy, and so is an evaluation, whose batches are pinned.
    assert {name: counts[name]["log row"] for name in STEPS} == dict.fromkeys(STEPS, ONCE)
    for name in ("rm zero2", "vlm zero2", "sft zero3 2"):
        assert counts[name]["evaluation"] == ONCE
    batches, tokens = 4, 1  # of generated answers in an evaluation, and of the longest in each
    waits = 1 + batches * (OF_A_BATCH + OF_A_TOKEN * tokens)
    assert counts["temporal zero2"]["evaluation"] == {"stream_syncs": waits, "copies_to_host": waits}

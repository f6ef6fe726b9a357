"""Launches of updates and their distance from DeepSpeed's own, on the emulator: `python -m tests.emulated.step_cells`."""

from __future__ import annotations

import json
import logging
import warnings

from benchmarks.common import join_alone
from benchmarks.step_launches import StepRun, count_growth
from tests.step_equality import compare_steps

CASES = (
    ("zero0", "bf16", 1),
    ("zero1", "bf16", 2),
    ("zero2", "fp16", 1),
    ("zero3", "fp32", 1),
)


def main() -> None:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    world = join_alone()
    answer = {}
    for preset, precision, micro_batches in CASES:
        _, growth = count_growth(StepRun("adamw", preset, precision, micro_batches=micro_batches), world)
        distance = compare_steps(world, preset, precision, "sgd", micro_batches)
        answer[preset] = {"growth": growth["update"], "distance": distance}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

"""Measure the time and the memory of a step: dstrain, TRL, a plain DeepSpeed loop, and the matrix products alone.

    taskset -c 0 python -m benchmarks.speed [--settings hh,even,long-prompts,drawn] [--tasks rm,dpo,sft] [--seed 7]

Samples, weights and rates are the same. In fp32 the losses must agree; in bf16 each may differ from them as far as rounding
explains. Only then is anything timed, in turns, in one process. Memory is measured in one process for each variant.
"""

from __future__ import annotations

import time
from importlib.util import find_spec
from typing import Any

from benchmarks.common import count_tokens, join_alone, ratio, run, take_turns
from benchmarks.speed.memory import step_memory_mib
from benchmarks.speed.settings import find_setting
from benchmarks.speed.variants import DSTRAIN, PLAIN, PRODUCTS, TRL, Case, made_case, made_variant

FP32_LIMIT = 1e-4
"""Largest relative difference of losses in fp32."""
BF16_EPSILON = 2**-8
"""Relative rounding of one bf16 number."""


def measure(
    *, settings: str = "hh,even,long-prompts,drawn", tasks: str = "rm,dpo,dpo-precomputed,sft", seed: int = 7,
    precision: str = "bf16", rounds: int = 12, checked_steps: int = 3, overrides: str = "", memory: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """Check the losses, then time and measure each task in each setting. `overrides`: KEY=VALUE of dstrain, by commas."""
    world, changes = join_alone(), tuple(filter(None, overrides.split(",")))
    names = [DSTRAIN, *([TRL] if find_spec("trl") else []), PLAIN, PRODUCTS]
    rows, checks = [], []
    for setting in (find_setting(name, seed) for name in settings.split(",")):
        for task in tasks.split(","):
            steps = checked_steps + 2 + rounds + 2
            case = made_case(setting, task, steps, world, changes)
            checked, seconds = compare_and_time(case, names, precision, (checked_steps, rounds))
            checks.append(f"{setting.name} {task}: {checked}")
            peaks = {
                name: step_memory_mib(setting, task, name, precision, changes) if memory and name != PRODUCTS else None
                for name in names
            }
            rows += _rows(case, names, seconds, peaks)
            print(checks[-1], *rows[-len(names) :], sep="\n", flush=True)
    return {
        "settings": {
            "settings": settings, "tasks": tasks, "seed": seed, "precision": precision, "rounds": rounds,
            "overrides": overrides, "shapes": [str(find_setting(name, seed)) for name in settings.split(",")],
        },
        "checked": "; ".join(checks),
        "rows": rows,
    }  # fmt: skip


def compare_and_time(
    case: Case, names: list[str], precision: str, counts: tuple[int, int]
) -> tuple[str, dict[str, list[float]]]:
    """Return (a sentence about the losses, seconds of each step). Raises AssertionError if losses differ."""
    checked_steps, rounds = counts
    in_fp32 = {name: made_variant(name, case, "fp32") for name in names if name != PRODUCTS}
    exact = _first_losses(in_fp32, checked_steps)
    stop(in_fp32)
    worst = max(_apart(losses, exact[PLAIN]) for losses in exact.values())
    assert worst <= FP32_LIMIT, f"{case.setting.name} {case.task_name}: losses in fp32 differ by {worst:.1e}: {exact}"
    checked = f"fp32 losses within {worst:.1e} (limit {FP32_LIMIT:g})"
    runners = {name: made_variant(name, case, precision) for name in names}
    if precision != "fp32":
        found = _first_losses({name: runners[name] for name in exact}, checked_steps)
        limit = max(BF16_EPSILON, 2 * _apart(found[PLAIN], exact[PLAIN]))
        worst = max(_apart(found[name], exact[name]) for name in found)
        assert worst <= limit, (
            f"{case.setting.name} {case.task_name}: {precision} losses are {worst:.1e} off: {found} {exact}"
        )
        checked += f", {precision} losses within {worst:.1e} of them (limit {limit:.1e})"
    # Seconds of the processor: other processes on this core stretch the wall time, and one thread does all the work.
    clock = time.process_time if case.world.device.type == "cpu" else time.perf_counter
    seconds = take_turns(runners, rounds, 1, case.world.device, clock)
    stop(runners)
    return checked, seconds


def stop(runners: dict[str, Any]) -> None:
    """End TRL's training."""
    if TRL in runners:
        runners[TRL].stop()


def _first_losses(runners: dict[str, Any], steps: int) -> dict[str, list[float]]:
    for _ in range(steps + 1):  # TRL logs a step within the next one
        for runner in runners.values():
            runner()
    return {name: runner.losses[:steps] for name, runner in runners.items()}


def _apart(losses: list[float], wanted: list[float]) -> float:
    """Return the largest relative difference."""
    return max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(losses, wanted, strict=True))


def _rows(
    case: Case, names: list[str], seconds: dict[str, list[float]], peaks: dict[str, float | None]
) -> list[dict[str, Any]]:
    tokens = count_tokens(case.rows) / case.steps
    rows = []
    for name in names:
        times, floor = ratio(seconds, name, DSTRAIN), ratio(seconds, PRODUCTS, name)
        rows.append(
            {
                "setting": case.setting.name, "task": case.task_name, "variant": name, **times,
                "tokens_per_second": tokens / times["median_ms"] * 1000, "share_of_products": floor["ratio"],
                "peak_memory_mib": peaks[name],
            }
        )  # fmt: skip
    return rows


if __name__ == "__main__":
    run(measure, __doc__ or "")

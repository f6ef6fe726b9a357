"""Rules about time, memory and what happened to a run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from dstrain.report.page.verdict import MIN_ROWS, Rule, RunSummary, Verdict, format_share
from dstrain.units import format_bytes, format_duration

GIB = 2**30
DATA_WAIT_SHARE, SAVE_SHARE, EVALUATION_SHARE, PADDING_SHARE = 0.05, 0.05, 0.25, 0.25
"""Shares from which a rule speaks."""
SLOWER = 0.75
"""Tokens per second of the last quarter over those of the best quarter."""
LOW_UTILIZATION = 60.0
MIN_TIMED_SECONDS = 10.0
"""Runs with less time in steps are too short for shares."""
GROWTH_GIB = 1.0
"""Growth of the host memory of a process, in GiB, that counts as a leak."""


def outcome(run: RunSummary) -> Iterator[Verdict]:
    """Say how the run ended, or how far it is."""
    progress = run.progress
    position = f"step {progress.step}" + (f" of {progress.total_steps}" if progress.total_steps else "")
    took = f" in {format_duration(run.time_use.total)}" if run.time_use.total else ""
    if run.state == "finished":
        yield Verdict("good", f"Finished: {position}{took}.")
    elif run.state in ("running", "starting"):
        left = progress.seconds_left
        yield Verdict("info", f"Running: {position}" + (f", about {format_duration(left)} left." if left else "."))
    elif run.state == "stopped":
        signal = next((event.get("signal") for event in reversed(run.history.find_events("stopped"))), None)
        by = f" by {signal}" if isinstance(signal, str) else ""
        yield Verdict("info", f"Stopped{by} at {position}.", "The same command continues from the last checkpoint.")
    elif run.state == "failed":
        why = run.reason or next(
            (str(event.get("what") or "") for event in reversed(run.history.find_events("failed", "out_of_memory"))), ""
        )
        yield Verdict(
            "bad", f"Failed at {position}" + (f": {why}" if why else "."), "See logs/rank-*.log in the run folder."
        )
    elif run.state == "killed":
        yield Verdict(
            "bad",
            f"Ended without a word at {position}: killed, or the host went down.",
            "The same command continues from the last checkpoint.",
        )
    else:
        yield Verdict(
            "info", f"At {position}; whether the run goes on is not known.", "`dstrain status` looks for its processes."
        )


def time_shares(run: RunSummary) -> Iterator[Verdict]:
    """Say where time was lost: data, saves, evaluations."""
    use, steps = run.time_use, run.time_use.compute + run.time_use.data_wait
    if steps < MIN_TIMED_SECONDS:
        return
    if (share := use.data_wait / steps) > DATA_WAIT_SHARE:
        workers = run.history.get_setting("data.workers", "unknown")
        text = f"{format_share(share)} of the time of the steps was spent waiting for data."
        yield Verdict(
            "warning", text, f"Raise data.workers (now {workers}) or data.prefetch, or run `dstrain prepare` first."
        )
    if (share := use.save_stall / use.total) > SAVE_SHARE:
        text = f"{format_share(share)} of the time went into checkpoints."
        yield Verdict("warning", text, "Raise save.every, or set save.background: true.")
    if (share := use.evaluation / use.total) > EVALUATION_SHARE:
        yield Verdict(
            "info",
            f"{format_share(share)} of the time went into evaluations.",
            "Raise eval.every, or evaluate fewer records.",
        )


def speed(run: RunSummary) -> Iterator[Verdict]:
    """Say whether the run became slower, and what of the computation was padding."""
    _, tokens = run.column("tokens_per_second")
    if len(tokens) >= 2 * MIN_ROWS:
        quarters = [float(np.median(part)) for part in np.array_split(tokens, 4)]
        if 0 < quarters[-1] < SLOWER * max(quarters):
            text = (
                f"The run became slower: {max(quarters):.0f} tokens/s at best, {quarters[-1]:.0f} in the last quarter."
            )
            yield Verdict("warning", text, "Look for other work on the host, and at the time of a step below.")
    _, padding = run.column("padding")
    if len(padding) >= MIN_ROWS and (share := float(padding.mean())) > PADDING_SHARE:
        text = f"{format_share(share)} of the computed tokens were padding."
        yield Verdict("info", text, "Set batch.packing, or batch.tokens_per_micro.")
    _, busy = run.column("gpu_utilization")
    if len(busy) >= MIN_ROWS and float(busy.mean()) < LOW_UTILIZATION:
        yield Verdict(
            "info",
            f"The GPUs were busy {busy.mean():.0f} % of the time.",
            "Raise batch.micro, or look at waiting for data.",
        )


def memory(run: RunSummary) -> Iterator[Verdict]:
    """Compare predicted and measured memory, and look at that of the host."""
    for event in run.history.find_events("memory")[-1:]:
        predicted, measured = event.get("predicted_bytes"), event.get("measured_bytes")
        if isinstance(predicted, int) and isinstance(measured, int) and predicted > 0 and measured > 0:
            # On a CPU most of the prediction is a reserve for libraries and buffers that small runs do not touch.
            on_gpu = "predicted_host_bytes" in event
            sizes = f"predicted {format_bytes(predicted)}, " * on_gpu + f"measured {format_bytes(measured)}"
            text = f"Memory of a process: {sizes} after two steps."
            yield Verdict("warning" if measured > 1.1 * predicted else "info", text)
    _, available = run.column("available_memory_gib")
    if len(available) and available.min() < 2:
        yield Verdict(
            "warning",
            f"Only {format_bytes(available.min() * GIB)} of host memory was left at the least.",
            "Lower data.workers, or offload less.",
        )
    _, resident = run.column("resident_memory_gib")
    if len(resident) >= 2 * MIN_ROWS:
        settled, last = (
            float(np.median(resident[len(resident) // 4 : len(resident) // 2])),
            float(np.median(resident[-MIN_ROWS // 2 :])),
        )
        if last > settled + GROWTH_GIB and last > 1.3 * settled:
            text = f"The host memory of a process grew from {settled:.1f} to {last:.1f} GiB."
            yield Verdict("warning", text, "It may run out in a longer run: look for a leak in the task or the data.")


def event_counts(run: RunSummary) -> Iterator[Verdict]:
    """Count resumes, failed allocations, stalls, warnings and damaged lines."""
    history = run.history
    if resumes := len(history.find_events("resumed")):
        sizes = [
            event["world_size"] for event in history.find_events("started") if isinstance(event.get("world_size"), int)
        ]
        ranks = f", with {', then '.join(map(str, sizes))} processes" if len(set(sizes)) > 1 else ""
        yield Verdict("info", f"Resumed {_times(resumes)}{ranks}.")
    if count := len(history.find_events("out_of_memory")):
        yield Verdict(
            "bad",
            f"Ran out of memory {_times(count)}.",
            "`dstrain plan` lists presets that fit; batch.on_oom: shrink continues with less.",
        )
    reduced = [str(event.get("change")) for event in history.find_events("micro_batch_reduced")]
    if reduced:
        yield Verdict("warning", f"The micro-batch was reduced, because memory ran out: {reduced[-1]}.")
    if count := len(history.find_events("stalled")):
        yield Verdict("warning", f"Processes stood still {_times(count)}.", "Event stalled names the ranks.")
    if count := len(history.find_events("warning")):
        yield Verdict("info", f"{count} warning{'s' * (count > 1)}: see the events.")
    if history.damaged_lines:
        yield Verdict(
            "warning", f"{history.damaged_lines} damaged lines of metrics.jsonl or events.jsonl were left out."
        )


def learning_rate(run: RunSummary) -> Iterator[Verdict]:
    """Say what is left of the learning rate's schedule in a run that ended early."""
    _, lr = run.column("lr")
    done = run.progress.step / run.progress.total_steps if run.progress.total_steps else math.nan
    if run.state in ("stopped", "failed", "killed") and len(lr) and done < 1:
        yield Verdict(
            "info", f"The run ended after {format_share(done)} of its steps, with the learning rate at {lr[-1]:.3g}."
        )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


OUTCOME_RULES: tuple[Rule, ...] = (outcome,)
RESOURCE_RULES: tuple[Rule, ...] = (learning_rate, time_shares, speed, memory, event_counts)

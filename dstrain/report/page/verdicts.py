"""Verdicts of a report: rules on learning and on resources."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from dstrain.config.schema import LOWER_IS_BETTER
from dstrain.report.progress import Progress, State, TimeUse, measure_progress, measure_time_use
from dstrain.report.run_history import RunHistory
from dstrain.units import format_bytes, format_duration

Level = Literal["good", "info", "warning", "bad"]
MIN_ROWS = 8
"""Rows of training below which nothing is said about a column."""


@dataclass(frozen=True)
class Verdict:
    """A finding in words, and what to do about it."""

    level: Level
    text: str
    advice: str = ""


@dataclass(frozen=True)
class RunSummary:
    """A run as the page shows it."""

    history: RunHistory
    state: State
    reason: str = ""
    """Why the run failed, if that is known."""
    checkpoints: Sequence[Mapping[str, Any]] = ()
    """As `dstrain checkpoints --json` prints them."""

    @property
    def is_live(self) -> bool:
        """True if the run goes on."""
        return self.state in ("running", "starting")

    @cached_property
    def progress(self) -> Progress:
        """Position and speed of the run."""
        return measure_progress(self.history)

    @cached_property
    def time_use(self) -> TimeUse:
        """Where the time of the run went."""
        return measure_time_use(self.history)

    def column(self, name: str, split: str = "train") -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return (steps, values) of a column without NaN; empty arrays if it is absent."""
        columns = (self.history.train if split == "train" else self.history.eval).columns
        steps, values = np.array(columns["step"]), np.array(columns.get(name, []))
        if len(values) != len(steps):
            return np.zeros(0), np.zeros(0)
        finite = np.isfinite(values)
        return steps[finite], values[finite]

    def is_lower_better(self, name: str) -> bool:
        """Return True if lower values of a metric are better."""
        if name == self.history.get_setting("eval.metric"):
            return self.history.get_setting("eval.best") != "max"
        return name.endswith(LOWER_IS_BETTER)


Rule = Callable[[RunSummary], Iterator[Verdict]]


def format_number(value: float) -> str:
    """Return a number with three significant digits, or four where it has a thousand."""
    return f"{value:.4g}" if abs(value) >= 1000 else f"{value:.3g}"


def format_share(share: float) -> str:
    """Return 0.124 as `12 %`; a share below one percent with a digit more."""
    return f"{100 * share:.0f} %" if share >= 0.01 else f"{100 * share:.1f} %"


MIN_EVALUATIONS = 3
RISE_OF_LOSS = 1.1
"""The last quarter of the loss over its lowest quarter, from which the loss is said to rise."""
FALL_OF_LOSS = 0.99
"""The last quarter of the loss over the first, above which it has not fallen."""
OVERFITTING = 1.02
"""The last loss of evaluations over their lowest; for other metrics the same part of the best value."""
LAST_GAIN = 0.1
"""Part of the whole gain that the last third of the evaluations must bring to count as still improving."""
SPIKE = 20.0
"""A gradient norm over the median of the run."""


def training_loss(run: RunSummary) -> Iterator[Verdict]:
    """Say whether the training loss rises, stands or falls."""
    _, loss = run.column("loss")
    if len(loss) < MIN_ROWS:
        return
    quarters = [float(np.median(part)) for part in np.array_split(loss, 4)]
    first, last, lowest = quarters[0], quarters[-1], min(quarters)
    lr = run.history.get_setting("optim.lr", "its default")
    if last > lowest + (RISE_OF_LOSS - 1) * abs(lowest) and last > lowest + float(np.std(loss)) / 4:
        change = f"{format_number(lowest)} in its best quarter, {format_number(last)} in the last one"
        yield Verdict(
            "bad",
            f"The training loss rises: {change}; the run diverges.",
            f"Lower optim.lr (now {lr}), or lengthen optim.warmup.",
        )
    elif last > first - (1 - FALL_OF_LOSS) * abs(first):
        text = f"The training loss has not fallen: {format_number(first)} at first, {format_number(last)} at the end."
        yield Verdict("warning", text, f"Check the data, optim.lr (now {lr}) and which weights are trained.")
    else:
        change = f"from {format_number(first)} to {format_number(last)}"
        yield Verdict("good", f"The training loss fell {change} (medians of the first and last quarter).")


def evaluation(run: RunSummary) -> Iterator[Verdict]:
    """Say whether the metric of `eval.metric` still improves, and where it was best."""
    name = str(run.history.get_setting("eval.metric", "loss"))
    steps, values = run.column(name, "eval")
    if not len(run.history.eval):
        if len(run.history.train) >= MIN_ROWS and run.state != "running":
            yield Verdict(
                "info",
                "The run has no evaluation, so overfitting cannot be seen.",
                "Set data.eval or data.eval_fraction.",
            )
        return
    if len(values) < MIN_EVALUATIONS:
        return
    scores = -values if run.is_lower_better(name) else values
    best, third = int(np.argmax(scores)), max(1, len(scores) // 3)
    gain, last_gain = scores[best] - scores[0], scores[-third:].max() - scores[:-third].max()
    verb = "falling" if run.is_lower_better(name) else "rising"
    where = f"{format_number(values[best])} at step {int(steps[best])}"
    noise = _standard_error(run, name, float(values[best]))
    if gain <= 0:
        yield Verdict(
            "warning", f"Eval {name} was never better than at the first evaluation ({format_number(values[0])})."
        )
    elif gain < noise:
        change = f"{format_number(values[0])} at first, best {where}"
        error = f"standard error {format_number(noise)} for this number of records"
        yield Verdict(
            "info", f"Eval {name} has not changed beyond chance: {change} ({error}).", "Evaluate more records."
        )
    elif best >= len(values) - third and last_gain > LAST_GAIN * gain:
        yield Verdict("info", f"Eval {name} is still {verb}: best {where}.", _continue_advice(run))
    elif not _ends_lower(scores):
        yield Verdict("good", f"Eval {name} has levelled off: best {where}.")
    elif name != "loss":  # of the loss `overfitting` speaks
        yield Verdict("warning", f"Eval {name} was best with {where}, and is {format_number(values[-1])} now.")


def _ends_lower(scores: NDArray[np.float64]) -> bool:
    """Return True if the last value is clearly below the highest, which came before."""
    best = scores.max()
    # Of a metric around 0 a part of its value is nothing, so its range counts.
    return bool(best - scores[-1] > (OVERFITTING - 1) * max(abs(best), best - scores.min()))


def _standard_error(run: RunSummary, name: str, value: float) -> float:
    """Return the standard error of a fraction of the evaluated samples; 0 for other metrics."""
    count = next((event.get("eval_samples") for event in reversed(run.history.find_events("started"))), None)
    is_fraction = name.endswith(("accuracy", "exact_match")) and "token" not in name and 0 <= value <= 1
    return math.sqrt(value * (1 - value) / count) if is_fraction and isinstance(count, int) and count > 0 else 0.0


def _continue_advice(run: RunSummary) -> str:
    if run.is_live:
        return ""
    _, lr = run.column("lr")
    if len(lr) > 1 and lr[-1] < 0.05 * lr.max():
        return "The learning rate has reached its end: for more steps start a longer run, whose schedule is longer too."
    return "More steps may help."


def overfitting(run: RunSummary) -> Iterator[Verdict]:
    """Say whether the loss of evaluations rises while that of training falls."""
    steps, values = run.column("loss", "eval")
    _, train = run.column("loss")
    if len(values) < MIN_EVALUATIONS or len(train) < MIN_ROWS:
        return
    best = int(np.argmin(values))
    has_fallen = np.median(train[-len(train) // 4 :]) < np.median(train[: len(train) // 2])
    if has_fallen and _ends_lower(-values):
        text = (
            f"Overfitting: eval loss was lowest at step {int(steps[best])} ({format_number(values[best])}) and is "
            f"{format_number(values[-1])} now, while the training loss falls."
        )
        fix = "Take an earlier checkpoint (`dstrain export --step best`), train fewer epochs, or add data."
        yield Verdict("warning", text, fix)


def gradients(run: RunSummary) -> Iterator[Verdict]:
    """Say how often gradients were clipped, and where their norm jumped."""
    steps, norms = run.column("grad_norm")
    clip = run.history.get_setting("optim.clip")
    if len(norms) < MIN_ROWS:
        return
    if isinstance(clip, (int, float)) and clip > 0 and (share := float((norms > clip).mean())) > 0.9:
        text = f"The gradient norm was above optim.clip ({clip:g}) in {format_share(share)} of the rows"
        yield Verdict("info", f"{text}: nearly every step had the same length.", "Lower optim.lr, or raise optim.clip.")
    median = float(np.median(norms))
    spikes = steps[norms > SPIKE * median] if median > 0 else steps[:0]
    if len(spikes):
        named = ", ".join(str(int(step)) for step in spikes[:5]) + (
            f" and {len(spikes) - 5} more" if len(spikes) > 5 else ""
        )
        yield Verdict(
            "warning",
            f"The gradient norm jumped to over {SPIKE:g} times its median at step {named}.",
            "Look at the samples of these steps.",
        )


def skipped_steps(run: RunSummary) -> Iterator[Verdict]:
    """Say how many steps were skipped."""
    skipped = len(run.history.find_events("step_skipped"))
    taken = max(run.progress.step, 1)
    if skipped:
        text = f"{skipped} of {taken} steps were skipped, because the loss or a gradient was not finite."
        level: Level = "bad" if skipped > 0.05 * taken else "warning"
        yield Verdict(level, text, "Event step_skipped names the samples; lower optim.lr, or check them.")
    for event in run.history.find_events("parameters_without_update")[-1:]:
        count = sum(
            len(names) for key in ("without_gradient", "not_moved") if isinstance(names := event.get(key), list)
        )
        yield Verdict(
            "warning",
            f"{count or 'Some'} trainable parameters had no gradient or did not change.",
            "Event parameters_without_update names them.",
        )


def data(run: RunSummary) -> Iterator[Verdict]:
    """Repeat what the last start warned of in the data: labels of one kind, few samples left or held out."""
    sentences: list[str] = []
    for event in run.history.find_events("started", "warning"):
        if event["event"] == "started":
            sentences = []
        elif event.get("about") == "data":
            sentences.append(str(event["what"]))
    for sentence in dict.fromkeys(sentences):
        yield Verdict("warning", f"{sentence[:1].upper()}{sentence[1:]}.")


LEARNING_RULES: tuple[Rule, ...] = (data, training_loss, evaluation, overfitting, gradients, skipped_steps)


GIB = 2**30
SLOWER = 0.75
"""Tokens per second of the last quarter over those of the best quarter."""
MIN_TIMED_SECONDS = 10.0
"""Runs with less time in steps are too short for shares."""
GROWTH_GIB = 1.0
"""Growth of the host memory of a process, in GiB, that counts as a leak."""
CONTINUE = "The same command continues from the last checkpoint."

OUTCOMES: Mapping[State, tuple[Level, str, str]] = {
    "starting": ("info", "Running: {position}{left}.", ""),
    "running": ("info", "Running: {position}{left}.", ""),
    "finished": ("good", "Finished{early}: {position}{took}.", ""),
    "stopped": ("info", "Stopped{by} at {position}.", CONTINUE),
    "failed": ("bad", "Failed at {position}{why}", "See logs/rank-*.log in the run folder."),
    "killed": ("bad", "Ended without a word at {position}: killed, or the host went down.", CONTINUE),
    "unknown": (
        "info",
        "At {position}; whether the run goes on is not known.",
        "`dstrain status` looks for its processes.",
    ),
}
"""State of a run -> (level, text, advice)."""


def outcome(run: RunSummary) -> Verdict:
    """Say how the run ended, or how far it is."""
    progress, history = run.progress, run.history
    signal = next((event.get("signal") for event in reversed(history.find_events("stopped"))), None)
    failures = reversed(history.find_events("failed", "out_of_memory"))
    why = run.reason or next((str(event.get("what") or "") for event in failures), "")
    is_early = progress.total_steps is not None and progress.step < progress.total_steps
    level, text, advice = OUTCOMES[run.state]
    text = text.format(
        position=f"step {progress.step}" + (f" of {progress.total_steps}" if progress.total_steps else ""),
        left=f", about {format_duration(progress.seconds_left)} left" if progress.seconds_left else "",
        took=f" in {format_duration(run.time_use.total)}" if run.time_use.total else "",
        by=f" by {signal}" if isinstance(signal, str) else "",
        early=" by early stopping" if history.find_events("early_stopping") and is_early else "",
        why=f": {why}" if why else ".",
    )
    return Verdict(level, text, advice)


def _mean(run: RunSummary, name: str) -> float:
    """Return the mean of a column of training, NaN if it has too few rows."""
    _, values = run.column(name)
    return float(values.mean()) if len(values) >= MIN_ROWS else math.nan


TIME_LIMITS: tuple[tuple[Callable[[RunSummary], float], float, Level, str, str], ...] = (
    (
        lambda run: run.time_use.data_wait / (run.time_use.compute + run.time_use.data_wait), 0.05, "warning", "{} of the time of the steps was spent waiting for data.",
        "Raise data.workers (now {workers}) or data.prefetch, or run `dstrain prepare` first.",
    ),
    (
        lambda run: run.time_use.save_stall / run.time_use.total, 0.05, "warning",
        "{} of the time went into checkpoints.", "Raise save.every, or set save.background: true.",
    ),
    (
        lambda run: run.time_use.evaluation / run.time_use.total, 0.25, "info",
        "{} of the time went into evaluations.", "Raise eval.every, or evaluate fewer records.",
    ),
)  # fmt: skip
"""(share of time, the share from which a rule speaks, level, text, advice)."""
PADDING_LIMIT, UTILIZATION_LIMIT = 0.25, 60.0


def time_shares(run: RunSummary) -> Iterator[Verdict]:
    """Say where time was lost: data, saves, evaluations."""
    if run.time_use.compute + run.time_use.data_wait < MIN_TIMED_SECONDS:
        return
    workers = run.history.get_setting("data.workers", "unknown")
    for measure, limit, level, text, advice in TIME_LIMITS:
        if (share := measure(run)) > limit:
            yield Verdict(level, text.format(format_share(share)), advice.format(workers=workers))


def speed(run: RunSummary) -> Iterator[Verdict]:
    """Say whether the run became slower, and what of the computation was padding."""
    _, tokens = run.column("tokens_per_second")
    if len(tokens) >= 2 * MIN_ROWS:
        quarters = [float(np.median(part)) for part in np.array_split(tokens, 4)]
        best, last = max(quarters), quarters[-1]
        if 0 < last < SLOWER * best:
            text = f"The run became slower: {best:.0f} tokens/s at best, {last:.0f} in the last quarter."
            yield Verdict("warning", text, "Look for other work on the host, and at the time of a step below.")
    if (padding := _mean(run, "padding")) > PADDING_LIMIT:
        text = f"{format_share(padding)} of the computed tokens were padding."
        yield Verdict("info", text, "Set batch.packing, or batch.tokens_per_micro.")
    if (busy := _mean(run, "gpu_utilization")) < UTILIZATION_LIMIT:
        text = f"The GPUs were busy {busy:.0f} % of the time."
        yield Verdict("info", text, "Raise batch.micro, or look at waiting for data.")


def memory(run: RunSummary) -> Iterator[Verdict]:
    """Compare predicted and measured memory, and look at that of the host."""
    for event in run.history.find_events("memory")[-1:]:
        predicted, measured = event.get("predicted_bytes"), event.get("measured_bytes")
        if isinstance(predicted, int) and isinstance(measured, int) and predicted > 0 and measured > 0:
            # On a CPU most of the prediction is a reserve for libraries and buffers that small runs do not touch.
            on_gpu = "predicted_host_bytes" in event
            sizes = f"predicted {format_bytes(predicted)}, " * on_gpu + f"measured {format_bytes(measured)}"
            kind = "tensors of a process" if on_gpu else "a process"
            text = f"Memory of {kind}: {sizes} after two steps."
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


COUNTED_EVENTS: Mapping[str, tuple[Level, str, str]] = {
    "out_of_memory": (
        "bad",
        "Ran out of memory {times}.",
        "`dstrain plan` lists presets that fit; batch.on_oom: shrink finds a micro-batch that fits.",
    ),
    "micro_batch_reduced": ("warning", "The longest batch did not fit into memory: {last[change]}.", ""),
    "stalled": ("warning", "Processes stood still {times}.", "Event stalled names the ranks."),
    "warning": ("info", "{count} warning{s}: see the events.", ""),
}
"""Event -> (level, text, advice)."""


def event_counts(run: RunSummary) -> Iterator[Verdict]:
    """Count resumes, failed allocations, stalls, warnings and damaged lines."""
    history = run.history
    if resumes := len(history.find_events("resumed")):
        sizes = [size for event in history.find_events("started") if isinstance(size := event.get("world_size"), int)]
        ranks = f", with {', then '.join(map(str, sizes))} processes" if len(set(sizes)) > 1 else ""
        yield Verdict("info", f"Resumed {_times(resumes)}{ranks}.")
    for name, (level, text, advice) in COUNTED_EVENTS.items():
        if events := history.find_events(name):
            count, last = len(events), {"change": None} | events[-1]
            text = text.format(count=count, times=_times(count), s="s" * (count > 1), last=last)
            yield Verdict(level, text, advice)
    if history.damaged_lines:
        text = f"{history.damaged_lines} damaged lines of metrics.jsonl or events.jsonl were left out."
        yield Verdict("warning", text)


def learning_rate(run: RunSummary) -> Iterator[Verdict]:
    """Say what is left of the learning rate's schedule in a run that ended early."""
    _, lr = run.column("lr")
    done = run.progress.step / run.progress.total_steps if run.progress.total_steps else math.nan
    if run.state in ("finished", "stopped", "failed", "killed") and len(lr) and done < 1:
        yield Verdict(
            "info", f"The run ended after {format_share(done)} of its steps, with the learning rate at {lr[-1]:.3g}."
        )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


RESOURCE_RULES: tuple[Rule, ...] = (learning_rate, time_shares, speed, memory, event_counts)

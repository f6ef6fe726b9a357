"""Rules about what a run learned: loss, evaluation, learning rate and gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dstrain.report.page.verdict import MIN_ROWS, Level, Rule, RunSummary, Verdict, format_number, format_share

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
    if run.state in ("running", "starting"):
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


LEARNING_RULES: tuple[Rule, ...] = (training_loss, evaluation, overfitting, gradients, skipped_steps)

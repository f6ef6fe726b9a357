"""The training loop: the order of what happens in a step."""

from __future__ import annotations

from dstrain.batch import Progress
from dstrain.train.run import Run


def train(run: Run) -> Progress:
    """Train until all steps are taken or a signal asks for a stop; return where it ended. Collective."""
    progress = run.resume()
    steps, is_last = run.iter_steps(progress), progress.step >= run.total_steps
    while not is_last:
        with run.phase("step", progress):
            step = next(steps)  # in the phase: a rank that waits for data keeps the others waiting
            result = run.take_step(step, progress)
            if result.out_of_memory:  # all ranks have dropped the step: take it again, in smaller passes
                run, steps = run.shrink_micro_batch(result, progress, steps)
                continue
            progress = progress.advance(step.num_samples)
            run.end_step(result, progress)
            due = run.due_after(progress, run.should_stop(progress))
            run.write_profile(progress, due.is_last)
            if due.log:
                run.log_train_metrics(progress)
            metric = run.evaluate(progress) if due.eval else None
            due = run.due_after_evaluation(progress, due)
            if due.save:
                run.save_checkpoint(progress, metric, due.is_last)
            is_last = due.is_last
    return progress

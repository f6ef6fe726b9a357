"""The loop: in which order things happen. To change the order, edit the order."""

from __future__ import annotations

from dstrain.batch import Progress
from dstrain.train.engine.deepspeed import seed_step
from dstrain.train.run import Run


def train(run: Run) -> Progress:
    """Train until the budget is spent or someone asks us to stop. Collective."""
    progress = run.resume()
    if progress.step >= run.steps:
        return progress
    run.interrupt.begin()
    run.at("step", progress)
    for batches in run.loader.steps(progress.samples):
        seed_step(run.seed, progress.step, run.engine.world.rank)
        run.profile.begin(progress.step + 1)
        run.saving.grace.begin()
        lr = run.lr(progress.step)
        result = run.engine.step(batches, lr)
        run.learning.watch(result, lr)
        progress = progress.after(len(run.loader.plan.ids(progress.samples)))
        run.meter.add(result)
        run.guard.watch(result, progress)
        run.saving.grace.stepped()
        done, stop = progress.step >= run.steps, run.stops(progress)
        run.end_profile(progress, done or stop)
        if done:
            run.guard.end(progress)
        metric = None
        if run.log.due(progress.step) or done or stop:
            run.write(progress)
        if done or (run.test.due(progress.step) and not stop):
            metric = run.evaluate(progress)
        if run.save.due(progress.step) or done or stop:
            run.keep(progress, metric, last=done or stop)
        if done or stop:
            break
        run.at("step", progress)
    run.at("", progress)
    return progress

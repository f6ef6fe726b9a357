"""The loop: in which order things happen. To change the order, edit the order."""

from __future__ import annotations

from dstrain.batch import Progress
from dstrain.train.engine.base import seed_step
from dstrain.train.run import Run


def train(run: Run) -> Progress:
    """Train until the budget is spent or someone asks us to stop. Collective."""
    progress = run.resume()
    if progress.step >= run.total_steps:
        return progress
    run.signal_handler.begin_training()
    run.set_phase("step", progress)
    for batches in run.loader.iter_steps(progress.samples):
        seed_step(run.seed, progress.step, run.engine.world.rank)
        run.profiler.begin_step(progress.step + 1)
        run.saver.grace.begin_step()
        lr = run.lr_schedule(progress.step)
        result = run.engine.step(batches, lr)
        run.trainability.check_step(result, lr)
        progress = progress.advance(len(run.loader.sampler.step_ids(progress.samples)))
        run.meter.add(result)
        run.nonfinite_guard.check_step(result, progress)
        run.saver.grace.end_step()
        done, stop = progress.step >= run.total_steps, run.should_stop(progress)
        run.end_profiled_step(progress, done or stop)
        if done:
            run.nonfinite_guard.check_run(progress)
        metric = None
        if run.log_every.is_due(progress.step) or done or stop:
            run.log_train_metrics(progress)
        if done or (run.eval_every.is_due(progress.step) and not stop):
            metric = run.evaluate(progress)
        if run.save_every.is_due(progress.step) or done or stop:
            run.save_checkpoint(progress, metric, is_last=done or stop)
        if done or stop:
            break
        run.set_phase("step", progress)
    run.set_phase("", progress)
    return progress

"""Preparation of a run folder for the start that was decided."""

from __future__ import annotations

from dstrain.report.run_log import RunLog
from dstrain.train.checkpoint.checkpoints import CheckpointStore
from dstrain.train.checkpoint.disk_space import ensure_disk_space
from dstrain.train.resume.decision import StartDecision
from dstrain.train.state.manifest import CheckpointInfo


def prepare_start(
    start: StartDecision, checkpoints: CheckpointStore, run_log: RunLog, prune_when_full: bool
) -> CheckpointInfo | None:
    """Make the run folder fit the start: no partial or newer checkpoints, no later rows in metrics.jsonl.

    Returns the checkpoint to continue from, None if a new run begins. Collective.
    """
    # First: it may restore the name of the checkpoint to continue from.
    removed = checkpoints.remove_incomplete()
    start = start.after_cleanup(checkpoints)
    checkpoint = start.checkpoint
    if checkpoint is not None and prune_when_full:  # the events below take room
        ensure_disk_space(checkpoints, checkpoint.size, True, run_log.log_event)
    for name in removed:
        run_log.log_event("partial_checkpoint_removed", checkpoint=name)
    for info in start.skipped:
        run_log.log_event("checkpoint_skipped", checkpoint=info.path.name, why=info.status)
    # Rows after the checkpoint will be written again.
    dropped = run_log.truncate_after(start.step)
    if checkpoint is not None:
        why = f"the run continues from step {checkpoint.step}"
        for name in checkpoints.supersede_newer(checkpoint):
            run_log.log_event("checkpoint_superseded", checkpoint=name, why=why)
        run_log.log_event("resumed", step=checkpoint.step, checkpoint=str(checkpoint.path), rows_dropped=dropped)
    return checkpoint

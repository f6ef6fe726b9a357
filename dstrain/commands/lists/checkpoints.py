"""dstrain checkpoints: the checkpoints of a run."""

from __future__ import annotations

import json
from pathlib import Path

from dstrain.errors import UsageError
from dstrain.units import format_bytes


def list_checkpoints(run_dir: Path, verify: bool, as_json: bool) -> tuple[str, bool]:
    """Return (a line per checkpoint, newest first; True where all are complete)."""
    from dstrain.train.checkpoint.select import list_checkpoint_rows

    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        raise UsageError(f"{run_dir}: has no checkpoints folder; give the folder of a run")
    rows = list_checkpoint_rows(folder, verify)
    whole = all(row["state"] == "whole" for row in rows)
    if as_json:
        return json.dumps(rows), whole
    lines = [f"{'step':>8} {'size':>10} {'processes':>9} {'stage':>5} {'metric':>10}  state"]
    for row in rows:
        metric = "" if row["metric"] is None else f"{row['metric']:.4g}"
        state = f"{row['state']}{', best' if row['best'] else ''}"
        size = format_bytes(int(row["bytes"] or 0))
        lines.append(
            f"{row['step']:>8} {size:>10} {row['world_size'] or '':>9} {row['zero_stage'] if row['zero_stage'] is not None else '':>5} {metric:>10}  {state}"
        )
    return "\n".join(lines), whole

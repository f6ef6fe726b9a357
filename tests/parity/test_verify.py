"""`dstrain verify` takes two steps of ZeRO in two processes, and compares them with plain PyTorch."""

from __future__ import annotations

from pathlib import Path

from dstrain.verify.zero import STAGES, compare_updates, plain_updates, write_recipe
from tests.unit.verify.families import shrunk, write_config
from tests.workers import Workers


def test_zero_takes_the_steps_of_plain_pytorch(two: Workers, tmp_path: Path) -> None:
    small = shrunk(write_config("qwen3_moe", tmp_path / "base"), tmp_path / "work")
    task, work = write_recipe(small), small.folder.parent
    two("tests.parity.verify_cases:write_updates_of_worker", work=work)
    results = [compare_updates(work, stage, plain_updates(task), "") for stage in STAGES]
    assert [(one.check, one.state) for one in results] == [("ZeRO 2", "ok"), ("ZeRO 3", "ok")], results

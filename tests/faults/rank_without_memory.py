"""A rank whose passes run out of memory: it trains as `dstrain train` does, with the limits in the variable LIMIT."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.memory_limits import limit_micro_batch


def limit_passes(frame: Any, event: str, argument: Any) -> None:
    """For `sys.setprofile`: limit the engine at the first step of a run."""
    if (
        event == "call"
        and frame.f_code.co_name == "take_step"
        and frame.f_globals["__name__"] == "dstrain.training.run"
    ):
        sys.setprofile(None)
        limit_micro_batch(frame.f_locals["self"].engine, **json.loads(os.environ["LIMIT"]))


def train(folder: Path) -> None:
    """Train recipe.yaml in the folder as one rank of a launch, and write its output into said.txt; end with its code."""
    from dstrain.cli import main

    said = os.open(folder / "said.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    sys.setprofile(limit_passes)
    code = 0
    try:
        main(["train", str(folder / "recipe.yaml"), "--run-dir", str(folder / "run")])
    except SystemExit as ended:
        code = int(ended.code or 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a launcher does not wait for what a thread still holds either

"""docs/quickstart.md runs as it is written: its commands in their order, on the demo's data and its own recipe."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.recipe_args import RECIPES_DIR
from tests.workers import ROOT

PAGE = (ROOT / "docs/quickstart.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.S)
    for line in block.splitlines()
    if line.startswith("dstrain ")
]
NOT_RUN = ("dstrain generate runs/dpo", "dstrain chat runs/dpo", "dstrain init rm --to rm.yaml")
"""Commands on a policy that the page does not train, and one that would write over the page's recipe."""
RECORDS = 48
"""Records of each split: enough for some steps, few enough for a test."""


def test_the_page_has_a_command_for_every_stage() -> None:
    stages = {line.split()[1] for line in COMMANDS}
    assert {"recipes", "data", "prepare", "init", "train", "evaluate", "checkpoints", "generate", "export"} <= stages


@pytest.mark.slow
def test_the_page_runs_as_it_is_written(tmp_path: Path) -> None:
    for name, source in (("pairs", "train"), ("held-out", "eval")):
        lines = (RECIPES_DIR / f"demo-rm/{source}.jsonl").read_text(encoding="utf-8").splitlines()
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines[:RECORDS]) + "\n", encoding="utf-8")
    (recipe,) = re.findall(r"```yaml\n(task:.*?)```", PAGE, flags=re.S)
    (tmp_path / "rm.yaml").write_text(recipe, encoding="utf-8")
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        if line.startswith(NOT_RUN):
            continue
        if words[-1] == "runs/demo-rm":  # what `make demo` left
            train = [sys.executable, "-m", "dstrain", "train", "demo-rm", "--set", "steps=2"]
            subprocess.run(train, cwd=tmp_path, check=True, capture_output=True, timeout=300)
        done = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    assert (tmp_path / "reward-model/model.safetensors").exists()
    read_checkpoint_by_hand(tmp_path)


def read_checkpoint_by_hand(folder: Path) -> None:
    """Run the blocks of docs/checkpoints.md that read the run's best checkpoint without dstrain."""
    page = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", page, flags=re.S) if "runs/rm" in block]
    names: dict[str, Any] = {}
    exec(code.replace("runs/rm/", f"{folder}/runs/rm/"), names)
    assert any("/exp_avg@" in name for name in names["found"])
    (script,) = re.findall(r"```\n(cd checkpoints/.*?)```", page, flags=re.S)
    script = script.replace("step-00000200", "best").replace("python -", f"{sys.executable} -")
    done = subprocess.run(["sh", "-ec", script], cwd=folder / "runs/rm", capture_output=True, text=True, check=True)
    states = {line.split()[0] for line in done.stdout.splitlines()}
    assert states == {"complete"}, done.stdout

"""The counts of tools/trace_ways.py."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from dstrain.commands.recipe_args import TrainRequest
from dstrain.commands.train import launch_training
from tools.trace_ways import trace


def test_calls_at_import_are_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "dstrain"
    package.mkdir()
    (package / "traced_inner.py").write_text("def inner(): pass\ninner()\n", encoding="utf-8")
    (package / "traced_outer.py").write_text(
        "import traced_inner\ndef at_import(): pass\ndef asked(): return traced_inner.inner()\nat_import()\n",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(package))

    def work() -> None:
        module = importlib.import_module("traced_outer")
        module.asked()
        module.asked()

    tracer = trace(work)
    for name in ("traced_inner", "traced_outer"):
        del sys.modules[name]
    assert dict(tracer.calls) == {("traced_outer.py", "asked"): 2, ("traced_inner.py", "inner"): 2}
    assert tracer.moves == 4


def test_a_dry_run_makes_the_task_once_in_at_most_40_000_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    request = TrainRequest(recipe="demo-rm", run_dir=tmp_path / "run")
    tracer = trace(lambda: launch_training(request, {"num_gpus": 1}, dry_run=True))
    assert tracer.calls["tasks/common/registry.py", "make_task"] == 1
    assert tracer.calls.total() <= 40_000

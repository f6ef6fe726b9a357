"""Measure a process's private host memory after a run's models are loaded, before an engine is built.

python -m benchmarks.loading [--shape 100m] [--task dpo]

Linux only. Counts the anonymous pages of /proc/self/smaps_rollup: unchanged pages of mapped files are in the page cache,
shared by all processes of a host.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, made_recipe, run

WAYS = {"in fp32": {"dtype": "float32"}, "in the run's precision": {}}
"""How weights are loaded for a run in bf16 -> model section of the recipe."""
MARK = "measured: "


def measure(*, shape: str = "100m", task: str = "dpo", files: str = "bfloat16") -> dict[str, Any]:
    """Check that the cast weights are equal, then measure bytes per parameter of policy and reference."""
    folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
    try:
        save_base(folder, shape, files)
        found = {name: in_a_process(folder, shape, task, more) for name, more in WAYS.items()}
    finally:
        shutil.rmtree(folder)
    digests = {one["digest"] for one in found.values()}
    assert len(digests) == 1, "the weights are others"
    rows = [
        {"weights loaded": name, "parameters": one["parameters"], "anonymous_mib": one["anonymous"] / 2**20,
         "peak_mib": one["peak"] / 2**20, "bytes_per_parameter": one["anonymous"] / one["parameters"]}
        for name, one in found.items()
    ]  # fmt: skip
    return {
        "settings": {"shape": shape, "task": task, "files": files},
        "checked": "the weights are equal to the bit once they are cast to bf16",
        "rows": rows,
    }


def save_base(folder: Path, shape: str, dtype: str) -> None:
    """Save a causal language model and its tokenizer under `base`, a tiny one under `tiny`."""
    import torch

    for name, size in (("base", shape), ("tiny", "tiny")):
        task = bf16_task(folder, size, "sft", {})
        task.build_model().to(getattr(torch, dtype)).save_pretrained(str(folder / name))
        task.export.save_extras(folder / name)


def in_a_process(folder: Path, shape: str, task: str, model: dict[str, Any]) -> dict[str, Any]:
    """Run `loaded` in a separate process."""
    wish = json.dumps({"folder": str(folder), "shape": shape, "task": task, "model": model})
    command = [sys.executable, "-m", "benchmarks.loading", "--measure", wish]
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stderr
    return dict(json.loads(lines[-1].removeprefix(MARK)))


def loaded(folder: Path, shape: str, task: str, model: dict[str, Any]) -> dict[str, Any]:
    """Return the bytes of anonymous memory of a bf16 run's models, and a digest of their bf16 weights."""
    import torch

    from dstrain.training.build_model import build_train_module

    kept = []
    for name, size in (("tiny", "tiny"), ("base", shape)):  # memory that libraries keep is allocated with the tiny one
        made = bf16_task(folder, size, task, {"config": None, "tokenizer": None, "path": str(folder / name), **model})
        before = anonymous()
        with Watch() as watch:
            kept.append(build_train_module(made))
    after, parameters = anonymous(), list(kept[-1].parameters())
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().bfloat16().view(-1).view(torch.int16).numpy().tobytes())
    count = sum(parameter.numel() for parameter in parameters)
    return {
        "anonymous": after - before,
        "peak": watch.peak - before,
        "parameters": count,
        "digest": digest.hexdigest(),
    }


class Watch:
    """Context in which a thread samples the process's anonymous memory and keeps the maximum."""

    def __init__(self) -> None:
        self.peak = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.003):
            self.peak = max(self.peak, _status())


def _status() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def anonymous() -> int:
    """Return the anonymous memory in bytes: exact, but slow to read."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def bf16_task(folder: Path, shape: str, task: str, model: dict[str, Any]) -> Any:
    """Return the task of a bf16 run with this recipe."""
    from dstrain.config.schema import RunConfig
    from dstrain.tasks import make_task
    from dstrain.training.build_model import resolve_model_dtype

    recipe = made_recipe(folder, shape, 64)
    recipe = {**recipe, "task": task, "model": {**recipe["model"], **model}}
    return make_task(resolve_model_dtype(RunConfig.model_validate(recipe), {"bf16": {"enabled": True}}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        wish = json.loads(sys.argv[2])
        print(MARK + json.dumps(loaded(**wish | {"folder": Path(wish["folder"])})))
    else:
        run(measure, __doc__ or "")

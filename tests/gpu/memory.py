"""What each preset needs: peak memory and speed under caps that stand for cards of 8, 12, 16 and 24 GB.

    python -m tests.gpu.memory [--shape 1b] [--length 1024] [--caps 8,12,16,24] [--to memory.json]

Each (preset, cap) is a process of its own. The cap holds for torch's allocator, less `--outside` GiB for what the driver and
NCCL take beside it. A preset that reserves less than a smaller cap under a larger one is not run again; one that runs out of
memory is not tried with less. "Fits" means: built, and three steps taken, the optimizer's first among them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, certificate, made_batches, made_engine, made_task, table, wait_for

PRESETS = "zero0,zero1,zero2,zero2_offload,zero3,zero3_offload,zero3_nvme"
OPTIONS: dict[str, Any] = {
    "shape": "1b", "length": 1024, "micro": 1, "steps": 5, "precision": "bf16", "caps": "24,16,12,8", "presets": PRESETS, "outside": 1.0,
}  # fmt: skip
MARK = "measured: "


def measure(
    *, preset: str, cap: float, shape: str, length: int, micro: int, steps: int, precision: str, outside: float
) -> dict[str, Any]:
    """In a process of its own: build, step, tell. `fits` is False where the allocator gave up."""
    import torch

    from benchmarks.common import join_alone

    cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    if cuda:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (cap - outside) * 2**30 / total), 0)
    try:
        world = join_alone()
        task = made_task(shape, length, pairs=16, changes={"model": {"gradient_checkpointing": True}})
        engine = made_engine(task, preset, world, precision=precision, micro=micro)
        batches = made_batches(task, steps, micro)
        times = []
        for step in batches:
            began = time.perf_counter()
            engine.step(step, 1e-5)
            wait_for(world.device)
            times.append(time.perf_counter() - began)
    except torch.OutOfMemoryError as fault:
        return {"fits": False, "why": str(fault).splitlines()[0]}
    kept = times[2:]
    told: dict[str, Any] = {
        "fits": True,
        "tokens_per_second": sum(b.tokens for step in batches[2:] for b in step) / sum(kept),
    }
    if cuda:
        free, total = torch.cuda.mem_get_info(0)
        reserved = torch.cuda.memory_reserved(0)
        told |= {"peak_gib": torch.cuda.max_memory_allocated(0) / 2**30, "reserved_gib": torch.cuda.max_memory_reserved(0) / 2**30,
                 "outside_gib": (total - free - reserved) / 2**30}  # fmt: skip
    return told


def apart(preset: str, cap: float, settings: dict[str, Any], seconds: float = 240.0) -> dict[str, Any]:
    """`measure` in a process. What failed for another reason than memory says why, and fits neither way."""
    wish = json.dumps({"preset": preset, "cap": cap, **settings})
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    try:
        done = subprocess.run([sys.executable, "-m", "tests.gpu.memory", "--measure", wish], cwd=ROOT, env={**os.environ, **ranks},
                              capture_output=True, text=True, timeout=seconds)  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"fits": None, "why": f"no answer in {seconds:g} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if lines:
        return dict(json.loads(lines[-1].removeprefix(MARK)))
    last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return {"fits": None, "why": f"code {done.returncode}: {last[:300]}"}


def sweep(*, presets: str, caps: str, outside: float, **settings: Any) -> list[dict[str, Any]]:
    """A row for each preset and cap, the largest cap first."""
    rows = []
    for preset in presets.split(","):
        last: dict[str, Any] = {}
        for cap in sorted((float(cap) for cap in caps.split(",")), reverse=True):
            if last.get("fits") and last.get("reserved_gib", float("inf")) <= cap - outside:
                last = {**last, "why": "as under the larger cap"}
            elif last and not last["fits"]:
                last = {"fits": last["fits"], "why": "not tried: more did not do"}
            else:
                last = apart(preset, cap, {**settings, "outside": outside})
            known = ("fits", "peak_gib", "reserved_gib", "outside_gib", "tokens_per_second", "why")
            rows.append({"preset": preset, "cap_gb": cap, **{name: last.get(name) for name in known}})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def place(name: str) -> Path:
    """Where a table goes: $OUT where that is set (a lent machine brings it back), else a temporary folder."""
    return Path(os.environ.get("OUT") or tempfile.mkdtemp(prefix="dstrain-gpu-")) / name


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        import logging
        import warnings

        from dstrain.distributed.world import destroy_process_groups

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore")
        try:
            print(MARK + json.dumps(measure(**json.loads(sys.argv[2]))), flush=True)
        finally:
            destroy_process_groups()
        return
    from benchmarks.common import arguments

    told = vars(arguments(__doc__ or "", **OPTIONS))
    to = told.pop("to") or place("memory.json")
    told.pop("threads")
    result = {"certificate": certificate(), "settings": told, "rows": sweep(**told)}
    to.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(f"{name}: {value}" for name, value in result["certificate"].items()))
    print(f"\n{table(result['rows'])}\n\nwritten to {to}")


if __name__ == "__main__":
    main()

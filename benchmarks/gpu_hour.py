"""What the first hour on a real GPU measures, in stages by their worth: parity, speed, peaks of memory, all other checks.

`python -m benchmarks.gpu_hour --to FOLDER [--minutes 60]`: each stage is a process with a limit, and its output lies in
the folder. A stage that has run is not run again, so that the command can be repeated until all are done;
`FOLDER/gpu-hour.md` is written after each of them. `--minutes 15` gets as far as parity, speed and the main peaks.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import certificate

ROOT = Path(__file__).parent.parent
PYTEST = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider")
SPEED = ("-m", "benchmarks.gpu", "--tasks", "sft", "--length", "4096", "--full-rows", "1")
KERNELS_ON_AND_OFF = (
    "fused kernels,no fused kernels,gradient checkpointing and fused kernels,"
    "gradient checkpointing and no fused kernels"
)


@dataclass(frozen=True)
class Stage:
    """One process; `command` are the arguments of Python, where {to} is the folder of results."""

    name: str
    command: tuple[str, ...]
    minutes: float


STAGES = (
    Stage("a step is what its definition says", (*PYTEST, "tests/gpu/test_step.py", "tests/gpu/test_attention.py"), 5),
    Stage(
        "speed of 8B with LoRA, and of 1B, 4,096 tokens a row",
        (*SPEED, "--shapes", "8b,1b", "--micro", "2", "--variants", KERNELS_ON_AND_OFF,
         "--minutes", "6", "--to", "{to}/speed.json"),
        7,
    ),
    Stage("no waits that plain training has not", (*PYTEST, "tests/gpu/test_syncs.py"), 3),
    Stage("peaks of memory as planned", (*PYTEST, "tests/gpu/test_plan.py", "tests/gpu/test_memory.py"), 8),
    Stage("runs, resumes and saves", (*PYTEST, "tests/gpu/test_run.py", "tests/gpu/test_saving.py"), 8),
    Stage("tasks in each precision", (*PYTEST, "tests/gpu/test_tasks.py"), 15),
    Stage(
        "each feature on and off, beside TRL",
        ("-m", "benchmarks.gpu", "--tasks", "sft,rm,dpo,vlm", "--shapes", "0.5b,3b", "--minutes", "9",
         "--to", "{to}/features.json"),
        10,
    ),
    Stage(
        "all other checks",
        (*PYTEST, "tests/gpu", "--ignore", "tests/gpu/test_step.py", "--ignore", "tests/gpu/test_attention.py",
         "--ignore", "tests/gpu/test_syncs.py", "--ignore", "tests/gpu/test_plan.py", "--ignore",
         "tests/gpu/test_memory.py", "--ignore", "tests/gpu/test_run.py", "--ignore", "tests/gpu/test_saving.py",
         "--ignore", "tests/gpu/test_tasks.py"),
        15,
    ),
)  # fmt: skip
PUBLISHED: dict[str, tuple[str, float, float]] = {
    "8b": ("NeMo AutoModel, Llama 3 8B with LoRA, one H100, rows of 4,096, 402 TFLOP/s of 989", 12_473, 0.406),
    "1b": ("torchtitan, Llama 3.1 8B in full on 8 H100 with torch.compile, rows of 8,192", 6_667, 0.39),
}
"""Shape -> whose figure, tokens a second of a GPU, and MFU.

NeMo AutoModel: docs/performance-summary.md of its repository, October 2025; MFU is 402/989. torchtitan:
benchmarks/llama3_h100_202412_torchtitan.md, December 2024. It has none for 1B, so that only the MFU can be compared.
"""


def run_stage(stage: Stage, to: Path, seconds: float) -> dict[str, Any]:
    """Run a stage for at most `seconds`; return its result."""
    log = to / f"{stage.name.replace(' ', '-').replace(',', '')}.log"
    command = [sys.executable, *(word.replace("{to}", str(to)) for word in stage.command)]
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False
            )
            state = f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            state = "no time was left"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return {"state": state, "seconds": round(time.monotonic() - began), "last": lines[-1][:200] if lines else ""}


def compare_speed(file: Path) -> list[str]:
    """Return the table of measured against published speed; empty before it is measured."""
    if not file.exists():
        return []
    lines = ["| shape | variant | tokens/s | MFU | published | tokens/s | MFU | ratio of MFU |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        name, rate, mfu = PUBLISHED[row["shape"]]
        if row["mfu"] is None:
            lines.append(
                f"| {row['shape']} | {row['variant']} | {row['note'] or 'no MFU'} | | {name} | {rate} | {mfu} | |"
            )
            continue
        cells = [row["shape"], row["variant"], f"{row['tokens_per_second']:.0f}", f"{row['mfu']:.3f}"]
        cells += [name, str(rate), str(mfu), f"{row['mfu'] / mfu:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_page(to: Path, results: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    lines = ["# The first hour on a GPU", ""]
    lines += [f"- {key}: {value}" for key, value in record.items()]
    lines += ["", "| stage | result | seconds | last line |", "|---|---|---|---|"]
    for stage in STAGES:
        result = results.get(stage.name, {"state": "not run", "seconds": "", "last": ""})
        last = result["last"].replace("|", "/")
        lines.append(f"| {stage.name} | {result['state']} | {result['seconds']} | {last} |")
    lines += ["", *compare_speed(to / "speed.json")]
    (to / "gpu-hour.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/gpu-hour"), help="folder of results")
    parser.add_argument("--minutes", type=float, default=60)
    told = parser.parse_args(arguments)
    told.to.mkdir(parents=True, exist_ok=True)
    kept = told.to / "stages.json"
    results = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    record = certificate()
    deadline = time.monotonic() + 60 * told.minutes
    for stage in STAGES:
        left = deadline - time.monotonic()
        if stage.name in results or left < 30:
            continue
        result = run_stage(stage, told.to.resolve(), min(60 * stage.minutes, left))
        print(stage.name, result, flush=True)
        if result["state"] != "no time was left":
            results[stage.name] = result
        kept.write_text(json.dumps(results, indent=1), encoding="utf-8")
        write_page(told.to, results, record)


if __name__ == "__main__":
    main()

"""Runs of tasks, presets and methods on an emulated CUDA device beside the same runs on a CPU.

`.venv-cuda/bin/python -m benchmarks.emulated_runs --to docs/measurements/gpu-runs.md` runs every pair of a task and a
preset, a task and a method, and a preset and a method. Rows that are done are kept in --rows, so that it can be
stopped and started again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import commit, hardware
from benchmarks.forks import fork
from tests.tiny import tiny_recipe
from tools.cuda_emulator.environment import emulated_environment

ROOT = Path(__file__).parent.parent
TASKS: dict[str, dict[str, Any]] = {
    "rm": {},
    "dpo": {},
    "dpo precomputed": {"options.precompute_ref_log_probs": True},
    "sft": {},
    "kto": {},
    "prm": {},
    "distill": {},
    "vlm": {},
    "docqa": {},
    "protein": {},
    "temporal": {},
    "safe_dpo": {},
}
"""Tasks with changes of their tiny recipes; a second word tells two runs of a task apart."""
PRESETS: dict[str, int] = {
    "zero0": 1,
    "zero1": 1,
    "zero2": 1,
    "zero3": 2,
    "zero2_bf16": 1,
    "zero3_bf16": 1,
    "zero2_offload": 1,
    "zero3_offload": 1,
    "zero3_partial_offload": 1,
    "zero3_hpz": 2,
    "zero2_cpu_checkpointing": 1,
}
"""Presets with the number of devices each is run on."""
LORA = {"model.lora": {"rank": 4, "alpha": 8}}
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "LoRA": LORA,
    "DoRA": {"model.lora": {"rank": 4, "alpha": 8, "dora": True}},
    "nf4": {**LORA, "model.quantize": "nf4"},
    "int8": {**LORA, "model.quantize": "int8"},
    "adamw_8bit": {"optim.name": "adamw_8bit"},
    "paged_adamw_8bit": {"optim.name": "paged_adamw_8bit"},
    "muon": {"optim.name": "muon"},
}
FP32_TOLERANCE = 1e-5
BF16_TOLERANCE = 5e-2
INT8_TOLERANCE = 1e-3
"""Largest relative difference between the losses of the device and those of the CPU. For int8 bitsandbytes multiplies
integers on a device, and dequantized weights on a CPU."""


@dataclass(frozen=True)
class Cell:
    """One run; `changes` are further keys of the recipe, `switches` those of the emulator."""

    task: str
    preset: str = "zero2"
    method: str = "full"
    ranks: int = 1
    precision: str = "fp32"
    changes: Mapping[str, Any] = field(default_factory=dict)
    switches: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        words = [self.task, self.preset, self.method, self.precision, f"{self.ranks} x"]
        return " | ".join([*words, *(f"{key}={value}" for key, value in {**self.changes, **self.switches}.items())])


def make_cells() -> list[Cell]:
    """Return runs that hold every pair of task and preset, task and method, preset and method."""
    pairs = [("task", "preset"), ("task", "method"), ("preset", "method")]
    values = {"task": list(TASKS), "preset": list(PRESETS), "method": list(METHODS)}
    left = {(first, second, a, b) for first, second in pairs for a in values[first] for b in values[second]}
    cells = []
    for candidate in _spread(values):
        covered = {(first, second, candidate[first], candidate[second]) for first, second in pairs} & left
        if not covered:
            continue
        left -= covered
        preset = candidate["preset"]
        precision = "bf16" if preset.endswith("bf16") else "fp32"
        cells.append(Cell(candidate["task"], preset, candidate["method"], PRESETS[preset], precision))
    return cells


def _spread(values: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Yield all combinations, those with three new pairs first."""
    tasks, presets, methods = values["task"], values["preset"], values["method"]
    for shift in range(len(methods)):
        for task, preset in itertools.product(range(len(tasks)), range(len(presets))):
            method = (task + preset + shift) % len(methods)
            yield {"task": tasks[task], "preset": presets[preset], "method": methods[method]}


# ---- a server: a process that has imported everything and forks for each run


class Server:
    """Runs commands of dstrain in forks of one process, on emulated devices or on the CPU."""

    def __init__(self, switches: Mapping[str, str] | None) -> None:
        """`switches` of the emulator; None: no emulator."""
        environment = dict(os.environ, TORCH_COMPILE_DISABLE="1", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
        environment.pop("DS_ACCELERATOR", None)
        if switches is None:
            environment |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
        else:
            environment = emulated_environment(environment, **{"EMU_GPUS": "2", **switches})
        command = [sys.executable, "-m", "benchmarks.emulated_runs", "--serve"]
        self.process = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, arguments: Sequence[str], ranks: int, log: Path, timeout: float = 300) -> list[int]:
        """Run `dstrain ARGUMENTS` as `ranks` processes; return their exit codes (-9 after the timeout)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        request = {"arguments": list(arguments), "ranks": ranks, "log": str(log), "timeout": timeout}
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the server ended with exit code {self.process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Answer requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print does not mix with the answers
    modules = ("deepspeed", "transformers", "peft", "accelerate", "dstrain.cli", "dstrain.commands.train")
    for module in (*modules, "dstrain.commands.run_job", "transformers.models.llama.modeling_llama"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    import torch

    torch.cuda._is_in_bad_fork = lambda: False  # type: ignore[assignment]  # an emulated device survives a fork
    port = 29600 + os.getpid() % 2000
    for line in sys.stdin:
        port += 1
        request = json.loads(line)
        answers.write(json.dumps(_run_ranks(request, port)) + "\n")
        answers.flush()


def _run_ranks(request: Mapping[str, Any], port: int) -> list[int]:
    ranks = request["ranks"]
    left = {}
    for rank in range(ranks):
        left[fork(partial(_run_rank, request, rank, port), Path(request["log"]))] = rank
    codes = [-signal.SIGKILL] * ranks
    deadline = time.monotonic() + request["timeout"]
    while left and time.monotonic() < deadline:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[left.pop(pid)] = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return codes


def _run_rank(request: Mapping[str, Any], rank: int, port: int) -> None:
    """Run the command as torchrun would start it."""
    import dstrain.cli

    ranks = request["ranks"]
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    sys.argv = ["dstrain", *request["arguments"]]
    dstrain.cli.main()


# ---- a cell: the same recipe on both


def write_recipe(cell: Cell, folder: Path) -> Path:
    """Write the task's tiny recipe with the cell's changes; return its path."""
    from tests.vision_recipes import named_recipe

    task = cell.task.split()[0]
    if task == "safe_dpo":
        _, recipe = named_recipe("dpo, safe, with images", folder)
    else:
        recipe = tiny_recipe(task, folder)
    recipe |= {"steps": 3, "batch": {**recipe.get("batch", {}), "total": 4, "micro": 2 // cell.ranks}}
    recipe |= {"log": {"every": 1, "tensorboard": False}, "save": {"every": 3}, "precision": cell.precision}
    recipe["ds_config"] = cell.preset
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


def train_arguments(cell: Cell, recipe: Path, run_dir: Path) -> list[str]:
    arguments = ["train", str(recipe), "--run-dir", str(run_dir)]
    for key, value in {**TASKS.get(cell.task, {}), **METHODS[cell.method], **cell.changes}.items():
        arguments += ["--set", f"{key}={json.dumps(value)}"]
    return arguments


def read_losses(run_dir: Path) -> list[float]:
    """Return the training losses of the logged steps."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row and row.get("split", "train") == "train"]


def run_cell(cell: Cell, device: Server, host: Server) -> dict[str, Any]:
    """Run a cell on the device and on the CPU; return its row."""
    folder = Path(tempfile.mkdtemp(prefix="emulated-run-"))
    began = time.monotonic()
    try:
        recipe = write_recipe(cell, folder)
        row: dict[str, Any] = {"name": cell.name}
        losses = {}
        for place, server in (("device", device), ("cpu", host)):
            log, run_dir = folder / f"{place}.log", folder / place
            codes = server.run(train_arguments(cell, recipe, run_dir), cell.ranks, log)
            told = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            row[place] = {"codes": codes, "last": [line[:300] for line in told[-3:]]}
            row[place]["emulator"] = sorted({line[:200] for line in told if line.startswith("cuda emulator:")})
            if codes == [0] * cell.ranks:
                losses[place] = read_losses(run_dir)
        row |= {"losses": losses, "result": judge(cell, row, losses)}
        row["seconds"] = round(time.monotonic() - began, 1)
        return row
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def judge(cell: Cell, row: Mapping[str, Any], losses: Mapping[str, Sequence[float]]) -> str:
    """Return `equal`, `refused` (exit 2 on both with the same words), or what is wrong."""
    codes = {place: max(row[place]["codes"]) for place in ("device", "cpu")}
    if set(codes.values()) == {2}:
        return "refused"
    if set(losses) != {"device", "cpu"}:
        return f"exit codes {row['device']['codes']} on the device, {row['cpu']['codes']} on the CPU"
    pairs = list(zip(losses["device"], losses["cpu"], strict=True))
    if not pairs or not all(math.isfinite(loss) for pair in pairs for loss in pair):
        return "losses that are not finite, or none"
    difference = max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)
    tolerance = FP32_TOLERANCE if cell.precision == "fp32" else BF16_TOLERANCE
    if cell.method == "int8":
        tolerance = max(tolerance, INT8_TOLERANCE)
    return "equal" if difference <= tolerance else f"losses differ by {difference:.1e}"


# ---- the table


COMMAND = ".venv-cuda/bin/python -m benchmarks.emulated_runs --to docs/measurements/gpu-runs.md"


def write_table(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the page of all rows."""
    results = [row["result"] for row in rows]
    wrong = [row for row in rows if row["result"] not in ("equal", "refused")]
    lines = ["# Runs on an emulated CUDA device", ""]
    lines += [
        "Each row is a run of three steps on an emulated CUDA device (tools/cuda_emulator) and the same run on a CPU.",
        f"`equal`: the losses differ by at most {FP32_TOLERANCE} of the loss in fp32, {INT8_TOLERANCE} with int8,",
        f"{BF16_TOLERANCE} in bf16.",
        "`refused`: the command ends with exit code 2 on both, for the recipe cannot be run.",
        "",
        f"- command: `{COMMAND}`",
        f"- hardware: an emulated H200 on {hardware().removeprefix('CPU: ')}; {date.today()}, commit {commit()}",
        "",
        f"{results.count('equal')} equal, {results.count('refused')} refused, {len(wrong)} otherwise, of {len(rows)};",
        f"the grid has {len(make_cells())} cells.",
        "",
        "| task | preset | method | precision | devices | result |",
        "|---|---|---|---|---|---|",
    ]
    lines += [f"| {row['name']} | {row['result']} |" for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, default=Path("emulated-runs.jsonl"))
    parser.add_argument("--to", type=Path)
    parser.add_argument("--only", default="", help="a part of the names of the cells")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()] if arguments.rows.exists() else []
    done = {row["name"] for row in rows}
    cells = [cell for cell in make_cells() if arguments.only in cell.name and cell.name not in done]
    if cells:
        run_cells(cells, rows, arguments.rows)
    if arguments.to:
        write_table(rows, arguments.to)


def run_cells(cells: Sequence[Cell], rows: list[dict[str, Any]], path: Path) -> None:
    """Run the cells and append their rows to the list and the file."""
    device, host = Server({}), Server(None)
    with path.open("a", encoding="utf-8") as file:
        for number, cell in enumerate(cells, 1):
            row = run_cell(cell, device, host)
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
            print(f"{number}/{len(cells)}", row["name"], row["result"], f"{row['seconds']} s", sep="  ", flush=True)
            if row["result"] not in ("equal", "refused"):
                print("    ", *row["device"]["last"], *row["cpu"]["last"], sep="\n     ", flush=True)
    device.close()
    host.close()


if __name__ == "__main__":
    main()

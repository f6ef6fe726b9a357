"""Checks of ZeRO: two steps of DeepSpeed in two processes against plain PyTorch in one."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from dstrain.batch import Batch
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.distributed.world import World, joined_world
from dstrain.ds_config import RunSettings, complete_preset
from dstrain.files import parse_json
from dstrain.launch.plan import host_environment
from dstrain.launch.probe import free_port
from dstrain.models.params import build_param_groups, gathered, zero3_init
from dstrain.models.weights import disable_transformers_logging, open_tensors
from dstrain.preset import read_preset
from dstrain.process_setup import PARENT_ENV
from dstrain.tasks import Task, make_task
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from dstrain.training.engine.torch import TorchEngine
from dstrain.verify.model import SAMPLES, ShrunkModel, examples_of
from dstrain.verify.result import SINGLE, CheckResult, distance, judge

STAGES = (2, 3)
PROCESSES, STEPS = 2, 2
STEP_SHARE = 0.05
"""Learning rate as a part of the norm of the weights: the update has to be large beside their rounding."""
TIMEOUT_SECONDS = 300.0
RECIPE_FILE = "zero.json"
WEIGHTS_FILE = "zero{stage}.safetensors"


def check_zero(shrunk: ShrunkModel) -> list[CheckResult]:
    """Weights after two steps with ZeRO 2 and 3 are those after two steps of plain PyTorch."""
    task, work = write_recipe(shrunk), shrunk.folder.parent
    with _started_processes(work) as processes:
        expected = plain_updates(task)  # while the processes import DeepSpeed
        problem = _wait(processes, work)
    return [compare_updates(work, stage, expected, problem) for stage in STAGES]


def write_recipe(shrunk: ShrunkModel) -> Task:
    """Write the recipe of the steps for the other processes; return its task."""
    tensors = open_tensors(sorted(shrunk.folder.glob("*.safetensors"))).values()
    norm = math.sqrt(sum(float(tensor.read().float().square().sum()) for tensor in tensors))
    task = shrunk.task(optim={"lr": STEP_SHARE * norm})
    (shrunk.folder.parent / RECIPE_FILE).write_text(task.recipe.model_dump_json(), encoding="utf-8")
    return task


def compare_updates(work: Path, stage: int, expected: Mapping[str, torch.Tensor], problem: str) -> CheckResult:
    """Return the result of a stage. `problem`: why a process failed; empty where none did."""
    check, file = f"ZeRO {stage}", work / WEIGHTS_FILE.format(stage=stage)
    if not file.is_file():
        return CheckResult(check=check, state="failed", reason=problem or "no process has written its weights")
    figure, where = distance(load_file(file), expected)
    wrong = f"the updates of {STEPS} steps differ from plain PyTorch's, most in {where}"
    return judge(check, figure, SINGLE, wrong, f"fp32; {PROCESSES} processes, {STEPS} steps, gloo")


def plain_updates(task: Task) -> dict[str, torch.Tensor]:
    """Return what two steps of plain PyTorch add to each parameter."""
    module = build_train_module(task)
    groups = build_param_groups(module.model, task.recipe.optim)
    return _take_steps(task, TorchEngine(module, groups, task.recipe.optim, torch.device("cpu")))


def _take_steps(task: Task, engine: Any) -> dict[str, torch.Tensor]:
    """Return what the steps add to each parameter, whole, on the CPU. Collective."""
    model = engine.train_module.model
    before = _weights(model)
    batches = _batches_of_rank(task, engine.world)
    for _ in range(STEPS):
        engine.step(batches, lr=task.recipe.optim.lr)
    return {name: value - before[name] for name, value in _weights(model).items()}


def _batches_of_rank(task: Task, world: World) -> list[Batch]:
    examples = examples_of(task)
    mine = np.array_split(np.arange(SAMPLES), world.size)[world.rank]
    return [make_batch(examples, task.collate, mine.tolist(), 0)]


def _weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every trained parameter, whole, in fp64. Collective."""
    with gathered(model.parameters()):
        trained = ((name, value) for name, value in model.named_parameters() if value.requires_grad)
        return {name: value.detach().double().cpu().clone() for name, value in trained}


@contextlib.contextmanager
def _started_processes(work: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start a process for each rank, and end those that still run at the end."""
    port = str(free_port())
    processes = []
    for rank in range(PROCESSES):
        env = host_environment(os.environ, (), PROCESSES)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": PROCESSES, "LOCAL_WORLD_SIZE": PROCESSES}
        env |= {name: str(value) for name, value in names.items()}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": ""}
        env[PARENT_ENV] = str(os.getpid())
        with (work / f"rank{rank}.log").open("wb") as log:
            command = [sys.executable, "-P", "-m", "dstrain.verify.zero", str(work)]
            processes.append(
                subprocess.Popen(command, env={**os.environ, **env}, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()  # does nothing to one that has ended
            process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], work: Path) -> str:
    """Wait for the processes to end; return why one failed, empty if none did."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            return f"the process of rank {failed[0]} ended with an error: {_last_line(work / f'rank{failed[0]}.log')}"
        if None not in codes:
            return ""
        time.sleep(0.05)
    return f"the processes did not end within {TIMEOUT_SECONDS:g} seconds"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"


def write_updates(work: Path, world: World) -> None:
    """Take the steps of this process with each stage; rank 0 writes what they add to the weights. Collective."""
    recipe = RunConfig.model_validate(parse_json((work / RECIPE_FILE).read_bytes()))
    task = make_task(recipe)
    for stage in STAGES:
        updates = _take_steps(task, _make_engine(task, stage, world))
        if world.rank == 0:
            save_file(updates, work / WEIGHTS_FILE.format(stage=stage))
        world.barrier()


def _make_engine(task: Task, stage: int, world: World) -> DeepSpeedEngine:
    settings = RunSettings(
        precision="fp32", micro=SAMPLES, accumulate=1, world_size=world.size, clip=task.recipe.optim.clip,
        device_kind="cpu", uses_custom_optimizer=True, nvme_path="",
    )  # fmt: skip
    config = complete_preset(read_preset(f"zero{stage}"), settings=settings)
    with zero3_init(config):
        module = build_train_module(task)
    groups = build_param_groups(module.model, task.recipe.optim)
    return DeepSpeedEngine(module, groups, task.recipe.optim, config, world)


if __name__ == "__main__":
    from dstrain.launch.worker import exit_with_parent

    exit_with_parent()
    patience = timedelta(seconds=TIMEOUT_SECONDS)
    with disable_transformers_logging(progress_bar=True), joined_world(torch.device("cpu"), patience) as joined:
        write_updates(Path(sys.argv[1]), joined)

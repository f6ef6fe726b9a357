"""Peaks of memory and launches of a micro-batch, beside transformers' Trainer and TRL with liger-kernel.

    python -m tools.cuda_emulator python -m benchmarks.kernel_peers [--only REGEX] [--rows ROWS.jsonl] [--to PAGE]

All trainers train the same model on the same rows by DeepSpeed at stage 2, in bf16, with gradient checkpointing unless
a case says otherwise. Their other options are those that they have by themselves. Peaks are those of torch's CUDA
allocator over three steps, without what building the model takes; launches are those from the beginning of a forward
pass to the end of its backward pass, without the update. The device is emulated with EMU_VALUES=2: nothing is computed.
A case whose row is in ROWS.jsonl is not measured again. TRL is not a dependency: pip install trl==1.16.0

LLaMA-Factory and Unsloth need other versions of transformers, TRL and datasets than dstrain, so each runs in a process
of its own: LLAMA_FACTORY_SITE and UNSLOTH_SITE name folders with them (pip install --no-deps --target FOLDER).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import commit, format_certificate, table, write_table
from benchmarks.forks import fork
from benchmarks.liger_heads import count_launches
from benchmarks.peer_trainers import LLAMA_FACTORY, UNSLOTH, make_deepspeed_options, write_model
from benchmarks.planner_allocator import (
    STEPS,
    PhasePeaks,
    _wait,
    accept_kernels_by_shape,
    import_modules,
    make_preset,
    make_recipe,
    write_records,
)
from dstrain.config.schema import RunConfig

LORA: dict[str, Any] = {"model.lora": {"rank": 16}}
CASES: dict[str, dict[str, Any]] = {
    "1B sft": {"task": "sft", "model": "llama-3.2-1b", "length": 2048},
    "0.5B dpo": {"task": "dpo", "model": "qwen2.5-0.5b", "length": 2048},
    "0.5B rm": {"task": "rm", "model": "qwen2.5-0.5b", "length": 2048},
    "1B sft, all activations kept": {
        "task": "sft", "model": "llama-3.2-1b", "length": 2048, "set": {"model.gradient_checkpointing": False},
    },
    "8B sft, LoRA": {"task": "sft", "model": "llama-3.1-8b", "length": 2048, "set": LORA},
    "8B sft, LoRA, nf4": {
        "task": "sft", "model": "llama-3.1-8b", "length": 2048, "set": {**LORA, "model.quantize": "nf4"},
    },
    "LLaVA 7B, LoRA": {"task": "vlm", "model": "llava-1.5-7b", "length": 2048, "set": LORA, "image_side": 336},
}  # fmt: skip
"""Name -> a case of benchmarks/planner_allocator.py, of one row or pair in a micro-batch. The name says what is trained."""
EAGER, FUSED = "dstrain, eager", "dstrain, fused"
TRAINER, TRL, PRECOMPUTED = "Trainer, liger", "TRL, liger", "TRL, liger, reference precomputed"
WAYS = (EAGER, FUSED, TRAINER, TRL, PRECOMPUTED, LLAMA_FACTORY, UNSLOTH)
SITES = {LLAMA_FACTORY: "LLAMA_FACTORY_SITE", UNSLOTH: "UNSLOTH_SITE"}
"""Way -> environment variable with the folder that its packages are installed into."""
TRL_TRAINERS = {"sft": "SFTTrainer", "vlm": "SFTTrainer", "dpo": "DPOTrainer", "rm": "RewardTrainer"}
GIB = 2**30


def list_runs() -> list[tuple[str, str]]:
    """Return (case, way) of each run. The Trainer computes the loss of language models alone."""
    runs = []
    for name, case in CASES.items():
        for way in WAYS:
            has_loss = way != TRAINER or case["task"] in ("sft", "vlm")
            has_adapters = way != UNSLOTH or (case["task"] == "sft" and "model.lora" in case.get("set", {}))
            if has_loss and has_adapters and (way != PRECOMPUTED or case["task"] == "dpo"):
                runs.append((name, way))
    return runs


class MicroBatchWatch:
    """Peaks of the phases of a DeepSpeed engine, and launches from the beginning of a loss to the end of its gradient."""

    def __init__(self) -> None:
        self.launches: list[int] = []
        self.peaks: PhasePeaks | None = None
        self._begun: int | None = None

    def watch(self, engine: Any) -> None:
        """Watch the passes of an engine from now on. Peaks before are not counted."""
        self.peaks = PhasePeaks(engine)
        forward, backward = engine.forward, engine.backward

        def watched_forward(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            return forward(*args, **kwargs)

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            result = backward(*args, **kwargs)
            assert self._begun is not None
            self.launches.append(count_launches() - self._begun)
            self._begun = None
            return result

        engine.forward, engine.backward = watched_forward, watched_backward

    def begin(self) -> None:
        """Count from here, unless the micro-batch has begun before."""
        if self._begun is None:
            self._begun = count_launches()

    def figures(self) -> dict[str, Any]:
        """Return the row."""
        assert self.peaks is not None
        self.peaks.close("between")
        phases = self.peaks.allocated
        # The first micro-batch compiles, and makes what stays.
        return {"allocated": max(phases.values()), "phases": phases, "launches": self.launches[-1]}


class PlainEngine:
    """The passes and updates of a trainer without DeepSpeed, under the names that a DeepSpeed engine has."""

    def __init__(self, trainer: Any) -> None:
        self.forward: Callable[..., Any] = trainer.compute_loss
        self.backward: Callable[..., Any] = trainer.accelerator.backward
        self.step: Callable[..., Any] = trainer.optimizer.step
        trainer.compute_loss = lambda *args, **kwargs: self.forward(*args, **kwargs)
        trainer.accelerator.backward = lambda *args, **kwargs: self.backward(*args, **kwargs)
        trainer.optimizer.step = lambda *args, **kwargs: self.step(*args, **kwargs)


def take_watched_steps(trainer: Any, train: Callable[[], Any] | None = None) -> dict[str, Any]:
    """Return the row of a Trainer's steps, with DeepSpeed or without. `train`: its method of this name, where replaced."""
    import torch
    from transformers import TrainerCallback

    watch = MicroBatchWatch()
    compute_loss = trainer.compute_loss

    def watched_loss(*args: Any, **kwargs: Any) -> Any:
        watch.begin()
        return compute_loss(*args, **kwargs)

    class WatchEngine(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            torch.cuda.empty_cache()
            watch.watch(trainer.model_wrapped if trainer.is_deepspeed_enabled else PlainEngine(trainer))

    trainer.compute_loss = watched_loss
    trainer.add_callback(WatchEngine())
    (train or trainer.train)()
    return watch.figures()


def resolve_case(case: dict[str, Any], folder: Path, kernels: str) -> tuple[RunConfig, dict[str, Any]]:
    """Return the recipe of a case, and its DeepSpeed JSON."""
    from dstrain.config import resolve_batch
    from dstrain.ds_config import Device, resolve_ds_config

    case = {**case, "set": {**case["set"], "model.kernels": kernels, "batch": {"micro": 1, "total": 1}}}
    config, preset = make_recipe(case, folder), make_preset(case)
    sizes = resolve_batch(config.batch, 1, preset.micro, preset.accumulate, 1)
    return config, resolve_ds_config(config, preset, sizes, 1, Device("cuda", True), folder)


class Workload:
    """A case in this process: its task, on this device, and its DeepSpeed JSON."""

    def __init__(self, case: dict[str, Any], folder: Path, kernels: str) -> None:
        import torch

        from dstrain.distributed.world import TorchWorld
        from dstrain.tasks import make_task
        from dstrain.training.build_model import resolve_model_dtype

        torch.cuda.set_device(0)
        self.world = TorchWorld.join(torch.device("cuda", 0), timedelta(minutes=10))
        self.config, self.ds_config = resolve_case(case, folder, kernels)
        self.task = make_task(resolve_model_dtype(self.config, self.ds_config))


def measure_dstrain(case: dict[str, Any], folder: Path, way: str) -> dict[str, Any]:
    """Take steps as `dstrain train` does."""
    import torch

    from dstrain.data.loading.loader import make_batch
    from dstrain.models.params import build_param_groups
    from dstrain.tasks.common.task import load_split
    from dstrain.training.build_model import build_train_module
    from dstrain.training.engine.deepspeed import DeepSpeedEngine
    from dstrain.training.precompute_outputs import OutputsJob, add_outputs_and_select

    accept_kernels_by_shape()
    work = Workload(case, folder, "liger" if way == FUSED else "none")
    job = OutputsJob(task=work.task, ds_config=work.ds_config, micro_batch_size=1, world=work.world)
    examples = add_outputs_and_select(job, {"train": load_split(work.task, "train")})["train"]
    assert examples is not None
    with work.world.device:
        module = build_train_module(work.task)
    groups = build_param_groups(module.model, work.config.optim)
    engine = DeepSpeedEngine(module, groups, work.config.optim, work.ds_config, work.world)
    torch.cuda.empty_cache()
    watch = MicroBatchWatch()
    watch.watch(engine.engine)
    for step in range(STEPS):
        engine.step([make_batch(examples, work.task.collate, [step], 0, sequence=work.world.sequence)], 1e-5)
    return watch.figures()


def measure_peer(case: dict[str, Any], folder: Path, way: str) -> dict[str, Any]:
    """Take steps by transformers' Trainer or one of TRL's, on the model and rows of dstrain's task."""
    keeps_activations = case["set"].get("model.gradient_checkpointing") is False
    # The trainer enables gradient checkpointing itself.
    case = {**case, "set": {**case["set"], "model.gradient_checkpointing": False}}
    work = Workload(case, folder, "none")
    examples = work.task.examples("train")
    rows = [examples[index] for index in range(STEPS)]
    settings: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": STEPS, "bf16": True, "use_cpu": False, "use_liger_kernel": True,
        "gradient_checkpointing": not keeps_activations, "disable_tqdm": True,
        "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "report_to": "none", "save_strategy": "no",
        "optim": "adamw_torch_fused",
        "deepspeed": make_deepspeed_options(work.ds_config),
    }  # fmt: skip
    if case["task"] == "rm":  # it has no head on which liger's fused cross entropy could be
        settings["liger_kernel_config"] = {"fused_linear_cross_entropy": False}
    with _models_on_device(work):
        if way == TRAINER:
            trainer = _make_trainer(work, case["task"], rows, settings)
        else:
            trainer = _make_trl_trainer(work, case["task"], rows, settings, way == PRECOMPUTED)
    return take_watched_steps(trainer)


def measure_apart(case: dict[str, Any], folder: Path, way: str) -> dict[str, Any]:
    """Take steps by LLaMA-Factory or Unsloth in a process of its own, with the packages of SITES."""
    config, ds_config = resolve_case(case, folder, "none")
    write_model(config, folder / "model")
    job = {"case": case, "deepspeed": make_deepspeed_options(ds_config), "steps": STEPS}
    (folder / "case.json").write_text(json.dumps(job), encoding="utf-8")
    paths = [os.environ[SITES[way]], str(Path(__file__).parents[1]), os.environ["PYTHONPATH"]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "benchmarks.peer_trainers", way, str(folder)]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        sys.exit(code)  # the log ends with the error of that process
    return dict(json.loads((folder / "figures.json").read_text(encoding="utf-8")))


@contextmanager
def _models_on_device(work: Workload) -> Iterator[None]:
    """Let the task build its models as `dstrain train` does, but on the device.

    On the host their weights would take their size of memory.
    """
    from dstrain.tasks.common import reference
    from dstrain.training.build_model import build_model

    kind = type(work.task)
    build_plain, load_plain = kind.build_model, reference.load_reference

    def build_on_device(task: Any) -> Any:
        # Quantized and with adapters, where the recipe says so.
        with mock.patch.object(kind, "build_model", build_plain), work.world.device:
            return build_model(task)

    def load_on_device(task: Any, config: Any) -> Any:
        with work.world.device:
            return load_plain(task, config)

    with (
        mock.patch.object(kind, "build_model", build_on_device),
        mock.patch.object(reference, "load_reference", load_on_device),
    ):
        yield


def _make_trainer(work: Workload, task: str, rows: list[Any], settings: dict[str, Any]) -> Any:
    """Return transformers' Trainer on rows with labels."""
    from transformers import Trainer, TrainingArguments

    from benchmarks.trl_side import _image_collator, sft_rows

    def collate(samples: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        (row,) = samples
        ids, labels = (torch.tensor(row[name])[None] for name in ("input_ids", "labels"))
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    arguments = TrainingArguments(**settings, remove_unused_columns=False)
    collator = _image_collator(work.task, rows) if task == "vlm" else collate
    dataset: Any = sft_rows(rows)
    return Trainer(model=work.task.build_model(), args=arguments, train_dataset=dataset, data_collator=collator)


def _make_trl_trainer(
    work: Workload, task: str, rows: list[Any], settings: dict[str, Any], is_precomputed: bool
) -> Any:
    """Return TRL's trainer of a task, as benchmarks/trl_side.py makes it."""
    from benchmarks.trl_side import made_side

    more: dict[str, Any] = {"precompute_ref_log_probs": True} if is_precomputed else {}
    if task == "vlm":
        more |= {"dataset_kwargs": {"skip_prepare_dataset": True}, "remove_unused_columns": False}
    return made_side(TRL_TRAINERS[task], work.task, rows, **settings, **more).trainer


def run_case(name: str, way: str, seconds: float) -> dict[str, Any]:
    """Measure a case in a fork of this process; return its figures, or `fault` and the end of its log."""
    folder = Path(tempfile.mkdtemp(prefix="dstrain-peers-"))
    case = {"preset": "zero2", "set": {}, "micro": 1, "gpus": 1, **CASES[name]}
    try:
        write_records(case, folder)
        measure = measure_apart if way in SITES else measure_peer
        if way in (EAGER, FUSED):
            measure = measure_dstrain
        fault = _wait(
            [fork(partial(_write_figures, measure, case, folder, way), folder / "log.txt")], time.monotonic() + seconds
        )
        result = folder / "figures.json"
        if fault or not result.is_file():
            log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return {"fault": (log or [fault])[-1][:100], "log": log[-40:]}
        return dict(json.loads(result.read_text(encoding="utf-8")))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_figures(measure: Callable[..., dict[str, Any]], case: dict[str, Any], folder: Path, way: str) -> None:
    import torch

    from dstrain.launch.probe import free_port

    torch.cuda._is_in_bad_fork = lambda: False  # an emulated device has no state that a fork would break
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(ranks, MASTER_PORT=str(free_port()), DSTRAIN_CACHE=str(folder / "cache"))
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    (folder / "figures.json").write_text(json.dumps(measure(case, folder, way)), encoding="utf-8")


def read_rows(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return (case, way) -> last row; a fault is kept too, for the table."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["case"], row["way"]): row for row in rows}


def make_table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Return the table of peaks and launches, and that of the peaks of phases."""
    shown, phases = [], []
    for name, way in list_runs():
        row = rows.get((name, way), {"fault": "not measured"})
        if "fault" in row:
            shown.append(
                {
                    "case": name,
                    "trainer": way,
                    "peak, GiB": row["fault"].replace("|", "/"),
                    "to TRL": "",
                    "launches": "",
                }
            )
            continue
        trl = rows.get((name, TRL), {}).get("allocated")
        to_trl = f"{row['allocated'] / trl:.2f}" if trl else ""
        shown.append({
            "case": name, "trainer": way, "peak, GiB": f"{row['allocated'] / GIB:.2f}", "to TRL": to_trl,
            "launches": row["launches"],
        })  # fmt: skip
        phases.append({
            "case": name, "trainer": way, **{phase: f"{size / GIB:.2f}" for phase, size in row["phases"].items()},
        })  # fmt: skip
    return f"{table(shown)}\n\nPeaks of phases, GiB:\n\n{table(phases)}"


def main() -> None:
    """Measure the runs that have no row yet, and print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of CASE: TRAINER")
    parser.add_argument("--rows", type=Path, default=Path("kernel_peers.jsonl"), help="measured rows, appended to")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of a run")
    parser.add_argument("--to", type=Path, help="Markdown file whose table is replaced")
    options = parser.parse_args()
    rows = read_rows(options.rows)
    import_modules()
    for name, way in list_runs():
        if not re.search(options.only, f"{name}: {way}") or "fault" not in rows.get((name, way), {"fault": ""}):
            continue
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        row = {"case": name, "way": way, "date": today, "commit": commit(), **run_case(name, way, options.seconds)}
        rows[name, way] = row
        with options.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print("\n".join(row.pop("log", [])), row, file=sys.stderr, flush=True)
    record = format_certificate()
    write_table(f"{record}\n\n{make_table(rows)}", "benchmarks.kernel_peers", options.to)


if __name__ == "__main__":
    main()

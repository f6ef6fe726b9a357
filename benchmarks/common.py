"""Shared parts of the benchmarks: task, engines, timing in turns, and the record of hardware and commit."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment of a process of a launch; `join_alone` sets it."""

# Llama shapes. The tokenizer stays small: the data is synthetic, and its size does not affect the forward pass.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
    "3m": {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4},
    "100m": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12},
    "1b": {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4},
}  # fmt: skip


def write_table(table: str, module: str, page: Path | None) -> None:
    """Print a table, or write it into a page between two lines `<!-- made by python -m MODULE -->`."""
    if page is None:
        print(table)
        return
    mark = f"<!-- made by python -m {module} -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(mark)
    after = rest.partition(mark)[2]
    page.write_text(f"{before}{mark}\n\n{table}\n\n{mark}{after}", encoding="utf-8")


def write_pairs(path: Path, count: int, words: int) -> Path:
    """Write `count` synthetic preference pairs with about `words` words per answer; the polite answer is chosen."""
    import random

    with path.open("w") as file:
        for index in range(count):
            draw = random.Random(f"{path.stem}/{index}")
            steps = [
                draw.choice(("open it", "clean it", "oil it", "turn it", "look at it"))
                for _ in range(max(1, words // 3))
            ]
            prompt = f"\n\nHuman: How do I mend the {draw.choice(('pump', 'valve', 'lamp', 'wheel'))} number {index}?\n\nAssistant: "
            pair = {
                "chosen": f"{prompt}Gladly: {' then '.join(steps)}.",
                "rejected": f"{prompt}No: {' or '.join(reversed(steps))}, go away.",
            }
            file.write(json.dumps(pair) + "\n")
    return path


def made_recipe(folder: Path, shape: str, length: int, pairs: int = 64) -> dict[str, Any]:
    """Return a reward model recipe on synthetic data; nearly all sequences have `length` tokens, the maximum."""
    return {
        "task": "rm",
        "model": {"config": {"model_type": "llama", **SHAPES[shape]}, "tokenizer": {"train": "bpe", "vocab_size": 320}},
        "data": {"train": str(write_pairs(folder / "train.jsonl", pairs, length)), "max_length": length},
        "optim": {"name": "adamw", "lr": 1e-4, "warmup": 0, "schedule": "constant"},
        "log": {"every": 1, "tensorboard": False},
    }


def made_task(shape: str, length: int, pairs: int = 64, changes: Mapping[str, Any] | None = None) -> Any:
    """Return the task of `made_recipe`; `changes` overrides keys inside its sections."""
    from dstrain.config.schema import RunConfig
    from dstrain.tasks import make_task

    folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
    recipe = made_recipe(folder, shape, length, pairs)
    for section, values in (changes or {}).items():
        recipe[section] = {**recipe.get(section, {}), **values}
    return make_task(RunConfig.model_validate(recipe))


def join_alone() -> Any:
    """Return a world of one process with a process group, which DeepSpeed requires; of more in a launch. TF32 is off."""
    import torch

    from dstrain.distributed.world import TorchWorld
    from dstrain.launch.probe import free_port

    cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    alone = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})
    if not cuda:
        os.environ["DS_ACCELERATOR"] = "cpu"
    torch.set_float32_matmul_precision("highest")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    world = TorchWorld.join(device, timedelta(minutes=5))
    import deepspeed  # noqa: F401  its log lines and compiled helpers come here, not in a measured step

    return world


def made_model(task: Any, ds_config: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return (train module, parameter groups) with the same weights every time."""
    from dstrain.models.params import build_param_groups, zero3_init
    from dstrain.training.build_model import build_train_module

    with zero3_init(ds_config or {}):
        objective = build_train_module(task)
    return objective, build_param_groups(objective.model, task.recipe.optim)


def made_ds_config(task: Any, preset: str, world: Any, **settings: Any) -> dict[str, Any]:
    """Return the DeepSpeed JSON of a preset as `dstrain train` completes it; `settings` override RunSettings."""
    from dstrain.ds_config import RunSettings, complete_preset
    from dstrain.preset import read_preset

    known = read_preset(preset)
    values = {"precision": "fp32", "micro": 1, "accumulate": 1, "world_size": world.size, "clip": task.recipe.optim.clip,
              "device_kind": world.device.type, "nvme_path": tempfile.gettempdir(),
              "uses_custom_optimizer": task.recipe.optim.name != "adamw" or known.offload_optimizer is None} | settings  # fmt: skip
    return dict(complete_preset(known, settings=RunSettings(**values)))


def made_engine(task: Any, preset: str, world: Any, **settings: Any) -> Any:
    """Return a DeepSpeedEngine as `dstrain train` builds it; `settings` override RunSettings. Collective."""
    from dstrain.training.engine.deepspeed import DeepSpeedEngine

    config = made_ds_config(task, preset, world, **settings)
    objective, groups = made_model(task, config)
    return DeepSpeedEngine(objective, groups, task.recipe.optim, config, world)


def made_batches(task: Any, steps: int, micro: int, accumulate: int = 1) -> list[list[Any]]:
    """Return the micro-batches of each step, samples in file order, repeated."""
    from dstrain.data.loading.loader import make_batch

    examples, made = task.examples("train"), []
    for step in range(steps):
        first = step * micro * accumulate
        ids = [[(first + part * micro + i) % len(examples) for i in range(micro)] for part in range(accumulate)]
        made.append([make_batch(examples, task.collate, chunk, 0) for chunk in ids])
    return made


def count_tokens(examples: Sequence[Mapping[str, Any]]) -> int:
    """Return the tokens of the samples' sequences, in which both answers of a pair count their prompt."""
    names = ("input_ids", "chosen", "rejected")
    return sum(len(example[name]) for example in examples for name in names if name in example)


def wait_for(device: Any) -> None:
    """Wait until the device has finished all queued work."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def take_turns(
    runners: Mapping[str, Callable[[int], Any]], rounds: int, warmup: int, device: Any,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:  # fmt: skip
    """Return name -> seconds of each call. Each round runs all once in a rotated order, so that drift affects all alike."""
    names, seconds = list(runners), {name: [] for name in runners}
    for turn in range(warmup + rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            wait_for(device)
            began = clock()
            runners[name](turn)
            wait_for(device)
            if turn >= warmup:
                seconds[name].append(clock() - began)
    return seconds


def ratio(seconds: Mapping[str, Sequence[float]], name: str, base: str) -> dict[str, float]:
    """Return medians, and median and quartiles of the ratio within each round, which cancels noise that a round shares."""
    within = sorted(mine / theirs for mine, theirs in zip(seconds[name], seconds[base], strict=True))
    low, _, high = statistics.quantiles(within, n=4) if len(within) > 1 else (within[0],) * 3
    return {
        "median_ms": statistics.median(seconds[name]) * 1000,
        "ratio": statistics.median(within),
        "ratio_low": low,
        "ratio_high": high,
    }


def certificate() -> dict[str, Any]:
    """Return the record that each figure needs: hardware, command, date, commit, versions."""
    found = {}
    for name in ("torch", "deepspeed", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    name = sys.modules["__main__"].__spec__.name if getattr(sys.modules["__main__"], "__spec__", None) else sys.argv[0]
    return {
        "hardware": hardware(),
        "command": shlex.join(["python", "-m", name, *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "versions": {"python": platform.python_version(), **found},
    }


def format_certificate(**changes: Any) -> str:
    """Return the record that each figure needs as a list of a page; `changes` replace its entries."""
    about = certificate() | changes
    about["versions"] = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    return "\n".join(f"- {key}: {value}" for key, value in about.items())


def hardware() -> str:
    """Return a description of the device."""
    import torch

    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        about = torch.cuda.get_device_properties(0)
        emulated = "emulated: " if "libcudart" in os.environ.get("LD_PRELOAD", "") else ""
        return f"{emulated}{torch.cuda.device_count()} x {about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").is_file() else []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"CPU: {cores} cores of {model}, {torch.get_num_threads()} torch threads"


def commit() -> str:
    """Return the short commit hash, with `+changes` if the working tree differs from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown (no git here)"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table for docs/measurements."""
    show = lambda value: f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)  # noqa: E731
    cells = [list(rows[0]), *[[show(value) for value in row.values()] for row in rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def tell(result: Mapping[str, Any], to: Path | None) -> None:
    """Print the record, the table and the JSON; write the JSON to `--to`, or record and table if that is a .md file."""
    whole = {"certificate": certificate(), **result}
    record = [
        f"{key}: {', '.join(f'{n} {v}' for n, v in value.items()) if isinstance(value, dict) else value}"
        for key, value in whole["certificate"].items()
    ]
    shown = f"checked first: {result['checked']}\n\n{table(result['rows'])}\n"
    print("\n".join(record), shown, json.dumps(whole), sep="\n")
    if to is not None:
        markdown = "\n".join(f"- {line}" for line in record) + f"\n\n{shown}"
        to.write_text(markdown if to.suffix == ".md" else json.dumps(whole, indent=1) + "\n")


def arguments(about: str, **options: Any) -> argparse.Namespace:
    """Return a parser with one flag per option, of the default's type, and --to and --threads."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for name, default in options.items():
        kind = {"choices": list(SHAPES)} if name == "shape" else {"type": type(default)}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, help=" ", **kind)
    parser.add_argument("--threads", type=int, default=None, help="of torch, on a CPU")
    parser.add_argument("--to", type=Path, default=None, help="a file for the JSON, or .md for the table")
    told = parser.parse_args()
    if told.threads:
        import torch

        torch.set_num_threads(told.threads)
    return told


def run(measure: Callable[..., dict[str, Any]], about: str) -> None:
    """Run a benchmark script: parse arguments, which are those of `measure`, measure, print."""
    import logging
    import warnings

    from dstrain.distributed.world import destroy_process_groups

    defaults = {name: parameter.default for name, parameter in inspect.signature(measure).parameters.items()}
    told = vars(arguments(about, **defaults))
    to = told.pop("to")
    told.pop("threads")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    try:
        tell(measure(**told), to)
    finally:
        destroy_process_groups()

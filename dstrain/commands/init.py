"""dstrain init: a starter recipe for a task and a machine, with the usual keys, commented from the schema."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence

from dstrain.config.read import dump_yaml
from dstrain.config.schema import (
    BatchConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    SaveConfig,
    Section,
)
from dstrain.planner.choose import Hardware, detect_hardware, suggest_model
from dstrain.tasks import Task, default_learning_rate, find_task, task_options

TEMPLATE_SECTIONS: tuple[tuple[str, type[Section], dict[str, object]], ...] = (
    ("model", ModelConfig, {"path": None, "freeze": [], "gradient_checkpointing": True}),
    ("data", DataConfig, {"train": "train.jsonl", "eval": "eval.jsonl", "max_length": 1024, "workers": 4}),
    ("batch", BatchConfig, {"total": 64, "micro": 4}),
    (
        "optim",
        OptimConfig,
        {"name": "adamw", "lr": None, "weight_decay": 0.0, "clip": 1.0, "schedule": "cosine", "warmup": 0.03},
    ),
    ("log", LogConfig, {"every": 10, "tensorboard": True}),
    ("eval", EvalConfig, {"every": 200, "metric": "loss", "best": "min"}),
    ("save", SaveConfig, {"every": 200, "keep": 3}),
)


def _default_eval_metric(metrics: Sequence[str]) -> dict[str, object]:
    """Return the metric and direction of `best`: accuracy or the exact match of generated answers where there is one."""
    if "accuracy" in metrics:
        return {"metric": "accuracy", "best": "max"}
    return {"metric": "exact_match", "best": "max"} if "anls" in metrics else {}


def format_lora(lora: LoraConfig) -> str:
    """Return the adapters as a recipe writes them."""
    return f"{{rank: {lora.rank}, alpha: {lora.alpha:g}}}"


def render_recipe_template(task: str, hardware: Hardware | None = None) -> str:
    """Return a YAML recipe for this machine, or another, that is valid once the data is named.

    Raises TaskError and UsageError.
    """
    hardware, found = hardware or detect_hardware(), find_task(task)
    model, use_lora = suggest_model(task, hardware)
    lora = found.default_lora or (LoraConfig(rank=16, alpha=32) if use_lora else None)
    lines = [*_header(task, hardware), f"task: {task}", *_option_lines(found)]
    for name, section, defaults in TEMPLATE_SECTIONS:
        values = {**defaults, **_values_here(section, found, hardware, model, lora)}
        rows = [(key, value, section.model_fields[key].description or "") for key, value in values.items()]
        lines += [f"{name}:", *_add_comments("  ", rows)]
        if section is ModelConfig and model is not None:
            lines.append(_lora_line(found, lora))
    return "\n".join([*lines, *_add_comments("", _top_rows(hardware))]) + "\n"


def _header(task: str, hardware: Hardware) -> list[str]:
    return [
        f"# A starter recipe for {task}, on {hardware.describe()}.",
        "# Name your data, then `dstrain train THIS`. Memory with every preset: `dstrain plan THIS`.",
        "# Every key: `dstrain train THIS --dry-run`.",
    ]


def _option_lines(task: type[Task]) -> list[str]:
    own = task_options(task)
    if not own:
        return []
    lines = ["options:", *_add_comments("  ", [(option.name, option.default, option.help) for option in own])]
    for option in filter(lambda one: one.nested, own):
        rows = [(nested.name, nested.default, nested.help) for nested in option.nested]
        lines += [f"  # {option.name}:", *_add_comments("  #   ", rows)]
    return lines


def _values_here(
    section: type[Section],
    task: type[Task],
    hardware: Hardware,
    model: str | None,
    lora: LoraConfig | None,
) -> dict[str, object]:
    """Return the values of a section that depend on the task, the machine, and the suggested model."""
    if section is ModelConfig:
        return {"path": model}
    if section is DataConfig:
        return {"workers": hardware.loader_workers, "max_length": _max_length(task)}
    if section is BatchConfig:
        total = 64 if 64 % max(hardware.gpus, 1) == 0 else 8 * hardware.gpus
        # On GPUs `ds_config: auto` finds the largest micro-batch that fits.
        return {"total": total, "micro": None if hardware.gpus else 4}
    if section is OptimConfig:
        return {"lr": default_learning_rate(task, lora is not None)}
    return _default_eval_metric(task.metric_names) if section is EvalConfig else {}


A4_INCHES = (8.27, 11.69)
PIXELS_PER_TOKEN = 28
"""Of each side: Qwen2.5-VL has patches of 14 pixels, of which 2 x 2 are one token (its technical report, section 2.1)."""


def _max_length(task: type[Task]) -> int:
    """Return a length in which the images of a sample fit, which are never cut: A4 pages, or photos of 1 megapixel."""
    options = {option.name: option.default for option in task_options(task)}
    if "dpi" in options and isinstance(pages := options["max_pages"], int):
        width, height = (math.ceil(side * float(str(options["dpi"])) / PIXELS_PER_TOKEN) for side in A4_INCHES)
        return 1024 * math.ceil((pages * width * height + 1024) / 1024)
    return 4096 if task.__module__.endswith(".vlm") else 1024


def _top_rows(hardware: Hardware) -> list[tuple[str, object, str]]:
    whole = RunConfig.model_fields
    values = {"precision": "auto", "ds_config": "auto" if hardware.gpus else "zero2", "epochs": 1, "seed": 0}
    rows = [(key, value, whole[key].description or "") for key, value in values.items()]
    return [
        (key, value, f"{text} Here: {hardware.precision}." if key == "precision" else text) for key, value, text in rows
    ]


def _lora_line(task: type[Task], lora: LoraConfig | None) -> str:
    """Return the line on model.lora, a comment where all weights are trained."""
    full, adapters = (f"{default_learning_rate(task, use_lora):g}" for use_lora in (False, True))
    if lora is not None:
        return f"  lora: {format_lora(lora)}  # low-rank adapters; null: train all weights, with optim.lr {full}"
    return f"  # lora: {{rank: 16, alpha: 32}}  # low-rank adapters; raise optim.lr to {adapters}"


def _add_comments(indent: str, rows: list[tuple[str, object, str]]) -> list[str]:
    written = [(f"{key}: {to_yaml(value)}", text) for key, value, text in rows]
    width = max(len(line) for line, _ in written) + 2
    return [f"{indent}{line:{width}}# {text}" for line, text in written]


def to_yaml(value: object) -> str:
    """Return a value as YAML in one line."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value)  # on one line; YAML reads it alike
    return dump_yaml(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()

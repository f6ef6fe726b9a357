"""The memory planner against published measurements: `python -m benchmarks.planner [--to docs/measurements/planner.md]`.

benchmarks/planner_cases.json has numbers and sources only. A case that names no length, or trains in another way than
dstrain can, is planned but not compared.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import write_table
from dstrain.config.schema import RunConfig
from dstrain.planner.lines import (
    ALWAYS,
    FRAGMENTATION,
    HEAD,
    HEAD_ROWS,
    KEPT,
    UPDATE,
    Kind,
    MemoryLine,
    Span,
    sum_bytes,
)
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.shapes import named_config, shape_names
from dstrain.planner.workload import Cluster
from dstrain.preset import Preset, read_preset

CASES = Path(__file__).with_name("planner_cases.json")
LOW, HIGH = 0.92, 1.10
"""Ratios of planned to measured memory that are aimed at."""
OUTSIDE_TORCH = ("CUDA context, cuBLAS", "NCCL")
BUFFERS_OF_DEEPSPEED = ("reduce buckets", "flat gradients of the step", "fp64 copy of a gradient")
FIGURES = {"smi": "nvidia-smi", "res": "reserved by torch", "alloc": "allocated by torch"}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A case with its plans, in GiB."""

    case: dict[str, Any]
    planned: float
    as_peer: float
    """With what the measured program keeps and dstrain does not."""

    @property
    def ratio(self) -> float:
        """Planned like the peer, over measured."""
        return self.as_peer / float(self.case["measured_gib"])


def make_config(case: dict[str, Any], models: dict[str, Any], **changes: Any) -> RunConfig:
    """Return the recipe of a case: one pass for each step. `changes`: keys of model."""
    model = named_config(case["model"]) if case["model"] in shape_names() else models[case["model"]]
    values: dict[str, Any] = {
        "task": case["task"],
        "precision": "bf16",
        "model": {"config": model, "lora": None, "kernels": "none", **changes},
        "data": {"train": "train.jsonl", "max_length": case["length"]},
        "batch": {"micro": case["micro"], "accumulate": 1},
        "optim": {"lr": 1e-5},
    }
    for key, value in case["set"].items():
        section, _, name = key.partition(".")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return RunConfig.model_validate(values)


def make_preset(case: dict[str, Any]) -> Preset:
    """Return the preset of a case, with the sizes that its DeepSpeed JSON sets."""
    preset = read_preset(case["preset"])
    zero = {**preset.block["zero_optimization"], **case.get("zero_optimization", {})}
    return Preset(preset.name, preset.path, {**preset.block, "zero_optimization": zero})


def lines_of_peer(case: dict[str, Any], plan: MemoryPlan) -> tuple[MemoryLine, ...]:
    """Return the lines with the peer's own terms; docs/measurements/planner.md gives the cause of each.

    `plan`: without tiles of MLPs and norms, which no peer has.
    """
    shape, tokens = plan.shape, plan.workload.tokens
    own = {row.name for row in HEAD_ROWS}
    lines = [line for line in plan.lines if not (case["logit_bytes"] and line.name in own)]

    def add(name: str, num_bytes: float, formula: str, kind: Kind, span: Span) -> None:
        lines.append(MemoryLine(name, round(num_bytes), "gpu", kind, formula, case["source"], *span))

    if case["logit_bytes"]:
        size = case["logit_bytes"] * tokens * shape.vocab
        add("logits of the peer", size, f"{case['logit_bytes']} N V", "activation", HEAD)
    if group := plan.find("gradients of a sub-group"):
        add("sub-group in 16 bits", group.num_bytes // 2, "w S", "buffer", UPDATE)
    if case.get("keeps_inputs_of_products"):
        size = 2 * 2 * tokens * shape.layers * (3 * shape.hidden + shape.intermediate)
        add("inputs of products", size, "2 w T (3 H + I)", "activation", KEPT)
    if case.get("repeats_keys"):
        size = 2 * 2 * tokens * shape.layers * (shape.heads - shape.kv_heads) * shape.head_dim
        add("repeated keys and values", size, "2 w T (A - K)", "activation", KEPT)
    if case.get("copies_tied_head") and shape.tied:
        add("weights: head", 2 * shape.hidden * shape.vocab, "w H V", "state", ALWAYS)
    if case.get("compiled"):
        saved, layers = tokens * (4 * shape.hidden + 2 * shape.intermediate), shape.layers
        by_line = {"one recomputed layer": saved}
        names = ("activations of the layers", "activations of the last layers")
        kept = [line for line in lines if line.name in names]
        for line in kept:
            by_line[line.name] = round(saved * layers * line.num_bytes / sum(part.num_bytes for part in kept))
        lines = [replace(line, num_bytes=max(0, line.num_bytes - by_line.get(line.name, 0))) for line in lines]
    if case.get("evaluation_logit_bytes"):
        size = case["evaluation_logit_bytes"] * tokens * shape.vocab
        gathered = plan.find("gathered weights")
        size += gathered.num_bytes if gathered else 0
        # Never at the same time as an update.
        if size > sum_bytes((line for line in lines if line.first == "update"), "gpu"):
            lines = [line for line in lines if line.first != "update"]
            formula = f"G + {case['evaluation_logit_bytes']} N V"
            add("evaluation: gathered weights and logits", size, formula, "activation", UPDATE)
    if case.get("without_deepspeed"):
        lines = [line for line in lines if line.name not in BUFFERS_OF_DEEPSPEED]
    if case.get("states_in_16_bits"):
        lines = [line for line in lines if line.name != "master weights"]
        lines = [
            replace(line, num_bytes=line.num_bytes // 2) if line.name == "optimizer states" else line for line in lines
        ]
    tensors = replace(plan, lines=tuple(line for line in lines if line.kind != "reserve")).gpu_bytes
    share = FRAGMENTATION[case.get("expandable_segments", True)]
    return tuple(
        replace(line, num_bytes=round(share * tensors)) if line.name == "fragmentation" else line for line in lines
    )


def compared_bytes(plan: MemoryPlan, figure: str) -> int:
    """Return the part of a plan that a figure measures."""
    if figure == "alloc":
        return plan.tensor_bytes
    outside = sum(line.num_bytes for line in plan.lines if line.name in OUTSIDE_TORCH)
    return plan.gpu_bytes - (outside if figure == "res" else 0)


def compare(case: dict[str, Any], models: dict[str, Any]) -> Comparison:
    """Plan a case."""
    cluster = Cluster(gpus_per_node=case["gpus"], nodes=case["nodes"])
    plan, peer = (
        plan_memory(make_config(case, models, tiled_mlp=tiled), make_preset(case), cluster) for tiled in ("auto", False)
    )
    peer = replace(peer, lines=lines_of_peer(case, peer))
    sizes = (compared_bytes(one, case["figure"]) / 2**30 for one in (plan, peer))
    planned, as_peer = sizes
    return Comparison(case=case, planned=planned, as_peer=as_peer)


def make_table(found: list[Comparison]) -> str:
    """Return the table and the distribution as Markdown."""
    lines = [
        "| case | source | figure | measured GiB | planned | with the peer's terms | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in found:
        case = one.case
        why = f"; not compared: {case['not_comparable']}" if "not_comparable" in case else ""
        lines.append(
            f"| {case['name']}: {case['about']}{why} | {case['source']} | {FIGURES[case['figure']]} | "
            f"{case['measured_gib']:.1f} | {one.planned:.1f} | {one.as_peer:.1f} | {one.ratio:.2f} |"
        )
    ratios = sorted(one.ratio for one in found if "not_comparable" not in one.case)
    inside = sum(LOW <= ratio <= HIGH for ratio in ratios)
    low = sum(ratio < 1 / HIGH for ratio in ratios)
    lines += [
        "",
        f"{len(ratios)} cases are compared: {inside} lie between {LOW:.2f} and {HIGH:.2f}, median {median(ratios):.2f}, least "
        f"{ratios[0]:.2f}, most",
        f"{ratios[-1]:.2f}; {low} took more than 10 % above the plan.",
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, help="Markdown file whose table is replaced")
    arguments = parser.parse_args()
    data = json.loads(CASES.read_text(encoding="utf-8"))
    table = make_table([compare(case, data["models"]) for case in data["cases"]])
    write_table(table, "benchmarks.planner", arguments.to)


if __name__ == "__main__":
    main()

"""The memory planner against torch's CUDA allocator: peaks of real steps, on a GPU or on an emulated one.

    python -m benchmarks.planner_allocator [--only REGEX] [--rows ROWS.jsonl] [--to docs/measurements/gpu-memory.md]

Each case of benchmarks/planner_allocator_cases.json is a recipe with a preset. Its processes are forked from this one,
which has imported torch; they build model and engine, take steps on rows of data.max_length tokens and report the peaks
of the allocator. A case whose row is in ROWS.jsonl is not measured again, so that an interrupted command goes on; its
plan is always computed anew.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import SHAPES, commit, write_table
from benchmarks.forks import fork
from benchmarks.planner import make_config, make_preset
from dstrain.config.schema import RunConfig
from dstrain.planner.lines import CUDA_CONTEXT_BYTES, MOMENTS
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.shapes import read_shape
from dstrain.planner.workload import ALLOCATOR_ENV_VARS, Cluster

CASES = Path(__file__).with_name("planner_allocator_cases.json")
MODELS: dict[str, Any] = {name: {"model_type": "llama", **sizes} for name, sizes in SHAPES.items()}
IMPORTED = ("torch", "deepspeed", "transformers", "dstrain.training.build_run", "dstrain.training.engine.deepspeed")
"""Modules that take long. Not peft: with bitsandbytes it initializes CUDA, which no process may do before it forks."""
STEPS = 3
"""Optimizer steps of a case: buffers and states exist from the first one on."""
LOW, HIGH = 0.95, 1.05
"""Ratios of planned to allocated memory that are aimed at."""
SEGMENTS = {"expandable": "expandable_segments:True", "fixed": "expandable_segments:False"}
"""Segments of torch's allocator -> value of PYTORCH_CUDA_ALLOC_CONF."""
GIB = 2**30


def read_cases(path: Path = CASES) -> list[dict[str, Any]]:
    """Return the cases with the defaults of the file; a case with `fixed_too` is there twice, with both kinds of segments."""
    data = json.loads(path.read_text(encoding="utf-8"))
    cases = []
    for given in data["cases"]:
        case = {**data["defaults"], **given, "segments": "expandable"}
        kinds = [*SEGMENTS] if case.pop("fixed_too", False) else ["expandable"]
        cases += [{**case, "segments": segments} for segments in kinds]
    return [{**case, "name": name_case(case)} for case in cases]


def name_case(case: dict[str, Any]) -> str:
    """Return the name of a case, which says all that it sets."""
    words = [case["task"], case["model"], f"{case['micro']} x {case['length']}", case["preset"]]
    for key, value in case["set"].items():
        words.append(f"{key.rpartition('.')[2]}: {value if isinstance(value, str) else json.dumps(value)}")
    words += [f"{case['gpus']} GPUs"] * (case["gpus"] > 1) + ["fixed segments"] * (case["segments"] == "fixed")
    return ", ".join([" ".join(words[:4]), *words[4:]])


def make_recipe(case: dict[str, Any], folder: Path) -> RunConfig:
    """Return the recipe of a case, with data and a small tokenizer in `folder`."""
    values = make_config(case, MODELS).model_dump()
    values["data"]["train"] = str(folder / "train.jsonl")
    if values["model"]["config"]["model_type"] == "qwen2_5_vl":
        values["model"]["processor"] = str(write_qwen_processor(folder / "processor"))
    else:
        values["model"]["tokenizer"] = {"train": "bpe", "vocab_size": 320}
    return RunConfig.model_validate(values)


def write_qwen_processor(folder: Path) -> Path:
    """Write a processor of Qwen2.5-VL with its own sizes of patches, and a small tokenizer. Needs torchvision."""
    from transformers import Qwen2_5_VLProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor

    from dstrain.data.encoding.trained_tokenizer import train_tokenizer

    tokenizer = train_tokenizer([" ".join(WORDS)] * 4, 300)
    names = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    tokenizer.add_tokens([*names], special_tokens=True)
    processor = Qwen2_5_VLProcessor(Qwen2VLImageProcessor(), tokenizer, Qwen2VLVideoProcessor())
    processor.save_pretrained(folder)
    return folder


def plan_case(case: dict[str, Any]) -> MemoryPlan:
    """Return the plan of a case."""
    from dstrain.training.list_parameters import list_base_parameters

    previous = {name: os.environ.pop(name, None) for name in ALLOCATOR_ENV_VARS}
    os.environ[ALLOCATOR_ENV_VARS[0]] = SEGMENTS[case["segments"]]
    try:
        config = make_config(case, MODELS)
        shape = read_shape(config, list_base_parameters)
        return plan_memory(config, make_preset(case), Cluster(gpus_per_node=case["gpus"]), shape)
    finally:
        del os.environ[ALLOCATOR_ENV_VARS[0]]
        os.environ.update({name: value for name, value in previous.items() if value is not None})


WORDS = ("open", "clean", "turn", "look", "pump", "lamp")


def write_records(case: dict[str, Any], folder: Path) -> None:
    """Write records whose rows have more than data.max_length tokens, so that each row is cut to this length."""
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for index in range(8):
            file.write(json.dumps(_make_record(case, folder, random.Random(index))) + "\n")


def _make_record(case: dict[str, Any], folder: Path, draw: random.Random) -> dict[str, Any]:
    def write_answer() -> str:
        return " " + " ".join(draw.choice(WORDS) for _ in range(case["length"]))

    task, prompt = case["task"], "open it"
    if task in ("rm", "dpo", "safe_dpo"):
        return {"prompt": prompt, "chosen": write_answer(), "rejected": write_answer()}
    if task == "kto":
        return {"prompt": prompt, "completion": write_answer(), "label": draw.random() < 0.5}
    if task == "prm":
        steps = [" ".join(draw.choice(WORDS) for _ in range(31)) for _ in range(case["length"] // 32)]
        return {"prompt": prompt, "completions": steps, "labels": [draw.random() < 0.7 for _ in steps]}
    if task in ("vlm", "docqa"):
        from PIL import Image

        image = folder / f"{draw.randrange(10**9)}.png"
        Image.new("RGB", (case["image_side"], case["image_side"]), (200, 30, 30)).save(image)
        if task == "docqa":
            return {"question": prompt, "answers": [write_answer()], "images": [image.name]}
        messages = [{"role": "user", "content": "<image>" + prompt}, {"role": "assistant", "content": write_answer()}]
        return {"messages": messages, "images": [image.name]}
    return {"prompt": prompt, "completion": write_answer()}


class PhasePeaks:
    """Peaks of the allocator in the forward passes, backward passes and updates of an engine, and between them."""

    def __init__(self, engine: Any) -> None:
        import torch

        self.allocated: dict[str, int] = {}
        self.reserved = 0
        self._memory = torch.cuda
        for name in ("forward", "backward", "step"):
            setattr(engine, name, self._watch(name, getattr(engine, name)))
        self._memory.reset_peak_memory_stats()

    def close(self, phase: str) -> None:
        """Attribute the peak since the last call to a phase."""
        self.allocated[phase] = max(self.allocated.get(phase, 0), self._memory.max_memory_allocated())
        self.reserved = max(self.reserved, self._memory.max_memory_reserved())
        self._memory.reset_peak_memory_stats()

    def _watch(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            self.close("between")
            result = function(*args, **kwargs)
            self.close(phase)
            return result

        return watched


def measure(case: dict[str, Any], folder: Path, rank: int) -> dict[str, Any]:
    """Build the engine of a case as `dstrain train` does, take steps, and return the peaks of the allocator in bytes."""
    import torch

    from dstrain.batch import Batch
    from dstrain.config import resolve_batch
    from dstrain.data.loading.loader import make_batch
    from dstrain.distributed.world import TorchWorld
    from dstrain.ds_config import Device, resolve_ds_config
    from dstrain.models.params import build_param_groups, zero3_init
    from dstrain.tasks import make_task
    from dstrain.tasks.common.task import load_split
    from dstrain.training.build_model import build_train_module, resolve_model_dtype
    from dstrain.training.engine.deepspeed import DeepSpeedEngine
    from dstrain.training.precompute_outputs import OutputsJob, add_outputs_and_select

    if os.environ.get("EMU_VALUES") == "2":
        accept_kernels_by_shape()
    torch.cuda.set_device(rank)
    if "card_bytes" in case:
        share = (case["card_bytes"] - CUDA_CONTEXT_BYTES) / torch.cuda.get_device_properties(rank).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), rank)
    world = TorchWorld.join(torch.device("cuda", rank), timedelta(minutes=10))
    config, preset = make_recipe(case, folder), make_preset(case)
    world.share_sequences(config.parallel.sequence)
    sizes = resolve_batch(config.batch, world.size, preset.micro, preset.accumulate, config.parallel.sequence)
    ds_config = resolve_ds_config(config, preset, sizes, world.size, Device("cuda", True), folder)
    task = make_task(resolve_model_dtype(config, ds_config))
    job = OutputsJob(task=task, ds_config=ds_config, micro_batch_size=1, world=world)
    examples = add_outputs_and_select(job, {"train": load_split(task, "train")})["train"]
    assert examples is not None
    # On the device: the weights of a large model would take their size of host memory. bitsandbytes makes 8 bits of
    # weights that come from the host.
    build_device = torch.device("cpu") if config.model.quantize == "int8" else world.device
    with zero3_init(ds_config), build_device:
        module = build_train_module(task)
    engine = DeepSpeedEngine(module, build_param_groups(module.model, config.optim), config.optim, ds_config, world)
    built = {"built": torch.cuda.memory_allocated(), "building": torch.cuda.max_memory_allocated()}
    torch.cuda.empty_cache()
    peaks = PhasePeaks(engine.engine)

    def make_pass(index: int) -> Batch:
        ids = [(index * sizes.micro + row) % len(examples) for row in range(sizes.micro)]
        return make_batch(examples, task.collate, ids, 0, sequence=world.sequence)

    for step in range(STEPS):
        engine.step([make_pass(step * sizes.accumulate + index) for index in range(sizes.accumulate)], 1e-5)
    peaks.close("between")
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    return {
        **built, "allocated": max(peaks.allocated.values()), "phases": peaks.allocated, "reserved": peaks.reserved,
        "outside": outside, "left": torch.cuda.memory_allocated(), "device": describe_device(),
    }  # fmt: skip


def accept_kernels_by_shape() -> None:
    """Let a module take its fused kernel where the shapes are the same: for a device that computes no values."""
    from dstrain.models import fused_kernels

    fused_kernels._relative_error = lambda wanted, computed: 0.0 if wanted.shape == computed.shape else float("inf")


def describe_device() -> str:
    """Return the device and torch; the emulated one says so by a variable of its own."""
    import torch

    emulated = "torch's CUDA allocator on an emulated " if os.environ.get("EMU_VALUES") else ""
    return f"{emulated}{torch.cuda.get_device_name()}, torch {torch.__version__}"


def run_case(case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Measure a case in forks of this process; return the figures of the process with most, or why there are none."""
    from dstrain.launch.probe import free_port

    folder = Path(tempfile.mkdtemp(prefix="dstrain-allocator-"))
    try:
        write_records(case, folder)
        port = free_port()
        pids = []
        for rank in range(case["gpus"]):
            pids.append(fork(partial(_measure_rank, case, folder, rank, port), folder / "log.txt"))
        fault = _wait(pids, time.monotonic() + seconds)
        files = [folder / f"{rank}.json" for rank in range(case["gpus"])]
        if fault or not all(file.is_file() for file in files):
            log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
            return {"fault": fault or "a process ended early", "log": log[-12:]}
        rows = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        return dict(max(rows, key=lambda row: row["allocated"]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _measure_rank(case: dict[str, Any], folder: Path, rank: int, port: int) -> None:
    """Measure a case as one of its processes, and write RANK.json into the folder."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": case["gpus"], "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in ranks.items()}, MASTER_PORT=str(port))
    os.environ.update({"DSTRAIN_CACHE": str(folder / "cache"), ALLOCATOR_ENV_VARS[0]: SEGMENTS[case["segments"]]})
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    figures = measure(case, folder, rank)
    (folder / f"{rank}.json").write_text(json.dumps(figures), encoding="utf-8")


def _wait(pids: Sequence[int], until: float) -> str:
    """Wait for processes; return why one failed, or an empty string. All of them have ended then."""
    running, fault = set(pids), ""
    while running:
        for pid in sorted(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                if status and not fault:
                    fault = f"a process ended with {os.waitstatus_to_exitcode(status)}"
        if running and not fault and time.monotonic() > until:
            fault = "took too long"
        if fault:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return fault


def import_modules() -> None:
    """Import what takes long, without a use of CUDA: a process that has used it cannot fork another that does."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in IMPORTED:
        importlib.import_module(module)


def main() -> None:
    """Measure the cases that have no row yet, and print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--only", default="", help="regular expression of the names of cases")
    parser.add_argument("--rows", type=Path, default=Path("planner_allocator.jsonl"), help="measured rows, appended to")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit of a case")
    parser.add_argument("--to", type=Path, help="Markdown file whose table is replaced")
    arguments = parser.parse_args()
    cases = [case for case in read_cases(arguments.cases) if re.search(arguments.only, case["name"])]
    rows = read_rows(arguments.rows)
    import_modules()
    for case in cases:
        if rows.get(case["name"], {}).get("case") == case:
            continue
        row = measure_case(case, arguments.seconds)
        if "fault" not in row:
            rows[case["name"]] = row
        with arguments.rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(describe(row), file=sys.stderr, flush=True)
    measured = [rows[case["name"]] for case in cases if case["name"] in rows]
    missing = [case["name"] for case in cases if case["name"] not in rows]
    write_table(make_table(measured, missing), "benchmarks.planner_allocator", arguments.to)


def measure_case(case: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Return the row of a case: its figures, or `fault` and the end of its log, with where and when it was measured."""
    began = time.monotonic()
    figures = run_case(case, seconds)
    today = datetime.now(UTC).strftime("%Y-%m-%d")
    return {"case": case, "date": today, "commit": commit(), "seconds": round(time.monotonic() - began, 1), **figures}


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Return name -> last row of a case that was measured; not those of cases that failed."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["case"]["name"]: row for row in rows if "fault" not in row}


def make_table(rows: Sequence[dict[str, Any]], missing: Sequence[str]) -> str:
    """Return the record, the distribution, both tables, and the plan's moments of what is outside LOW to HIGH."""
    plans = [plan_case(row["case"]) for row in rows]
    ratios = [plan.tensor_bytes / row["allocated"] for plan, row in zip(plans, rows, strict=True)]
    totals = [plan.gpu_bytes / get_total(row) for plan, row in zip(plans, rows, strict=True)]
    inside = sum(LOW <= ratio <= HIGH for ratio in ratios)
    devices, dates, commits = ({str(row.get(key, "unknown")) for row in rows} for key in ("device", "date", "commit"))
    record = f"{', '.join(sorted(devices))}; measured {', '.join(sorted(dates))} at {', '.join(sorted(commits))}, planned at {commit()}."
    summary = (
        f"{len(rows)} cases: {inside} of them ({inside / len(rows):.0%}) within {LOW:.2f} to {HIGH:.2f}, median "
        f"{median(ratios):.3f}, least {min(ratios):.3f}, most {max(ratios):.3f}. Planned total to reserved and context: "
        f"median {median(totals):.3f}, least {min(totals):.3f}, most {max(totals):.3f}."
    )
    lines = [
        _wrap(record),
        "",
        _wrap(summary),
        "",
        "| case | planned tensors, GiB | allocated, GiB | ratio | planned total, GiB | reserved and context, GiB | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, plan, ratio, total in zip(rows, plans, ratios, totals, strict=True):
        lines.append(
            f"| {row['case']['name']} | {plan.tensor_bytes / GIB:.2f} | {row['allocated'] / GIB:.2f} | {ratio:.3f} "
            f"| {plan.gpu_bytes / GIB:.2f} | {get_total(row) / GIB:.2f} | {total:.3f} |"
        )
    notes = [describe(row) for row, ratio in zip(rows, ratios, strict=True) if not LOW <= ratio <= HIGH]
    notes += [f"not measured: {name}" for name in missing]
    lines += ["", *(_wrap(f"- {note}") for note in notes)] if notes else []
    return "\n".join([*lines, "", *_compare_segments(rows)])


def _wrap(paragraph: str) -> str:
    return textwrap.fill(paragraph, 120, subsequent_indent="  " * paragraph.startswith("- "), break_on_hyphens=False)


def get_total(row: dict[str, Any]) -> int:
    """Return the bytes of a card that a case took: what the allocator reserved at most, and what is outside of it."""
    return int(row["reserved"] + row["outside"])


def _compare_segments(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table of the bytes that the allocator reserved beyond its tensors with each kind of segments."""
    by_name = {row["case"]["name"]: row for row in rows}
    lines = [
        "| case | allocated, GiB | reserved, expandable segments | reserved, fixed segments |",
        "|---|---|---|---|",
    ]
    for name, fixed in by_name.items():
        if fixed["case"]["segments"] != "fixed":
            continue
        expandable = by_name.get(name.removesuffix(", fixed segments"))
        if expandable is None:
            continue
        cells = [
            f"{row['reserved'] / GIB:.2f} ({row['reserved'] / row['allocated'] - 1:+.0%})"
            for row in (expandable, fixed)
        ]
        lines.append(
            f"| {expandable['case']['name']} | {expandable['allocated'] / GIB:.2f} | {cells[0]} | {cells[1]} |"
        )
    return lines


def describe(row: dict[str, Any]) -> str:
    """Return a row in a line."""
    name = row["case"]["name"]
    if "fault" in row:
        return f"{name}: {row['fault']}\n" + "\n".join(row.get("log", []))
    plan = plan_case(row["case"])
    phases = " ".join(f"{phase} {size / GIB:.2f}" for phase, size in row["phases"].items())
    reserve = plan.gpu_bytes - plan.tensor_bytes
    shown = " ".join(f"{moment} {(plan.total('gpu', moment) - reserve) / GIB:.2f}" for moment in MOMENTS)
    return (
        f"{name}: planned {plan.tensor_bytes / GIB:.2f} allocated {row['allocated'] / GIB:.2f} ratio "
        f"{plan.tensor_bytes / row['allocated']:.3f} reserved {row['reserved'] / GIB:.2f} building {row['building'] / GIB:.2f} "
        f"[{phases} left {row['left'] / GIB:.2f}; planned: {shown}] {row['seconds']} s"
    )


if __name__ == "__main__":
    main()

"""Measure steps on one GPU: tokens per second, MFU, peak memory and host-device synchronizations, each feature on and off.

    python -m benchmarks.gpu [--minutes 9] [--tasks sft,rm,dpo,vlm] [--shapes 0.5b,3b,8b]
    python -m benchmarks.gpu --tiny 1         # on a CPU, to check the script

Weights are drawn on the GPU; the texts are synthetic, with answers of very different lengths. Each variant is built, measured and
freed before the next one. A variant that this version, this machine or its memory cannot run has a row that says why.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.common import count_tokens, join_alone, made_batches, made_ds_config, made_model, run, wait_for
from benchmarks.trl_side import DPO, REWARD, SFT, StepByStep, made_side
from dstrain.errors import UsageError
from dstrain.models import heads
from dstrain.planner.gpu_peaks import find_peak_flops
from dstrain.report.flops import StepFlops

TEXT: dict[str, tuple[int, int, int, int, int, int]] = {
    "tiny": (32, 48, 2, 4, 2, 640),
    "0.5b": (896, 4864, 24, 14, 2, 151936),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "3b": (2048, 11008, 36, 16, 2, 151936),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}
"""Hidden and intermediate size, layers, heads, key-value heads and vocabulary of Qwen2.5 (0.5B, 3B) and Llama 3 (1B, 8B)."""
TOWERS = {"tiny": (32, 48, 2, 4, 28, 14), "0.5b": (1024, 4096, 24, 16, 336, 14)}
"""Hidden and intermediate size, layers, heads, pixels and pixels of a patch of the vision tower (CLIP ViT-L/14)."""
LORA = ("8b",)
"""Shapes whose fp32 optimizer states exceed the memory of one card: trained with LoRA."""
TRAINERS = {"rm": REWARD, "dpo": DPO, "sft": SFT, "vlm": SFT}
WHOLE_HEAD = "all logits at once"
VARIANTS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "packing off": ("batch.packing=false",),
    "prefix sharing off": ("batch.prefix_sharing=false",),
    "attention sdpa": ("model.attn_implementation=sdpa",),
    "attention flash_attention_2": ("model.attn_implementation=flash_attention_2",),
    "attention flex_attention": ("model.attn_implementation=flex_attention",),
    "gradient checkpointing": ("model.gradient_checkpointing=true",),
    WHOLE_HEAD: (),
    "TRL": (),
    "fused kernels": ("model.kernels=liger",),
    "no fused kernels": ("model.kernels=none",),
    "gradient checkpointing and fused kernels": ("model.gradient_checkpointing=true", "model.kernels=liger"),
    "gradient checkpointing and no fused kernels": ("model.gradient_checkpointing=true", "model.kernels=none"),
}
"""Name -> changes of the recipe."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Sizes of the measurement."""

    length: int
    micro: int
    steps: int
    full_rows: bool = False
    """Whether every row has `length` tokens; else answers differ in length."""


def measure(
    *, tasks: str = "sft,rm,dpo,vlm", shapes: str = "0.5b,3b,8b", length: int = 2048, micro: int = 8, steps: int = 6,
    minutes: float = 9.0, variants: str = "", full_rows: int = 0, tiny: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Measure the variants of each task at the first shape, and the main ones at the others, as long as there is time.

    `variants` (names, by commas) are measured at every shape instead.
    """
    world, deadline = join_alone(), time.monotonic() + 60 * minutes
    if tiny:
        length, micro, steps = 96, 2, 2
    size = Size(length=length, micro=micro, steps=steps, full_rows=bool(full_rows))
    rows: list[dict[str, Any]] = []
    for number, shape in enumerate(["tiny"] if tiny else shapes.split(",")):
        for task in tasks.split(","):
            if task == "vlm" and shape not in TOWERS:
                continue
            names = list(VARIANTS) if number == 0 else ["as it is", "gradient checkpointing", "TRL"]
            if variants:
                names = variants.split(",")
            for name in names:
                late = time.monotonic() > deadline
                found = {"note": "no time was left"} if late else _try_variant(world, (task, shape, name), size)
                rows.append({**_EMPTY_ROW, "task": task, "shape": shape, "variant": name, **found})
                print(rows[-1], flush=True)
    _compare_losses(rows)
    return {
        "settings": {"length": length, "micro": micro, "steps": steps, "full_rows": size.full_rows},
        "checked": "the first loss of each variant is within 5 % of that of 'as it is': the weights are the same, in bf16",
        "rows": rows,
    }


_EMPTY_ROW: dict[str, Any] = dict.fromkeys(
    ("task", "shape", "variant", "first_loss", "step_ms", "tokens_per_second", "mfu", "peak_memory_gib", "syncs_per_step", "note")
)  # fmt: skip


def _compare_losses(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        base = next(one for one in rows if (one["task"], one["shape"]) == (row["task"], row["shape"]))["first_loss"]
        if base and row["first_loss"]:
            apart = abs(row["first_loss"] / base - 1)
            assert apart <= 0.05, f"{row} has another loss than {base}"


def _try_variant(world: Any, what: tuple[str, str, str], size: Size) -> dict[str, Any]:
    task, shape, name = what
    if name == "TRL" and find_spec("trl") is None:
        return {"note": "TRL is not installed"}
    try:
        made = made_gpu_task(task, shape, size, VARIANTS[name])
        with _whole_head() if name == WHOLE_HEAD else nullcontext():
            return _measure_trl(made, task, world, size) if name == "TRL" else _measure_dstrain(made, world, size)
    except torch.OutOfMemoryError:
        return {"note": "out of memory"}
    except UsageError as fault:
        return {"note": str(fault).splitlines()[0][:160]}
    except Exception as fault:  # the other variants are worth having
        traceback.print_exc()
        return {"note": f"{type(fault).__name__}: {fault}".splitlines()[0][:160]}
    finally:
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


@contextmanager
def _whole_head() -> Iterator[None]:
    """Compute the logits of all targets in one chunk."""
    with mock.patch.dict(heads.MAX_CHUNK_BYTES, {"cpu": 2**62, "cuda": 2**62}):
        yield


def _measure_dstrain(task: Any, world: Any, size: Size) -> dict[str, Any]:
    from dstrain.training.engine.deepspeed import DeepSpeedEngine

    config = made_ds_config(task, "zero2", world, precision="bf16", micro=size.micro)
    torch.manual_seed(0)
    with world.device:  # weights are allocated and drawn there: no copy on the host
        module, groups = made_model(task, config)
    engine = DeepSpeedEngine(module, groups, task.recipe.optim, config, world)
    batches = made_batches(task, size.steps, size.micro)
    lr = task.recipe.optim.lr
    with StepFlops(module, module.model) as flops:
        first = engine.step(batches[0], lr)
    with _counted_syncs(world.device) as syncs:
        engine.step(batches[1 % len(batches)], lr)
    seconds = []
    for batch in batches:
        wait_for(world.device)
        began = time.perf_counter()
        engine.step(batch, lr)
        wait_for(world.device)
        seconds.append(time.perf_counter() - began)
    examples, micro = task.examples("train"), size.micro
    tokens = [
        count_tokens([examples[(step * micro + index) % len(examples)] for index in range(micro)])
        for step in range(size.steps)
    ]
    peak = find_peak_flops(torch.cuda.get_device_name()) if world.device.type == "cuda" else None
    rate = sum(tokens) / sum(seconds)
    engine.engine.destroy()
    return {
        "first_loss": float(first.loss) / first.weight,
        **_figures(seconds, rate, world),
        "mfu": flops.total / tokens[0] * rate / peak if peak else None,
        "syncs_per_step": len(syncs) if world.device.type == "cuda" else None,
    }


def _figures(seconds: list[float], rate: float, world: Any) -> dict[str, Any]:
    cuda = world.device.type == "cuda"
    return {
        "step_ms": 1000 * statistics.median(seconds),
        "tokens_per_second": rate,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }


@contextmanager
def _counted_syncs(device: torch.device) -> Iterator[list[Any]]:
    """Yield a list that gets a warning for each operation for which the host waits for the device."""
    found: list[Any] = []
    if device.type != "cuda":
        yield found
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [one for one in caught if "synchronizing" in str(one.message)]


def _measure_trl(task: Any, name: str, world: Any, size: Size) -> dict[str, Any]:
    """Measure TRL's trainer: weights and optimizer states in bf16, autocast, its own collation."""
    examples = task.examples("train")
    rows = [examples[index % len(examples)] for index in range((size.steps + 3) * size.micro)]
    torch.manual_seed(0)
    with world.device:
        side = made_side(
            TRAINERS[name], task, rows, bf16=True, use_cpu=world.device.type == "cpu", optim="adamw_torch_fused",
            gradient_checkpointing=False, remove_unused_columns=name != "vlm",
            **({"dataset_kwargs": {"skip_prepare_dataset": True}} if name == "vlm" else {}),
        )  # fmt: skip
    step, seconds = StepByStep(side), []
    for turn in range(size.steps + 2):
        wait_for(world.device)
        began = time.perf_counter()
        step()
        wait_for(world.device)
        seconds += [time.perf_counter() - began] if turn > 1 else []
    step.stop()
    tokens = count_tokens(rows[2 * size.micro : (2 + size.steps) * size.micro])
    return {"first_loss": side.losses[0], **_figures(seconds, tokens / sum(seconds), world)}


def made_gpu_task(task: str, shape: str, size: Size, overrides: tuple[str, ...]) -> Any:
    """Return the task on synthetic data. Raises UsageError for a key that this version does not know."""
    from dstrain.config import read_recipe
    from dstrain.tasks import make_task

    folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
    hidden, inner, layers, heads, kv_heads, vocabulary = TEXT[shape]
    text = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "max_position_embeddings": 8192, "tie_word_embeddings": shape != "8b",
    }  # fmt: skip
    records = [_record(task, index, size, folder, shape) for index in range(size.steps * size.micro)]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    recipe: dict[str, Any] = {
        "task": task,
        "model": {
            "config": _llava(text, shape) if task == "vlm" else text,
            "tokenizer": {"train": "bpe", "vocab_size": 512}, "gradient_checkpointing": False,
        },
        "data": {"train": str(folder / "train.jsonl"), "max_length": size.length + (0 if size.full_rows else 1024)},
        "batch": {"total": size.micro, "micro": size.micro},
        "optim": {"lr": 1e-5, "warmup": 0, "schedule": "constant"},
        "steps": size.steps,
    }  # fmt: skip
    if shape in LORA:
        recipe["model"] |= {"lora": {"rank": 16, "alpha": 32}, "dtype": "bfloat16"}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    return make_task(read_recipe(folder / "recipe.yaml", overrides).config)


def _llava(text: dict[str, Any], shape: str) -> dict[str, Any]:
    hidden, inner, layers, heads, side, patch = TOWERS[shape]
    tower = {
        "model_type": "clip_vision_model", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "image_size": side, "patch_size": patch, "projection_dim": hidden,
    }  # fmt: skip
    return {"model_type": "llava", "vision_config": tower, "text_config": text}


def _record(task: str, index: int, size: Size, folder: Path, shape: str) -> dict[str, Any]:
    """Return a record whose prompt has a quarter of the length, and whose answers have a twentieth to three quarters.

    With full rows the answers are longer than the row, and are cut.
    """
    length = size.length
    draw = random.Random(index)
    words = lambda count: " ".join(draw.choice(("open", "clean", "turn", "look", "pump", "lamp")) for _ in range(count))  # noqa: E731
    shortest, longest = (length, length) if size.full_rows else (max(1, length // 40), length // 3)
    answer = lambda: " " + words(draw.randint(shortest, longest))  # noqa: E731  about two tokens a word
    prompt = words(length // 8)
    if task == "vlm":
        from tests.vision_recipes import picture

        side = TOWERS[shape][4]
        picture(index, (side, side)).save(folder / f"{index}.png")
        return {"image": f"{index}.png", "question": f"<image>\n{prompt}", "answer": answer()}
    if task == "sft":
        return {"prompt": prompt, "completion": answer()}
    return {"prompt": prompt, "chosen": answer(), "rejected": answer()}


if __name__ == "__main__":
    run(measure, __doc__ or "")

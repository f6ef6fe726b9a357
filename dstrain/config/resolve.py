"""Batch sizes, steps and resume compatibility derived from a recipe."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from dstrain.config.schema import BatchConfig, RunConfig, check_warmup
from dstrain.errors import Fault, RecipeError, dotted_name

DEFAULT_MICRO_BATCH_SIZE = 8
"""Samples per forward pass where neither the recipe nor the preset sets them: of evaluations and generated answers."""


@dataclass(frozen=True)
class BatchPlan:
    """Division of one optimizer step into forward passes."""

    total: int
    """Samples per step over all processes."""
    micro: int
    """Maximum number of samples in one forward pass."""
    accumulate: int | None
    """Forward passes per step and process; None: as many as `tokens` takes, which differs between steps."""
    tokens: int | None = None
    """Maximum number of tokens in one forward pass."""
    sequence: int = 1
    """Processes that compute a forward pass together (parallel.sequence)."""

    def data_parallel_size(self, world_size: int) -> int:
        """Return the number of forward passes that the processes compute at the same time."""
        return world_size // self.sequence

    def largest_micro(self, world_size: int) -> int:
        """Return the samples of a step's largest forward pass; below `micro` where many processes share the total."""
        if self.accumulate is None:
            return self.micro
        return math.ceil(self.total / (self.accumulate * self.data_parallel_size(world_size)))

    @property
    def generation_micro(self) -> int:
        """Samples whose answers are generated at once: their lengths, which `tokens` limits, are not known before."""
        return self.micro if self.accumulate is not None else min(self.micro, DEFAULT_MICRO_BATCH_SIZE)

    def half(self, world_size: int) -> BatchPlan | None:
        """Return the plan with half the samples and tokens per forward pass, rounded up, and the same total.

        None if a forward pass has one sample, or one token.
        """
        largest = self.largest_micro(world_size)
        if self.accumulate is None and self.tokens is not None:
            micro = self.micro if self.micro == self.total else math.ceil(self.micro / 2)
            return replace(self, micro=micro, tokens=math.ceil(self.tokens / 2)) if self.tokens > 1 else None
        micro = math.ceil(largest / 2)
        accumulate = math.ceil(self.total / (micro * self.data_parallel_size(world_size)))
        return replace(self, micro=micro, accumulate=accumulate) if largest > 1 else None

    @property
    def ds_accumulate(self) -> int:
        """Forward passes per step for the DeepSpeed JSON."""
        # Any number above 1 where it differs between steps: the engine itself tells DeepSpeed the last pass of a step.
        return 2 if self.accumulate is None else self.accumulate

    def to_config(self, batch: BatchConfig) -> BatchConfig:
        """Return a recipe's `batch` with the sizes of this plan."""
        if self.accumulate is None:
            micro = None if self.micro == self.total else self.micro
            sizes = {"total": self.total, "micro": micro, "accumulate": None, "tokens_per_micro": self.tokens}
        else:
            sizes = {"total": self.total, "micro": self.micro, "accumulate": None, "tokens_per_micro": None}
        return batch.model_copy(update=sizes)

    def describe(self, world_size: int) -> str:
        """Return `16 samples (8 processes x 1 forward pass x 2 samples)`; `up to 2` where some pass has one fewer."""
        largest, size = self.largest_micro(world_size), self.data_parallel_size(world_size)
        processes = _format_processes(size, self.sequence)
        if self.accumulate is None:
            samples = f", and up to {_format_samples(largest)}," * (largest < self.total)
            return f"{_format_samples(self.total)} ({processes}, forward passes of up to {self.tokens} tokens{samples} each)"
        even = "" if self.total == largest * self.accumulate * size else "up to "
        passes = f"{self.accumulate} forward pass{'es' * (self.accumulate != 1)}"
        return f"{_format_samples(self.total)} ({processes} x {passes} x {even}{_format_samples(largest)})"


def _format_processes(size: int, sequence: int) -> str:
    """Return `8 processes`, or `4 groups of 2 processes` where two compute a micro-batch together."""
    if sequence > 1:
        return f"{size} group{'s' * (size != 1)} of {sequence} processes"
    return f"{size} process{'es' * (size != 1)}"


def _format_samples(count: int) -> str:
    return f"{count} sample{'s' * (count != 1)}"


def resolve_batch(
    batch: BatchConfig,
    world_size: int,
    preset_micro: int | None = None,
    preset_accumulate: int | None = None,
    sequence: int = 1,
) -> BatchPlan:
    """Compute the third of total, micro and accumulate from the other two; with tokens_per_micro, only the limits.

    The DeepSpeed JSON's values are used where the recipe has none. A total that does not divide evenly is allowed:
    micro-batches then differ by at most one sample. `sequence`: processes that compute a micro-batch together. Raises
    RecipeError where the three, or recipe and JSON, contradict each other, and where `sequence` does not divide the
    processes.
    """
    if world_size % sequence:
        divisors = [str(number) for number in range(1, world_size + 1) if world_size % number == 0]
        problem = f"is {sequence}, which does not divide the {world_size} process{'es' * (world_size != 1)}"
        raise RecipeError(
            Fault("parallel.sequence", problem, f"write {' or '.join(divisors)}, or start more processes")
        )
    size = world_size // sequence
    for name, ours, theirs in (
        ("micro", batch.micro, preset_micro),
        ("accumulate", batch.accumulate, preset_accumulate),
    ):
        if ours is not None and theirs is not None and ours != theirs:
            problem = f"is {ours} in the recipe and {theirs} in the DeepSpeed JSON"
            raise RecipeError(Fault(f"batch.{name}", problem, "keep one of them"))
    if batch.on_oom == "shrink" and (preset_micro or preset_accumulate):
        problem = "is shrink, but the DeepSpeed JSON fixes the micro-batch"
        fix = "move train_micro_batch_size_per_gpu and gradient_accumulation_steps from it to the recipe's batch"
        raise RecipeError(Fault("batch.on_oom", problem, fix))
    micro = batch.micro or preset_micro
    if batch.tokens_per_micro is not None:
        return replace(_resolve_token_batch(batch, micro, preset_accumulate), sequence=sequence)
    accumulate = batch.accumulate or preset_accumulate
    if batch.total is None:
        micro, accumulate = micro or 1, accumulate or 1
        return BatchPlan(micro * accumulate * size, micro, accumulate, sequence=sequence)
    if micro is None:
        accumulate = accumulate or 1
        micro = math.ceil(batch.total / (accumulate * size))
        return BatchPlan(batch.total, micro, accumulate, sequence=sequence)
    # Rounded up: micro is a limit, so that a larger pass would not fit into memory.
    fitting = math.ceil(batch.total / (micro * size))
    if accumulate is not None and accumulate != fitting:
        processes = _format_processes(size, sequence)
        product = f"micro {micro} x accumulate {accumulate} x {processes} = {micro * accumulate * size}"
        third = "batch.accumulate" if batch.accumulate else "gradient_accumulation_steps from the DeepSpeed JSON"
        fix = f"remove {third} ({fitting} would fit), or another of the three"
        raise RecipeError(Fault("batch.total", f"is {batch.total}, but {product}", fix))
    return BatchPlan(batch.total, micro, fitting, sequence=sequence)


def _resolve_token_batch(batch: BatchConfig, micro: int | None, preset_accumulate: int | None) -> BatchPlan:
    assert batch.total is not None, "checked with the recipe"
    if preset_accumulate is not None:
        problem = f"gradient_accumulation_steps is {preset_accumulate} in the DeepSpeed JSON"
        fix = "remove it there: the number of passes follows from the lengths of the samples"
        raise RecipeError(Fault("batch.tokens_per_micro", problem, fix))
    return BatchPlan(batch.total, min(micro or batch.total, batch.total), None, batch.tokens_per_micro)


def most_tokens_of_pass(config: RunConfig, rows_per_sample: int) -> int | None:
    """Return a number of tokens that no forward pass exceeds on any number of processes; None if there is no limit.

    `rows_per_sample`: sequences of one sample.
    """
    batch, sample = config.batch, rows_per_sample * config.data.max_length
    limits = [] if batch.tokens_per_micro is None else [max(batch.tokens_per_micro, sample)]
    samples = [number for number in (batch.micro, batch.total) if number is not None]
    return min([*limits, *(number * sample for number in samples)], default=None)


def resolve_steps(config: RunConfig, samples_per_epoch: int, samples_per_step: int) -> tuple[int, int]:
    """Return (optimizer steps, samples) of the complete run. With `epochs` the last step may be smaller.

    Raises RecipeError for a warmup of more steps.
    """
    if config.steps is not None:
        return config.steps, config.steps * samples_per_step
    # At least one, also for a small fraction of an epoch.
    samples = max(1, round((config.epochs or 1.0) * samples_per_epoch))
    steps = math.ceil(samples / samples_per_step)
    if faults := [Fault(dotted_name(key), *rest) for key, *rest in check_warmup(config.optim.warmup, steps)]:
        raise RecipeError(faults)
    return steps, samples


_MUTABLE_KEYS = (
    "launch",
    "parallel",
    "ds_config",
    "log",
    "eval",
    "save",
    "profile",
    "timeout_minutes",
    "on_nonfinite",
    "deterministic",
)
_MUTABLE_NESTED_KEYS = {
    "batch": ("micro", "accumulate", "tokens_per_micro", "packing", "prefix_sharing", "on_oom"),
    "data": ("eval", "workers", "prefetch", "pin", "on_error"),
    "model": ("gradient_checkpointing", "attn_implementation", "tiled_mlp", "kernels"),
}


_PATH_KEYS = {
    "task": "task",
    "model.path": "model.path",
    "model.tokenizer": "model.tokenizer",
    "model.processor": "model.tokenizer",
    "model.chat_template": "model.tokenizer",
    "data.train": "data.train",
}
"""Keys with paths -> digest in run.json that is compared instead (train/resume): a run may be moved to another machine."""


def check_learning_changes(
    before: RunConfig, after: RunConfig, allowed: Collection[str] = (), digests: Collection[str] = ()
) -> list[Fault]:
    """Return a fault for each key that changes the training result between two recipes; `allowed` names exceptions.

    Another absolute path is no fault where `digests`, those that the run recorded, show that its content is compared,
    nor in model.init, whose weights the checkpoint replaces.
    """
    names = {part for name in digests for part in (name, name.rpartition(".")[0])}  # options.safety.harmless_rm
    moved = {"model.init", *(key for key, digest in _PATH_KEYS.items() if digest in names)}
    moved |= {name for name in names if name.startswith("options.")}
    return [
        Fault(
            key,
            f"is {new!r}, but the run was started with {old!r}",
            f"put it back, choose another --run-dir, or pass --allow-change {key}",
        )
        for key, (old, new) in find_learning_changes(before, after).items()
        if not any(key == name or key.startswith(name + ".") for name in allowed)
        and not (key in moved and _equal_except_paths(old, new))
    ]


def _equal_except_paths(old: Any, new: Any) -> bool:
    if isinstance(old, str) and isinstance(new, str) and old.startswith("/") and new.startswith("/"):
        return True
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return old.keys() == new.keys() and all(_equal_except_paths(old[key], new[key]) for key in old)
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new) and all(map(_equal_except_paths, old, new))
    return bool(old == new)


def find_learning_changes(before: RunConfig, after: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value before, value now), for the keys that change the training result."""
    old, new = _learning_values(before), _learning_values(after)
    return {
        key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)
    }


def _learning_values(config: RunConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.model_dump(mode="json").items():
        if name in _MUTABLE_KEYS:
            continue
        if isinstance(value, dict):
            skipped = _MUTABLE_NESTED_KEYS.get(name, ())
            flat.update({f"{name}.{key}": item for key, item in value.items() if key not in skipped})
        else:
            flat[name] = value
    return flat

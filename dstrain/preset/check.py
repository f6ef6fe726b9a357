"""Is every key of a DeepSpeed JSON known, ours to take, and of the right type?

DeepSpeed ignores an unknown key at the top level, so `zero_optimisation` would train ZeRO-0. Here nothing passes that the
table does not name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from dstrain.errors import did_you_mean
from dstrain.preset import migrate
from dstrain.preset.key_schema import Key, homes, misfit, show, table
from dstrain.preset.source_map import KeyPath

Kind = Literal["unknown", "auto", "learning", "refused", "renamed", "type", "idle", "clash"]


@dataclass(frozen=True)
class Finding:
    """One thing wrong at one key."""

    path: KeyPath
    kind: Kind
    problem: str
    mend: str


REFUSED = {
    "csv_monitor": ("DeepSpeed would write its own numbers; every run has metrics.jsonl", "remove it"),
    "comet": ("where numbers are written belongs to the recipe (log)", "remove it"),
    "datastates_ckpt": ("dstrain writes and verifies its checkpoints itself", "remove it; see the recipe's `save`"),
    "tensor_parallel": ("dstrain shards with ZeRO, not by tensor", "remove it; zero3 shards the weights"),
    "expert_parallel": ("dstrain shards with ZeRO, not by expert", "remove it; zero3 shards the weights"),
    "use_data_before_expert_parallelism": ("dstrain shards with ZeRO, not by expert", "remove it"),
    "sequence_parallel_size": ("dstrain does not split sequences over processes", "remove it"),
    "pipeline": ("dstrain shards with ZeRO, not by layer", "remove it; zero3 shards the weights"),
    "hybrid_engine": ("the hybrid engine serves generation inside RLHF, which dstrain does not do", "remove it"),
    "autotuning": ("presets are chosen by hand: docs/presets.md says which fits what", "remove it"),
    "weight_quantization": ("this block quantizes for inference", "remove it and use the recipe's model.quantize"),
}
"""Keys DeepSpeed acts on and dstrain does not take -> why, and what to do."""

OWN: dict[KeyPath, tuple[Any, str]] = {
    ("zero_allow_untested_optimizer",): (True, "dstrain hands its own optimizers to DeepSpeed"),
    ("zero_force_ds_cpu_optimizer",): (False, "dstrain chooses the optimizer for offloading itself"),
    ("managed_gradient_accumulation",): (True, "dstrain lets DeepSpeed count the micro-batches"),
    ("gradient_allreduce_op",): ("mean", "dstrain scales its sums for a mean over the processes"),
    ("dataloader_drop_last",): (False, "dstrain loads the data itself and drops nothing"),
    ("checkpoint", "load_universal"): (False, "dstrain restores checkpoints itself"),
    ("checkpoint", "use_node_local_storage"): (False, "a checkpoint lies in the run folder, which all hosts share"),
    ("checkpoint", "checkpoint_serialization"): (True, "dstrain verifies what it wrote"),
    ("checkpoint", "writer"): (None, "another writer can lose a save without a word"),
    ("torch_autocast", "enabled"): (False, "dstrain's precision is fp32, bf16 or fp16 throughout"),
    ("data_types", "param_dtype"): (None, "the precision of the weights is `fp16`, `bf16` or the recipe's `precision`"),
    ("zero_optimization", "compute_grad_norm"): (True, "dstrain logs and checks the norm of the gradients"),
    ("zero_optimization", "zenflow"): (None, "ZenFlow applies gradients late, so one step would not be one step"),
    ("zero_optimization", "elastic_checkpoint"): (False, "dstrain restores checkpoints itself"),
    ("zero_optimization", "legacy_stage1"): (False, "DeepSpeed stops on it"),
}
"""Keys with one value that fits dstrain -> that value, and why. Any other value is refused."""

_REMOVED = {
    "elasticity": "remove it; the recipe's batch.total holds at any number of processes, also on resume",
    "amp": "use `fp16` or `bf16`",
    "quantize_training": "remove it; the recipe has model.quantize",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size",
}
_WHERE_AUTO_IS_SAID = {
    "fp16.enabled": "the recipe's `precision` says it",
    "bf16.enabled": "the recipe's `precision` says it",
    "train_micro_batch_size_per_gpu": "the recipe's batch.micro says it",
    "gradient_accumulation_steps": "the recipe's batch.accumulate says it",
}


def check(block: dict[str, Any]) -> list[Finding]:
    """Every finding, key by key."""
    return list(_walk(block, table()["keys"], ()))


def instead_of_auto(path: KeyPath, key: Key) -> str:
    """What holds once an "auto" is left out."""
    said = _WHERE_AUTO_IS_SAID.get(".".join(path))
    default = "" if key.get("default") is None else " " + show(key["default"])
    return said or f"DeepSpeed's default{default} holds"


def _walk(block: dict[str, Any], known: dict[str, Key], above: KeyPath) -> Iterator[Finding]:
    for name, value in block.items():
        path = (*above, name)
        finding = _unwanted(path, value) or _unknown(path, known) or _misused(path, known[name], value)
        if finding is not None:
            yield finding
        elif isinstance(value, dict) and "keys" in known[name]:
            yield from _walk(value, known[name]["keys"], path)


def _unwanted(path: KeyPath, value: Any) -> Finding | None:
    """Learning, and what DeepSpeed or dstrain does not have."""
    dotted, idle = ".".join(path), isinstance(value, dict) and value.get("enabled") is False
    removed = dotted in table()["removed"]
    if dotted in migrate.LEARNING and (removed or not idle):
        return Finding(path, "learning", migrate.LEARNING[dotted], migrate.mend(dotted, value))
    if removed:
        problem = f"DeepSpeed {table()['deepspeed']} has removed it and stops on it"
        return Finding(path, "refused", problem, _REMOVED.get(dotted, "remove it"))
    if dotted in REFUSED and not idle:
        return Finding(path, "refused", *REFUSED[dotted])
    if path in OWN and value != OWN[path][0] and value != "auto":
        needed, why = OWN[path]
        mend = "remove it" if needed is None else f"remove it; dstrain sets {show(needed)}"
        return Finding(path, "refused", f"the value is {show(value)}, but {why}", mend)
    return None


def _unknown(path: KeyPath, known: dict[str, Key]) -> Finding | None:
    if path[-1] in known:
        return None
    version, places = table()["deepspeed"], homes(path[-1])
    problem = f"DeepSpeed {version} knows no such key here"
    if places:
        return Finding(path, "unknown", problem, f"move it into {' or '.join(f'`{place}`' for place in places)}")
    return Finding(path, "unknown", problem, did_you_mean(path[-1], _current(known)))


def _misused(path: KeyPath, key: Key, value: Any) -> Finding | None:
    if value == "auto" or (isinstance(value, list) and "auto" in value):
        problem = '"auto" is filled in by the Hugging Face Trainer, not by DeepSpeed'
        return Finding(path, "auto", problem, f"leave the key out: {instead_of_auto(path, key)}")
    if "deprecated" in key:
        problem = "this is another name, or an old one, of a key"
        return Finding(path, "renamed", problem, f"write `{key['deprecated']}`")
    wrong = misfit(key, value)
    return Finding(path, "type", *wrong) if wrong else None


def _current(known: dict[str, Key]) -> list[str]:
    """Names worth proposing: no deprecated ones."""
    return [name for name, key in known.items() if "deprecated" not in key]

"""What a forward pass of a task reads: rows, tokens, targets, images, and the frozen models beside the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dstrain.config.resolve import BatchPlan
from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.models.attention.model_types import (
    NO_MASK_MODEL_TYPES,
    PACKED_MODEL_TYPES,
    PACKED_VISION_MODEL_TYPES,
)
from dstrain.planner.shape import ModelShape
from dstrain.tasks import make_task

SCORE_CLASS = "AutoModelForSequenceClassification"


QUERY_BLOCK, SAVED_BYTES = 128, 64 * 2**20
"""Constants of dstrain/models/attention/by_group.py, which imports torch; a test compares them."""


@dataclass(frozen=True, kw_only=True)
class TaskProperties:
    """What the planner has to know of a task, read from the task itself."""

    rows_per_sample: int = 1
    """2 for tasks on pairs of answers."""
    is_scored: bool = False
    """True for a score head instead of a language-model head."""
    heads: tuple[str, ...] = ()
    """New parts that are trained in full next to adapters."""
    reference: str = "none"
    """Kind of the reference: none, model, adapter or cached."""
    reference_model: ModelConfig | None = None
    """Another model as reference; None: the policy's own."""
    reward_models: tuple[ModelConfig, ...] = ()
    """Frozen reward models that score in each step; those that score before the training are gone by then."""
    packs_batches: bool = False
    is_known: bool = True
    """False for a task whose model is not a transformers model with a language-model or score head."""


def read_properties(config: RunConfig) -> TaskProperties:
    """Return the properties of a recipe's task. Imports no torch; of a user's task file, its own imports."""
    task: Any = make_task(config)
    source = getattr(task, "source_class", None)
    is_text = source is not None and not getattr(task, "loads_own_model", False)
    name = str(getattr(source, "auto_class_name", ""))
    options = getattr(task, "ref_model", None)
    return TaskProperties(
        rows_per_sample=2 if getattr(task, "has_pairs", False) else 1,
        is_scored=name == SCORE_CLASS,
        heads=tuple(getattr(task, "modules_to_save", ())),
        reference=getattr(task, "reference_kind", "none"),
        reference_model=task.reference_config if options else None,
        reward_models=tuple(
            model.task.recipe.model for model in getattr(task, "reward_models", ()) if not model.is_cached
        ),
        packs_batches=bool(getattr(task, "packs_batches", False)),
        is_known=is_text and config.task not in ("temporal", "protein"),
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The largest forward pass of a step, on one process."""

    rows: int
    tokens: int
    """Tokens that the decoder computes."""
    targets: int
    """Tokens in the loss; all of them where their number is not known."""
    images: int = 0
    is_packed: bool = False
    has_mask: bool = False
    """True where attention gets an explicit mask, and each query head a copy of its keys."""
    is_eager: bool = False
    """True where attention keeps the logits of all pairs of tokens."""
    checkpointed: float = 1.0
    """Share of the layers that recompute their activations."""
    is_scored: bool = False
    device: str = "cuda"
    keys: float | None = None
    """Keys that attention on a CPU computes for a query, on average; None: those of sequences of `length`."""

    @property
    def length(self) -> int:
        """Return the tokens of one sequence on average."""
        return self.tokens // max(self.rows, 1)

    def attention_weights(self, heads: int, width: int) -> float:
        """Return the bytes per token of the attention weights that a packed batch on a CPU keeps for its gradient."""
        if not self.is_packed or self.device != "cpu":
            return 0.0
        keys = mean_block_keys(self.length) if self.keys is None else self.keys
        return min(width * heads * keys, SAVED_BYTES / max(self.tokens, 1))

    @property
    def positions(self) -> int:
        """Return the positions of one row: a packed batch has one row."""
        return self.tokens if self.is_packed else self.length


def mean_block_keys(length: int) -> float:
    """Return the keys of a query on average: each block of queries computes all keys up to its last query."""
    blocks, rest = divmod(length, QUERY_BLOCK)
    return (QUERY_BLOCK**2 * blocks * (blocks + 1) / 2 + rest * length) / max(length, 1)


def make_workload(
    config: RunConfig, shape: ModelShape, properties: TaskProperties, batch: BatchPlan, device: str
) -> Workload:
    """Return the pass with as many tokens as the recipe allows: each row has data.max_length."""
    micro, length = batch.micro, config.data.max_length
    rows = micro * properties.rows_per_sample
    tokens = rows * length
    if batch.tokens is not None:
        # A longer sample is a pass of its own.
        tokens = min(tokens, max(batch.tokens, properties.rows_per_sample * length))
        rows = max(1, tokens // length)
    packed = bool(config.batch.packing) and properties.packs_batches and takes_packed(shape, config)
    return Workload(
        rows=rows, tokens=tokens, targets=tokens, images=rows if shape.vision else 0, is_packed=packed,
        is_eager=config.model.attn_implementation == "eager" or shape.has_softcap or shape.model_type == "gpt_oss",
        has_mask=not packed and shape.model_type not in NO_MASK_MODEL_TYPES,
        checkpointed=float(config.model.gradient_checkpointing), is_scored=properties.is_scored, device=device,
    )  # fmt: skip


def takes_packed(shape: ModelShape, config: RunConfig) -> bool:
    """Return True where models of this type are known to take packed batches."""
    own_code = config.model.trust_remote_code
    return not own_code and shape.model_type in (PACKED_MODEL_TYPES | PACKED_VISION_MODEL_TYPES.keys())

"""The rows of a text task's batches: packed or padded, with the images of their examples."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrain.batch import PADDED, Batch, PackingMode
from dstrain.config.schema import BatchConfig, ModelConfig
from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image
    from transformers import PretrainedConfig

    from dstrain.data.loading.rows import PackedRows, PaddedRows
    from dstrain.data.vision.processor import VisionProcessor

FindUnsupportedReason = Callable[[bool], str | None]
"""shares_prefixes -> why the models cannot take packed batches, or None."""


def resolve_packing(
    batch: BatchConfig,
    find_unsupported_reason: FindUnsupportedReason,
    has_pairs: bool,
    untested: str | None = None,
) -> PackingMode:
    """Return the mode that batch.packing and batch.prefix_sharing ask for; auto is on where nothing is in the way.

    `untested`: why auto is off although no model is in the way; the value true is allowed then. Raises RecipeError where
    a value is true, and something is in the way.
    """
    shares = batch.prefix_sharing
    if shares is True and not has_pairs:
        raise RecipeError(
            Fault("batch.prefix_sharing", "is true, but the task has no pairs of answers", "leave it out")
        )
    if not batch.packing:
        if shares is True:
            problem = "is true, but batch.packing is false, and padded rows share nothing"
            raise RecipeError(Fault("batch.prefix_sharing", problem, "remove one of the two"))
        return PADDED
    forced = batch.packing is True or shares is True
    reason = find_unsupported_reason(False)
    if reason and forced:
        key = "batch.packing" if batch.packing is True else "batch.prefix_sharing"
        raise RecipeError(Fault(key, f"is true, but {reason}", "set it to auto or false"))
    reason = reason or (None if forced else untested)
    if reason:
        return PackingMode(False, message=f"batches are padded, not packed: {reason}")
    if not has_pairs or shares is False:
        return PackingMode(True)
    reason = find_unsupported_reason(True)
    if reason and shares is True:
        raise RecipeError(Fault("batch.prefix_sharing", f"is true, but {reason}", "set it to auto or false"))
    if reason:
        return PackingMode(True, message=f"the answers of a pair are packed, each with its own prompt: {reason}")
    return PackingMode(True, True)


def model_unsupported_reason(
    model: ModelConfig, config: PretrainedConfig, shares_prefixes: bool, sequence: int = 1
) -> str | None:
    """Return why this model cannot take packed batches, or None; `config`: its transformers config.

    `sequence`: processes that compute a micro-batch together.
    """
    from dstrain.models.attention.packed import packing_unsupported_reason

    # Transformers' own config may belong to a model class that came with the weights.
    if model.trust_remote_code and getattr(config, "auto_map", None):
        return "the model runs code that came with its weights"
    if model.attn_implementation != "auto":
        config = copy.deepcopy(config)  # the model is built from the other one
        config._attn_implementation = model.attn_implementation
    reason = packing_unsupported_reason(config, shares_prefixes)
    if reason is None and sequence > 1:
        from dstrain.models.attention.sequence import sequence_unsupported_reason

        reason = sequence_unsupported_reason(config.get_text_config(), sequence)
    return reason


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Makes sequences of token ids into the rows of a batch, and attaches images to it."""

    packing: PackingMode
    pad_token_id: int
    vision_processor: VisionProcessor | None = None
    """None: a text-only model."""

    def make_rows(self, sequences: Sequence[np.ndarray], num_pairs: int = 0) -> PaddedRows | PackedRows:
        """Return the sequences as rows of a batch. `num_pairs`: sequences i and num_pairs + i are a pair.

        Sequences after those of the pairs are packed on their own.
        """
        from dstrain.data.loading.rows import PaddedRows, pack_rows

        if not self.packing.is_packed:
            return PaddedRows(sequences, self.pad_token_id)
        if not self.packing.shares_prefixes:
            return pack_rows(sequences)
        pairs = [[row, num_pairs + row] for row in range(num_pairs)]
        groups = [*pairs, *([row] for row in range(2 * num_pairs, len(sequences)))]
        processor = self.vision_processor
        return pack_rows(sequences, groups, () if processor is None else processor.image_token_ids)

    def load_images(self, examples: Sequence[Mapping[str, Any]]) -> list[list[Image]] | None:
        """Return the images of each example; None where no example of the store has any, or the model takes none."""
        if self.vision_processor is None or "images" not in examples[0]:
            return None
        downscale = self.vision_processor.downscale
        return [[stored.load(downscale) for stored in example["images"]] for example in examples]

    def attach_images(
        self, batch: Batch, images: list[list[Image]] | None, repeats: int = 1, more: Sequence[Image] = ()
    ) -> Batch:
        """Return the batch with the images of its examples in the order of their tokens.

        `repeats`: rows of an example, each of which shows its images. `more`: the images of rows after them.
        """
        if self.vision_processor is None:
            return batch
        if images is None:
            return self.vision_processor.attach_no_images(batch)
        if self.packing.shares_prefixes and repeats > 1:
            # One group per example: its images are in the prefix, or it has none.
            counts = [1 if group.prefix else repeats for group in batch.groups[: len(images)]]
            shown = [image for loaded, count in zip(images, counts, strict=True) for image in loaded * count]
        else:
            # Rows of pairs repeat the prompt, and so its images.
            shown = [image for loaded in images for image in loaded] * repeats
        return self.vision_processor.attach_images(batch, [*shown, *more])

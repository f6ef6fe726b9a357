"""Part of a text task that its records and batches pass: parsing, packed or padded rows, images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.batch import Batch, PackingMode
from dstrain.config.schema import RunConfig
from dstrain.data.formats.image_placeholders import RecordWithImages, read_with_images
from dstrain.data.formats.messages import has_images
from dstrain.data.records import BadRecord
from dstrain.tasks.data.packing_mode import model_unsupported_reason, resolve_packing

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

    from dstrain.data.loading.collate import PackedRows, PaddedRows

BATCH_METHODS = (
    "collate", "sequences", "output_tensors", "extra_tensors", "with_images", "row_images", "loss", "loss_inputs", "reference_outputs",
    "scores", "source_class", "step_stats",
)  # fmt: skip
"""Members that read or write the rows of a batch, or choose the class of the model that reads them."""


class TextData:
    """Base class of text tasks, for their records and batches. Rows of a batch: R sequences of token ids."""

    packs_batches: ClassVar[bool] = False
    """True where `collate` can pack the rows, and `loss` reads them through functions that know packed batches."""
    has_pairs: ClassVar[bool] = False
    """True where the rows of a sample begin with the same tokens."""
    rows_per_sample: ClassVar[int] = 2
    """Sequences of a sample in a batch."""
    ref_columns: ClassVar[tuple[str, ...]] = ()
    """Names of the outputs of a reference, the tensors that `reference_outputs` returns."""

    if TYPE_CHECKING:  # of `TextTask`
        recipe: RunConfig
        tokenizer: Any
        model_source: Any

        @property
        def loads_own_model(self) -> bool: ...
        def parse(self, record: Mapping[str, Any]) -> Any: ...

    def parse_record(self, record: dict[str, Any]) -> Any:
        """Parse a record and refuse images that the model does not take. Raises BadRecord."""
        return self.parse_with_images(record, self.parse)

    def parse_with_images(
        self, record: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], Any]
    ) -> RecordWithImages[Any]:
        """Return `parse` of the record's text with the record's images. Raises BadRecord.

        Where the recipe names no model yet, records with images are accepted.
        """
        if not has_images(record):
            parsed = parse(record)  # a fault of the record is reported before the model is read
            return read_with_images(record, parse) if self._takes_images else RecordWithImages(parsed)
        if self._takes_images is False:
            raise BadRecord(
                "the record has an image, and the model is text-only; "
                "name a vision-language model, or remove the record"
            )
        return read_with_images(record, parse)

    def _parse_text_only(self, record: dict[str, Any]) -> Any:
        return self.parse_record(record).parsed

    @cached_property
    def _takes_images(self) -> bool | None:
        """Whether the model takes images; None where the recipe names no model yet."""
        return self.model_source.is_multimodal if self.model_source.is_named else None

    @cached_property
    def packing(self) -> PackingMode:
        """The form of the batches. Raises RecipeError where the recipe asks for one that a model cannot take."""
        return resolve_packing(
            self.recipe.batch, self.packing_unsupported_reason, self.has_pairs, self._find_overridden_method()
        )

    def packing_unsupported_reason(self, shares_prefixes: bool) -> str | None:
        """Return why the task, or a model that reads its batches, cannot take packed ones; None: all can."""
        if not self.packs_batches:
            return f"task {self.recipe.task} has padded rows only"
        if self.loads_own_model:
            return f"task {self.recipe.task} makes its model in its own way"
        return model_unsupported_reason(self.recipe.model, self.model_source.config, shares_prefixes)

    def _find_overridden_method(self) -> str | None:
        """Return a reason where a task file replaces a member that may expect padded rows."""
        for name in BATCH_METHODS:
            owner = next((cls for cls in type(self).__mro__ if name in vars(cls)), None)
            if owner is not None and not owner.__module__.startswith("dstrain."):
                return f"`{name}` of the task file may expect padded rows; if it does not, set batch.packing: true"
        return None

    def enable_packing(self, model: torch.nn.Module) -> torch.nn.Module:
        """Prepare a model for packed batches, where the task has them. Returns it."""
        if self.packing.is_packed:
            from dstrain.models.attention.packed import enable_packed_attention

            enable_packed_attention(model)
        return model

    def make_rows(self, sequences: Sequence[np.ndarray], num_pairs: int = 0) -> PaddedRows | PackedRows:
        """Return the sequences as rows of a batch. `num_pairs`: sequences i and num_pairs + i are a pair.

        Sequences after those of the pairs are packed on their own.
        """
        from dstrain.data.loading.collate import PaddedRows, pack_rows

        if not self.packing.is_packed:
            return PaddedRows(sequences, self.tokenizer.pad_token_id)
        if not self.packing.shares_prefixes:
            return pack_rows(sequences)
        pairs = [[row, num_pairs + row] for row in range(num_pairs)]
        groups = [*pairs, *([row] for row in range(2 * num_pairs, len(sequences)))]
        processor = self.model_source.vision_processor
        return pack_rows(sequences, groups, () if processor is None else processor.image_token_ids)

    def with_images(
        self,
        batch: Batch,
        examples: Sequence[Mapping[str, Any]],
        repeats: int = 1,
        positions: Sequence[int] | None = None,
    ) -> Batch:
        """Return the batch with its examples' images in the order of their tokens; `repeats`: rows of an example.

        `positions`: of the examples in the run, None in an evaluation: images are changed in training only.
        """
        processor = self.model_source.vision_processor
        if processor is None:
            return batch
        if "images" not in examples[0]:  # then no example of the store has any
            return processor.attach_no_images(batch)
        if not self.packing.shares_prefixes or repeats == 1:
            return processor.attach_images(batch, self.row_images(examples, repeats, positions))
        # One group per example: its images are in the prefix, or it has none.
        counts = [1 if group.prefix else repeats for group in batch.groups[: len(examples)]]
        images = [self.row_images([example], count) for example, count in zip(examples, counts, strict=True)]
        return processor.attach_images(batch, [image for own in images for image in own])

    def row_images(
        self, examples: Sequence[Mapping[str, Any]], repeats: int, positions: Sequence[int] | None = None
    ) -> list[Image]:
        """Return the images of a batch in the order of its rows."""
        processor = self.model_source.vision_processor
        downscale = None if processor is None else processor.downscale
        images = [
            image.load(downscale)
            if positions is None
            else self.augment_image(image.load(downscale), positions[row], index)
            for row, example in enumerate(examples)
            for index, image in enumerate(example["images"])
        ]
        # Rows of pairs repeat the prompt, and so its images.
        return images * repeats

    def augment_image(self, image: Image, position: int, index: int) -> Image:
        """Return image number `index` of a sample as it is trained on; `position`: of the sample in the run."""
        return image

    def cached_reference_outputs(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the precomputed outputs of the reference, (B,) each; empty where there are none."""
        import torch

        return {
            # float64, as they were computed: a log-ratio is a small difference of large sums.
            name: torch.tensor([example[name] for example in examples], dtype=torch.float64)
            for name in self.ref_columns
            if name in examples[0]
        }

"""Builder of token stores from sources, with a task's `parse` and `encode`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from dstrain.config import RunConfig
from dstrain.data.encoding.rendering import PlaceholderExpansion
from dstrain.data.prepare import (
    PLAIN_COLUMNS,
    ExampleSettings,
    ImageRecordEncoder,
    PreparePolicy,
    RecordEncode,
    SequentialEncoder,
    prepare,
)
from dstrain.data.process_pool import ProcessPoolConfig
from dstrain.data.records import Encode, EncodeResult, tokenizer_fingerprint
from dstrain.data.sources.base import ConcatSource
from dstrain.data.token_store import TokenStore
from dstrain.data.vision.processor import VisionProcessor
from dstrain.process_setup import count_available_cores, set_parent_death_signal
from dstrain.tasks.common.registry import digest_task_files, find_task


class EncodeSamples(Protocol):
    """A task's `encode`."""

    def __call__(self, samples: list[Any], images: PlaceholderExpansion | None) -> Sequence[EncodeResult]:
        """Return the example or the fault of each parsed record.

        `images` expands the image placeholders of the records; None for a text-only model.
        """


@dataclass(frozen=True, kw_only=True)
class StoreBuilder:
    """Builds the token store of a source, or finds it in the cache."""

    recipe: RunConfig
    parse: Callable[[Mapping[str, Any]], Any]
    """Parses the text of a record. Raises BadRecord."""
    parse_text_only: Callable[[dict[str, Any]], Any]
    """The same, and refuses a record with images. Raises BadRecord."""
    encode: EncodeSamples | SequentialEncoder
    key: Mapping[str, Any]
    """Everything that `encode` depends on, except the tokenizer or processor."""
    settings: ExampleSettings = PLAIN_COLUMNS

    def build(self, source: ConcatSource, tokenizer: Any) -> TokenStore:
        """Return the store of text examples. Raises DataError."""
        key = {**self.key, "tokenizer": tokenizer_fingerprint(tokenizer)}
        return prepare(source, self._text_encode(), key, policy_of(self.recipe), settings=self.settings)

    def build_with_images(self, source: ConcatSource, processor: VisionProcessor) -> TokenStore:
        """Return the store of examples with images. Raises DataError."""
        encoder = ImageRecordEncoder.create(processor, count_available_cores())
        # Empty sources have no folder. `if one` does not open a source, as its length might.
        folders = [str(one.get_base_dir(0).resolve()) for one in source.sources if one]
        # Relative image paths mean other files in another folder.
        key = {**self.key, "processor": processor.fingerprint, "folders": folders}
        assert not isinstance(self.encode, SequentialEncoder), "no such task takes images"
        encode, write_index = encoder.make_encode(source, self.parse, self.encode)
        return prepare(source, encode, key, policy_of(self.recipe), settings=self.settings, write_extra=write_index)

    def _text_encode(self) -> Encode:
        if isinstance(self.encode, SequentialEncoder):
            return RecordEncode(self.parse_text_only, self.encode)
        return RecordEncode(self.parse_text_only, partial(self.encode, images=None))


def policy_of(recipe: RunConfig) -> PreparePolicy:
    """Return the limit on bad records, the digest of the task's code, and one encoding process per available core."""
    return PreparePolicy(
        task=recipe.task,
        code=digest_task_files(find_task(recipe.task)),
        on_error=recipe.data.on_error,
        processes=ProcessPoolConfig(count_available_cores(), set_parent_death_signal),
    )

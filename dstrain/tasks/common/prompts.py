"""Prompts of records, encoded for the model of a text task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.data.encoding.prompts import EncodedPrompt, encode_image_prompts, encode_prompts
from dstrain.data.formats.columns import parse_record
from dstrain.data.formats.image_placeholders import RecordWithImages
from dstrain.data.formats.prompts import ParsedPrompt
from dstrain.data.records import BadRecord, EncodeResult, encode_valid, try_parse
from dstrain.data.sources.base import Source
from dstrain.tasks.common.text import TextTask


@dataclass(frozen=True)
class PromptReader:
    """Parses and encodes prompts as a task's model takes them."""

    task: TextTask
    max_length: int | None = None
    """Tokens of a prompt at most; the last ones are kept."""

    def parse(self, record: dict[str, Any]) -> RecordWithImages[ParsedPrompt]:
        """Parse the prompt of a record, with its images. Raises BadRecord."""
        return self.task.parse_with_images(record, self.task.read_prompt)

    def encode(
        self, prompts: Sequence[RecordWithImages[ParsedPrompt]], folders: Sequence[Path]
    ) -> list[EncodedPrompt | BadRecord]:
        """Return the ids of each prompt; relative image paths start from the record's folder."""
        processor = self.task.model_source.vision_processor
        if processor is None:
            parsed = [prompt.parsed for prompt in prompts]
            return encode_prompts(self.task.tokenizer, parsed, self.max_length)
        return encode_image_prompts(processor, prompts, folders, self.max_length)


@dataclass(frozen=True)
class PromptEncode:
    """An `Encode` whose examples hold the prompt of a source's record under `prompt`."""

    source: Source
    reader: PromptReader

    def __call__(self, rows: list[tuple[int, dict[str, Any]]]) -> Sequence[EncodeResult]:
        parsed = [
            prompt
            if isinstance(prompt := try_parse(parse_record, self.reader.parse, record, True), BadRecord)
            else (prompt, self.source.get_base_dir(index))
            for index, record in rows
        ]
        return encode_valid(parsed, self._encode)

    def _encode(self, items: list[tuple[RecordWithImages[ParsedPrompt], Path]]) -> list[EncodeResult]:
        prompts = self.reader.encode([prompt for prompt, _ in items], [folder for _, folder in items])
        return [prompt if isinstance(prompt, BadRecord) else {"prompt": prompt} for prompt in prompts]

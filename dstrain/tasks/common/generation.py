"""Prompts that a model answers: of the command line, of a file, and of held-out samples in an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.data.formats.answers import PromptAnswers
from dstrain.data.formats.conversations import ParsedPrompt
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.formats.preferences import Response
from dstrain.data.records import BadRecord, try_parse
from dstrain.data.sources.base import Source

if TYPE_CHECKING:
    from dstrain.data.encoding.conversations import EncodedPrompt


@dataclass(frozen=True)
class PromptReader:
    """Parses and encodes prompts as a task's model takes them."""

    task: Any
    """The `TextTask` of the model, whose module imports this one."""
    max_length: int | None = None
    """Tokens of a prompt at most; the last ones are kept."""

    def parse(self, record: Mapping[str, Any]) -> RecordWithImages[ParsedPrompt]:
        """Parse the prompt of a record, with its images. Raises BadRecord."""
        found: RecordWithImages[ParsedPrompt] = self.task.parse_with_images(record, self.task.read_prompt)
        return found

    def encode(
        self, prompts: Sequence[RecordWithImages[ParsedPrompt]], folders: Sequence[Path]
    ) -> list[EncodedPrompt | BadRecord]:
        """Return the ids of each prompt; relative image paths start from the record's folder."""
        from dstrain.data.encoding.conversations import encode_image_prompts, encode_prompts

        processor, rendered = self.task.model_source.vision_processor, self.task.recipe.data.rendered
        if processor is None:
            parsed = [prompt.parsed for prompt in prompts]
            return encode_prompts(self.task.tokenizer, parsed, self.max_length, rendered_texts=rendered)
        return encode_image_prompts(processor, prompts, folders, self.max_length, rendered)


@dataclass(frozen=True)
class HeldOutPrompts:
    """The prompts of a task's held-out examples, and the answers that their records give.

    A text without an answer of its own, and an answer that is not wanted (task kto), has none.
    """

    task: Any
    """The `TextTask` of the examples."""

    @cached_property
    def source(self) -> Source:
        """The records of data.eval, or those of which data.eval_fraction holds out a part."""
        data = self.task.recipe.data
        found: Source = self.task.open_sources([data.eval] if data.eval else self.task.training_items)
        return found

    def read(self, example: Mapping[str, Any]) -> RecordWithImages[PromptAnswers] | None:
        """Return what is asked in the record of an example, and its answers; None where it has no reference answer."""
        if not self.task.has_reference_answer(example):
            return None
        # Columns that are not read were reported when the record was encoded.
        found: RecordWithImages[PromptAnswers] | BadRecord
        found = try_parse(self.task.read_answers, self.source[int(example["sample"])])
        return None if isinstance(found, BadRecord) else found

    def folder(self, example: Mapping[str, Any]) -> Path:
        """Return where relative image paths of an example's record start."""
        return self.source.get_base_dir(int(example["sample"]))

    def read_texts(self, example: Mapping[str, Any]) -> list[str]:
        """Return the texts of the right answers to an example's prompt, without the end tokens of rendered ones."""
        from dstrain.data.encoding.rendered_text import find_template_marks

        held_out = self.read(example)
        if held_out is None:
            return []
        marks = find_template_marks(self.task.tokenizer)
        return [marks.strip_ends(answer_text(answer)).strip() for answer in held_out.parsed.answers]

    def encode(self, example: Mapping[str, Any]) -> EncodedPrompt | None:
        """Return an example's prompt as `dstrain generate` would; None where there is none.

        It keeps the last `data.max_prompt_length` tokens, or else `data.max_length`.
        """
        found, data = self.read(example), self.task.recipe.data
        if found is None:
            return None
        asked = RecordWithImages(ParsedPrompt(found.parsed.prompt, found.parsed.tools), found.images)
        reader = PromptReader(self.task, data.max_prompt_length or data.max_length)
        (prompt,) = reader.encode([asked], [self.folder(example)])
        return None if isinstance(prompt, BadRecord) else prompt


class StoredPrompts(HeldOutPrompts):
    """Prompts and right answers that are in the examples (`encode_answers`): no document is read in an evaluation."""

    def read_texts(self, example: Mapping[str, Any]) -> list[str]:
        from dstrain.data.encoding.conversations import read_answers

        return read_answers(example)

    def encode(self, example: Mapping[str, Any]) -> EncodedPrompt | None:
        from dstrain.data.encoding.conversations import EncodedPrompt

        ids = example["input_ids"][: int(example["prompt_length"])]
        return EncodedPrompt("", [int(token) for token in ids], tuple(example.get("images", ())))


def answer_text(answer: Response) -> str:
    """Return the text of an answer, of messages those of the assistant."""
    if isinstance(answer, str):
        return answer.strip()
    return "\n".join(message["content"] for message in answer if message["role"] == "assistant").strip()

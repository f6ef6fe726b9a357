"""Prompts that a model answers: of the command line, of a file, and of held-out samples in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import DatasetConfig, GenerateConfig
from dstrain.data.formats.answers import PromptAnswers, read_prompt_answers
from dstrain.data.formats.conversations import ParsedPrompt, read_prompt
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.formats.preferences import Response
from dstrain.data.records import try_parse
from dstrain.data.sources.base import Source
from dstrain.errors import BadRecord

if TYPE_CHECKING:
    from dstrain.data.encoding.conversations import EncodedPrompt
    from dstrain.data.vision.processor import VisionProcessor


JUDGE_METRICS = ("reward", "win_rate")
"""Metrics of generated answers that a reward model gives: its mean score, and how often it prefers them."""


@dataclass(frozen=True, kw_only=True)
class GenerationMetrics:
    """Metrics of answers that the model generates greedily in an evaluation, one for each sample."""

    names: tuple[str, ...]
    """Names of the metrics."""
    get_prompt: Callable[[Any], EncodedPrompt | None]
    """Sample -> its prompt; None: no answer is generated to it. The images may be `ImageEntry`s."""
    score: Callable[[Any, str], Mapping[str, float]]
    """(sample, text of the answer) -> name -> score. A metric is the mean over the samples."""
    tokenizer: Any
    vision_processor: VisionProcessor | None = None
    """Processor of the prompts' images; None for a text-only model."""
    max_new_tokens: int = 256
    """Limit of tokens per answer."""
    max_samples: int | None = None
    """Generate for the first N samples only; None: for all."""


@dataclass(frozen=True)
class PromptReader:
    """Parses and encodes prompts as a task's model takes them."""

    task: Any
    """The `TextTask` of the model, whose module imports this one."""
    max_length: int | None = None
    """Tokens of a prompt at most; the last ones are kept."""

    def parse(self, record: Mapping[str, Any]) -> RecordWithImages[ParsedPrompt]:
        """Parse the prompt of a record, with its images. Raises BadRecord."""
        parsed: RecordWithImages[ParsedPrompt] = self.task.parse_with_images(record, self.task.prompts.read_prompt)
        return parsed

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
class Prompts:
    """What the model of a text task is asked: by records of a file, and by held-out examples in an evaluation.

    A held-out text without an answer of its own, and an answer that is not wanted (task kto), has no reference answer.
    """

    task: Any
    """The `TextTask` of the model, whose module imports this one."""

    def open_source(self, item: DatasetConfig) -> Source:
        """Return the records of `dstrain generate`, which may have no answer, cut to `data.max_samples`."""
        source: Source = self.task.open_sources([item])
        return source

    def read_prompt(self, record: Mapping[str, Any]) -> ParsedPrompt:
        """Return the prompt of a record for `dstrain generate`, which may have no answer. Raises BadRecord."""
        return read_prompt(record)

    def read_answers(self, record: Mapping[str, Any]) -> RecordWithImages[PromptAnswers]:
        """Return a held-out record's prompt and its answers, all of them right. Raises BadRecord."""
        answers: RecordWithImages[PromptAnswers] = self.task.parse_with_images(record, read_prompt_answers)
        if answers.parsed.form != "pair":
            return answers
        return replace(answers, parsed=replace(answers.parsed, answers=answers.parsed.answers[:1], form="answer"))

    def has_reference_answer(self, example: Mapping[str, Any]) -> bool:
        """Return whether the answer of a held-out example is one that a generated answer is compared with."""
        return True

    @property
    def config(self) -> GenerateConfig | None:
        """What the recipe says of generated answers; None: an evaluation generates none."""
        config = self.task.recipe.eval.generate
        if config is None and self.task.default_answer_metrics:
            config = GenerateConfig()
        if config is None or not self.task.model_source.can_generate:
            return None
        return config

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The names of the metrics of generated answers."""
        config = self.config
        if config is None:
            return ()
        names = self.task.default_answer_metrics if config.metrics is None else tuple(config.metrics)
        return (*names, *(JUDGE_METRICS if config.reward_model else ()))

    @property
    def max_new_tokens(self) -> int:
        """Limit of tokens of a generated answer."""
        config = self.config
        limit: int = self.task.default_max_new_tokens
        return limit if config is None or config.max_new_tokens is None else config.max_new_tokens

    @property
    def metrics(self) -> GenerationMetrics | None:
        """The metrics of generated answers; None: an evaluation generates none."""
        config, names = self.config, self.metric_names
        if config is None or not names:
            return None
        metrics = {name: self.task.answer_metrics[name] for name in names if name not in JUDGE_METRICS}
        return GenerationMetrics(
            names=tuple(metrics),
            get_prompt=self.encode,
            score=lambda example, answer: {
                name: metric(answer, self.read_texts(example)) for name, metric in metrics.items()
            },
            tokenizer=self.task.tokenizer,
            vision_processor=self.task.model_source.vision_processor,
            max_new_tokens=self.max_new_tokens,
            max_samples=config.samples,
        )

    @cached_property
    def source(self) -> Source:
        """The records of data.eval, or those of which data.eval_fraction holds out a part."""
        data = self.task.recipe.data
        found: Source = self.task.open_sources([data.eval] if data.eval else self.task.training_items)
        return found

    def read(self, example: Mapping[str, Any]) -> RecordWithImages[PromptAnswers] | None:
        """Return what is asked in the record of an example, and its answers; None where it has no reference answer."""
        if not self.has_reference_answer(example):
            return None
        # Columns that are not read were reported when the record was encoded.
        answers = try_parse(self.read_answers, self.source[int(example["sample"])])
        return None if isinstance(answers, BadRecord) else answers

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


class StoredPrompts(Prompts):
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

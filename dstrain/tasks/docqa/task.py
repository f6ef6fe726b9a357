"""Document question answering: short answers to questions about document pages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import LoraConfig
from dstrain.data.encoding.chat_template import messages_to_transcript
from dstrain.data.encoding.conversations import encode_answers
from dstrain.data.encoding.rendering import PlaceholderExpansion
from dstrain.data.formats.answers import PromptAnswers
from dstrain.data.formats.conversations import Conversation, ParsedPrompt
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, Message, read_system
from dstrain.data.records import EncodeResult, as_record
from dstrain.data.sources.base import cut_source
from dstrain.task import BadRecord, DatasetConfig, Loss, Source, check_limits
from dstrain.tasks.common.answers import ANSWER_METRICS
from dstrain.tasks.common.generation import StoredPrompts
from dstrain.tasks.docqa.augment import DocumentAugmentation
from dstrain.tasks.docqa.source import DocumentOptions, DocumentSource
from dstrain.tasks.sft import SFT
from dstrain.tasks.vlm import VLMChecks

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from dstrain.task import Batch

QUESTION_FIELD = "{question}"
"""Mark of the question in `prompt_template`."""


@dataclass(frozen=True)
class DocumentConversation(Conversation):
    """A question and the answer that is trained on, with all accepted answers."""

    accepted: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DocQA(SFT):
    """Document question answering: short answers to questions about PDFs or page images.

    A question has up to `max_pages` pages as images. The first accepted answer is trained on, with the loss of task sft,
    label smoothing and focal weighting. An evaluation generates an answer to each question and compares it with all
    accepted ones.
    """

    metric_names = ("token_accuracy", *ANSWER_METRICS)
    default_answer_metrics = tuple(ANSWER_METRICS)
    default_max_new_tokens = 32
    packs_batches = True
    needs_vision = True
    default_lora = LoraConfig()

    max_pages: int = 4
    """Pages of a question at most: its evidence pages, or those that a text search (BM25) ranks first."""
    dpi: int = 144
    """Resolution of rendered PDF pages in pixels per inch."""
    use_evidence_pages: bool = True
    """Use a record's evidence_pages; false: search the pages of every question."""
    unanswerable_answer: str | None = "unanswerable"
    """Answer that is trained on where a record has none; null: such records are bad."""
    prompt_template: str = f"{QUESTION_FIELD}\nAnswer the question using a single word or phrase."
    """User's turn after the pages; {question} is the question. The default is LLaVA-1.5's (arXiv 2310.03744)."""
    label_smoothing: float = 0.0
    """Share of the uniform distribution in the targets, from 0 to below 1 (Szegedy et al., arXiv 1512.00567)."""
    focal_gamma: float = 0.0
    """Exponent of the factor (1 - p) on a token's loss; 0: none (Lin et al., arXiv 1708.02002)."""
    crop: float = 0.0
    """Training pages: largest share cut from each side, up to 0.4."""
    rotate: float = 0.0
    """Training pages: largest rotation in degrees."""
    noise: float = 0.0
    """Training pages: standard deviation of the noise in grey levels of 255."""
    color: float = 0.0
    """Training pages: largest relative change of brightness, contrast and saturation, up to 0.9."""

    def __post_init__(self) -> None:
        # Made here, because both check their values.
        _ = self.document_options, self.augmentation
        check_limits(self, "label_smoothing", below=1)
        check_limits(self, "focal_gamma")
        if self.prompt_template.count(QUESTION_FIELD) != 1:
            raise ValueError(f"prompt_template must contain {QUESTION_FIELD} once")

    @cached_property
    def checks(self) -> VLMChecks:
        return VLMChecks(parse_record=self.parse_record, task=self)

    @cached_property
    def document_options(self) -> DocumentOptions:
        """How pages are selected and rendered."""
        return DocumentOptions(
            max_pages=self.max_pages,
            dpi=self.dpi,
            use_evidence_pages=self.use_evidence_pages,
            unanswerable_answer=self.unanswerable_answer,
        )

    @cached_property
    def augmentation(self) -> DocumentAugmentation:
        """Random changes of training pages."""
        return DocumentAugmentation(
            crop=self.crop, rotate=self.rotate, noise=self.noise, color=self.color, seed=self.recipe.seed
        )

    def wrap_source(self, source: Source, item: DatasetConfig) -> Source:
        return DocumentSource(source, self.document_options)

    def parse(self, record: Mapping[str, Any]) -> DocumentConversation:
        answers = record.get("answers")
        if not isinstance(answers, list) or not answers:
            raise BadRecord("the record has no 'answers'; write one")
        messages = [*self.question_messages(record), _message("assistant", answers[0])]
        return DocumentConversation(messages, (len(messages) - 1,), accepted=tuple(answers))

    def describe_record(self, record: Mapping[str, Any], parsed: Any) -> list[str]:
        document = as_record(record).columns.get("document")
        pages = ", ".join(map(str, record["pages"]))
        lines = [f"document: {document}"] if document else []
        return [
            *lines,
            f"page{'s' * (len(record['pages']) != 1)}: {pages}",
            f"question: {record['question']}",
            f"answer: {' | '.join(record['answers'])}",
        ]

    def question_messages(self, record: Mapping[str, Any]) -> list[Message]:
        """Return the system text of a record and its question, in the template."""
        asked = self.prompt_template.replace(QUESTION_FIELD, record["question"])
        return [*read_system(record), _message("user", asked)]

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        messages = self.parse_record(record).parsed.messages
        yield messages_to_transcript(messages).replace(IMAGE_PLACEHOLDER, "")

    @property
    def texts_name(self) -> str:
        return f"{super().texts_name} {self.prompt_template}"

    def encode(self, samples: list[Any], images: PlaceholderExpansion | None) -> Sequence[EncodeResult]:
        accepted = [sample.accepted for sample in samples]
        return encode_answers(self.tokenizer, samples, accepted, self._encoding_config, images)

    def encode_key(self) -> dict[str, Any]:
        return {**super().encode_key(), "what": "document questions", "prompt_template": self.prompt_template}

    def augment_image(self, image: Image, position: int, index: int) -> Image:
        return self.augmentation(image, position, index)

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        from dstrain.tasks.common.forward import score_targets, score_targets_with_mean

        log_probs, right, *mean = (score_targets_with_mean if self.label_smoothing else score_targets)(model, batch)
        assert right is not None, "both return it"
        losses = focal_cross_entropy(log_probs, mean[0] if mean else None, self.label_smoothing, self.focal_gamma)
        return Loss(losses.sum(), {"token_accuracy": right.sum()})

    @cached_property
    def prompts(self) -> DocumentPrompts:
        return DocumentPrompts(self)


class DocumentPrompts(StoredPrompts):
    """Questions about documents."""

    task: DocQA

    def open_source(self, item: DatasetConfig) -> Source:
        task = self.task
        options = replace(task.document_options, with_answers=False)
        return cut_source(DocumentSource(task.open_source(item), options), task.recipe.data.max_samples)

    def read_prompt(self, record: Mapping[str, Any]) -> ParsedPrompt:
        if "question" not in record:  # a text from the command line
            return super().read_prompt(record)
        return ParsedPrompt(self.task.question_messages(record))

    def read_answers(self, record: Mapping[str, Any]) -> RecordWithImages[PromptAnswers]:
        def read(record: Mapping[str, Any]) -> PromptAnswers:
            return PromptAnswers(self.task.question_messages(record), tuple(map(_answer, record["answers"])), "list")

        return self.task.parse_with_images(record, read)


def focal_cross_entropy(
    log_probs: torch.Tensor, mean_log_probs: torch.Tensor | None, label_smoothing: float = 0.0, focal_gamma: float = 0.0
) -> torch.Tensor:
    """Return (1 - p)^gamma [(1 - e) (-log p) + e (-mean over the vocabulary of log p)] per token; (B, K) -> (B, K).

    p is a target's probability. e is `label_smoothing`: Szegedy et al. (arXiv 1512.00567), section 7, with a uniform
    prior; it needs `mean_log_probs`. gamma is `focal_gamma`: Lin et al. (arXiv 1708.02002), eq. 4, for p of a softmax.
    With both 0 it is the cross entropy.
    """
    import torch

    loss = -log_probs
    if label_smoothing:
        assert mean_log_probs is not None, "label smoothing needs the mean log-probability of the vocabulary"
        loss = (1 - label_smoothing) * loss - label_smoothing * mean_log_probs
    if focal_gamma:
        # At p = 1 the gradient of (1 - p)^gamma is infinite for gamma below 1.
        loss = (-torch.expm1(log_probs)).clamp(min=1e-7) ** focal_gamma * loss
    return loss


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _answer(text: str) -> list[Message]:
    return [_message("assistant", text)]

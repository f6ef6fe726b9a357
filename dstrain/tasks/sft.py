"""Supervised fine-tuning on the answers of conversations."""

# Shapes: B rows, L tokens, K targets.

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.batch import Batch
from dstrain.data.formats.conversations import PromptCompletion, Sample, read_conversation
from dstrain.tasks.common.task import Loss
from dstrain.tasks.common.text import TextTask

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from dstrain.data.encoding.rendering import EncodingConfig, PlaceholderExpansion
    from dstrain.data.records import EncodeResult


@dataclass(frozen=True, kw_only=True)
class SFT(TextTask):
    """Supervised fine-tuning on the assistant's answers in conversations.

    The loss is -log p of each token that is trained on, summed; Ouyang et al. (arXiv 2203.02155), section 3.5, step 1.
    """

    metric_names: ClassVar[tuple[str, ...]] = ("token_accuracy",)
    learning_rate = 2.0e-5
    packs_batches = True
    rows_per_sample = 1

    assistant_only_loss: bool = True
    """Train on the assistant's turns only, end of turn included; false: on every token of every role."""

    train_on_thinking: bool = True
    """Train on the thoughts of an answer (<think> ... </think>) too; false: the model reads them, and learns the rest."""

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        sample = self.parse_record(record).parsed
        if isinstance(sample, PromptCompletion):
            yield from (sample.prompt, sample.answer)
        else:
            yield from (message["content"] for message in sample.messages)

    def parse(self, record: Mapping[str, Any]) -> Sample:
        return read_conversation(record)

    def encode(self, samples: list[Sample], images: PlaceholderExpansion | None) -> Sequence[EncodeResult]:
        from dstrain.data.encoding.conversations import encode_conversations

        return encode_conversations(self.tokenizer, samples, self._encoding_config, images)

    def encode_key(self) -> dict[str, Any]:
        return {"what": "conversations", **asdict(self._encoding_config)}

    @property
    def _encoding_config(self) -> EncodingConfig:
        from dstrain.data.encoding.rendering import EncodingConfig

        data = self.recipe.data
        return EncodingConfig(
            max_length=data.max_length,
            max_prompt_length=data.max_prompt_length,
            assistant_only=self.assistant_only_loss,
            with_thinking=self.train_on_thinking,
            rendered=data.rendered,
        )

    def collate(self, examples: Sequence[Mapping[str, Any]], positions: Sequence[int] | None = None) -> Batch:
        sequences = [example["input_ids"] for example in examples]
        rows = self.collator.make_rows(sequences)
        batch = Batch(
            tensors={**rows.input_tensors(), **rows.target_tensors([example["loss_mask"] for example in examples])},
            groups=rows.groups,
            # The number of targets: the loss of a step is a mean over tokens, not over rows.
            weight=float(sum(int(example["loss_mask"].sum()) for example in examples)),
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(sequence) for sequence in sequences),
        )
        images = self.collator.load_images(examples)
        if images is not None and positions is not None:  # images are changed in training only
            images = [
                [self.augment_image(image, position, index) for index, image in enumerate(loaded)]
                for loaded, position in zip(images, positions, strict=True)
            ]
        return self.collator.attach_images(batch, images)

    def augment_image(self, image: Image, position: int, index: int) -> Image:
        """Return image number `index` of a sample as it is trained on; `position`: of the sample in the run."""
        return image

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        from dstrain.tasks.common.forward import score_targets

        log_probs, right = score_targets(model, batch)  # (B, K), (B, K)
        more = self.extra_metrics(right, batch.tensors["loss_mask"])
        return Loss(-log_probs.sum(), {"token_accuracy": right.sum(), **more})

    def export_outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        from dstrain.tasks.common.forward import answer_log_probs

        return answer_log_probs(model, batch)

    def extra_metrics(self, is_correct: torch.Tensor, loss_mask: torch.Tensor) -> Mapping[str, Any]:
        """Return further metrics from which tokens are the argmax, (B, K), and the loss mask, (B, K)."""
        return {}

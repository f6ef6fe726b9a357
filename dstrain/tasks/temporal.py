"""Time series: an encoder of patches, alone or as soft tokens of a causal language model."""

# Shapes: B series, N patches, P values of a patch.

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dstrain.batch import Batch
from dstrain.config.field_types import check_limits
from dstrain.config.schema import DatasetConfig, TrainDatasetConfig
from dstrain.data.cache.build import RecordEncode, prepare
from dstrain.data.cache.token_store import TokenStore
from dstrain.data.encoding.prompts import EncodedPrompt
from dstrain.data.encoding.rendering import PlaceholderExpansion
from dstrain.data.encoding.series_conversations import CaptionEncoder
from dstrain.data.formats.messages import has_images
from dstrain.data.formats.prompts import ParsedPrompt
from dstrain.data.records import BadRecord, EncodeResult, as_record, has, try_parse
from dstrain.data.series.captions import names_right_pattern
from dstrain.data.series.options import EncoderOptions
from dstrain.data.series.patches import Patches, choose_masked, cut_patches, from_columns, stack_patches, to_columns
from dstrain.data.series.record import SeriesRecord, read_label, read_series_record
from dstrain.data.series.synthetic import SyntheticCurves, SyntheticOptions
from dstrain.data.sources.base import ConcatSource, Source
from dstrain.data.sources.open import SERIES_SOURCE_TYPES, open_source
from dstrain.errors import DataError
from dstrain.tasks.common.store_builder import policy_of
from dstrain.tasks.common.task import GenerationMetrics, Loss
from dstrain.tasks.common.tiny import tiny_recipe
from dstrain.tasks.series.checks import TemporalChecks, TemporalExport
from dstrain.tasks.series.model_source import LANGUAGE_STAGES, TemporalModelSource
from dstrain.tasks.sft import SFT

if TYPE_CHECKING:
    import torch

METRICS = {
    "align": ("token_accuracy", "pattern_accuracy"),
    "sft": ("token_accuracy", "pattern_accuracy"),
    "classify": ("accuracy",),
    "masked": ("mae",),
}
SYNTHETIC_CURVES = TrainDatasetConfig(path="synthetic curves")
"""Takes the place of a file in data.train."""


@dataclass(frozen=True, kw_only=True)
class Temporal(SFT):
    """Time series with captions or labels: a temporal encoder, alone or in front of a causal language model.

    Patches of a series (Nie et al., arXiv 2211.14730, section 3.1) are encoded by a transformer. In the stages align and
    sft its outputs are soft tokens before a prompt, and the loss is that of task sft on the caption (as for images: Liu
    et al., arXiv 2310.03744). classify trains a classifier on the encoder, masked reconstructs hidden patches.
    """

    checks_class = TemporalChecks
    export_class = TemporalExport
    source_class = TemporalModelSource
    learning_rate = 1.0e-4
    packs_batches = False

    stage: Literal["align", "sft", "classify", "masked"] = "align"
    """align: train encoder and projector on captions; sft: the language model too (LoRA with model.lora); classify: encoder and classifier on labels; masked: the encoder alone on hidden patches."""
    encoder: EncoderOptions = field(default_factory=EncoderOptions)
    """Sizes of a new encoder."""
    prompt: str = "Describe the series."
    """User's turn after the soft tokens, where a record has no prompt."""
    labels: list[str] | None = None
    """Labels of stage classify; null: those of the training data."""
    mask_ratio: float = 0.3
    """Share of patches that stage masked hides, above 0 and below 1."""
    synthetic: SyntheticOptions | None = None
    """Generate captioned curves and train on them, in addition to data.train."""
    max_new_tokens: int = 24
    """Limit of tokens of a generated caption in evaluations."""
    generate_max_samples: int | None = None
    """Generate captions for the first N evaluation samples only; null: for all."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric_names", METRICS[self.stage])
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"mask_ratio is {self.mask_ratio:g}, but it must be above 0 and below 1")
        check_limits(self, "max_new_tokens", "generate_max_samples", least=1)
        if self.stage in ("align", "masked") and self.recipe.model.lora is not None:
            raise ValueError(f"stage {self.stage} trains no adapters; remove model.lora, or use stage sft")
        if self.synthetic and self.stage == "classify":
            raise ValueError("synthetic curves have captions and no labels; use another stage")

    @property
    def has_language_model(self) -> bool:
        """True where the model reads and writes text."""
        return self.stage in LANGUAGE_STAGES

    @property
    def modules_to_save(self) -> tuple[str, ...]:  # type: ignore[override]  # depends on the stage
        return {"sft": ("projector",), "classify": ("classifier",)}.get(self.stage, ())

    @cached_property
    def model_source(self) -> TemporalModelSource:
        source: Any = super().model_source
        get_labels = (lambda: self.known_labels) if self.stage == "classify" else None
        return replace(source, stage=self.stage, encoder=self.encoder, get_labels=get_labels)

    @property
    def training_items(self) -> Sequence[TrainDatasetConfig]:
        return [*super().training_items, *([SYNTHETIC_CURVES] if self.synthetic else [])]

    def open_source(self, item: DatasetConfig) -> Source:
        if item is SYNTHETIC_CURVES:
            assert self.synthetic is not None
            return SyntheticCurves(self.synthetic)
        return open_source(item, self.recipe.data.columns, SERIES_SOURCE_TYPES)

    @cached_property
    def known_labels(self) -> tuple[str, ...]:
        """The labels, in the order of the classifier's outputs. Raises DataError where there are none."""
        if self.labels:
            return tuple(dict.fromkeys(self.labels))
        saved = self.model_source.saved_labels
        if saved and not self.recipe.data.train:
            return saved
        source = self.open_sources(self.training_items)
        labels = (try_parse(lambda index: read_label(source[index]), index) for index in range(len(source)))
        found = {label for label in labels if isinstance(label, str)}
        if not found:
            raise DataError("data.train: no record has a 'label'; add labels, or list them in options.labels")
        return tuple(sorted(found))

    def parse_record(self, record: dict[str, Any]) -> Any:
        if has_images(record):
            raise BadRecord(
                "the record has an image, and a series is trained on without images; set data.columns to "
                "{image: null}, or the column's name, to leave it out"
            )
        return super().parse_record(record)

    def parse(self, record: Mapping[str, Any]) -> SeriesRecord:  # type: ignore[override]  # not a conversation
        if not self.has_language_model:  # captions are not used there, and the run says so
            record = as_record(record).without("caption", "captions", "prompt")
        sample = read_series_record(record)
        if self.has_language_model and not sample.captions:
            raise BadRecord("the record has no 'caption'; write one, or use options.stage classify or masked")
        if self.stage == "classify" and sample.label is None:
            raise BadRecord("the record has no 'label'; write one, or use another options.stage")
        return sample

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        # The curve is not parsed: a tokenizer needs the texts alone.
        captions = record.get("captions") if has(record, "captions") else record.get("caption")
        yield from [captions] if isinstance(captions, str) else (captions or ())
        yield record.get("prompt") or self.prompt

    def read_prompt(self, record: Mapping[str, Any]) -> ParsedPrompt:
        if "series" not in record:  # a text from the command line
            return super().read_prompt(record)
        sample = read_series_record(record)
        patches = cut_patches(sample.values, sample.stats, self.model_source.patches)
        return ParsedPrompt([{"role": "user", "content": sample.prompt or self.prompt}], series=patches)

    def encode(self, samples: list[Any], images: PlaceholderExpansion | None) -> Sequence[Any]:
        if self.has_language_model:
            patches = self.model_source.patches
            return CaptionEncoder(self.tokenizer, self._encoding_config, patches, self.prompt).encode(samples)
        return [self._encode_encoder_only(sample) for sample in samples]

    def _encode_encoder_only(self, sample: SeriesRecord) -> EncodeResult:
        columns, limit = to_columns(sample.values, sample.stats), self.recipe.data.max_length
        count = self.model_source.patches.count_patches(*sample.values.shape)
        if count > limit:
            fix = "raise options.encoder.patch_length or data.max_length, or shorten the series"
            return BadRecord(f"the series has {count} patches, above data.max_length {limit}; {fix}")
        if self.stage != "classify":
            return columns
        if sample.label not in self.known_labels:
            known = ", ".join(self.known_labels[:12])
            return BadRecord(f"the label '{sample.label}' is not a training label ({known}); correct it")
        return {**columns, "label": float(self.known_labels.index(sample.label))}

    def encode_key(self) -> dict[str, Any]:
        patches = self.model_source.patches
        if not self.has_language_model:
            labels = {"labels": self.known_labels} if self.stage == "classify" else {}
            lengths = {"patch_length": patches.length, "max_length": self.recipe.data.max_length}
            return {"what": "series", **lengths, **labels}
        own = {"what": "captioned series", "prompt": self.prompt, "patches": [patches.length, patches.per_token]}
        return {**super().encode_key(), **own}

    def build_store(self, source: ConcatSource) -> TokenStore:
        if self.has_language_model:
            return super().build_store(source)
        encode = RecordEncode(self._parse_text_only, self._encode_parsed)
        return prepare(source, encode, self.encode_key(), policy_of(self.recipe), settings=self.example_settings)

    def _encode_parsed(self, samples: list[Any]) -> Sequence[Any]:
        return self.encode(samples, None)

    @property
    def token_columns(self) -> tuple[str, ...]:  # type: ignore[override]  # depends on the stage
        return ("input_ids",) if self.has_language_model else ("series",)

    def split_group(self, record: dict[str, Any]) -> Any:
        return self.parse(record).values  # the same curve is not learnt and held out

    def collate(self, examples: Sequence[Mapping[str, Any]], positions: Sequence[int] | None = None) -> Batch:
        patches = [cut_patches(*from_columns(example), self.model_source.patches) for example in examples]
        if self.has_language_model:
            return replace(super().collate(examples, positions), vision=stack_patches(patches))
        is_labelled = self.stage == "classify"
        extra, weight = self._label_inputs(examples) if is_labelled else self._hide(examples, patches, positions)
        return Batch(
            tensors={**stack_patches(patches), **extra},
            weight=weight,
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(one.values) for one in patches),
        )

    def _label_inputs(self, examples: Sequence[Mapping[str, Any]]) -> tuple[dict[str, torch.Tensor], float]:
        import torch

        return {"label": torch.tensor([int(example["label"]) for example in examples])}, float(len(examples))

    def _hide(
        self, examples: Sequence[Mapping[str, Any]], patches: list[Patches], positions: Sequence[int] | None
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Return targets of hidden patches and their number of values; the patches in the list become hidden ones."""
        import torch

        rows, longest, size = len(patches), max(len(one.values) for one in patches), self.model_source.patches.length
        hidden, targets = np.zeros((rows, longest), np.float32), np.zeros((rows, longest, size), np.float32)
        in_loss = np.zeros((rows, longest, size), np.float32)
        for row, (example, one) in enumerate(zip(examples, patches, strict=True)):
            # In training by the position in the run, so that every epoch hides others.
            stream = [0, example["sample"]] if positions is None else [1, positions[row]]
            chosen = choose_masked(one, self.mask_ratio, np.random.RandomState([self.recipe.seed, 17, *stream]))
            count = len(chosen)
            hidden[row, :count], targets[row, :count] = chosen, one.values[:, :size]
            in_loss[row, :count] = one.observed & chosen[:, None]
            patches[row] = replace(one, values=np.where(chosen[:, None], np.float32(0), one.values))
        arrays = {"series_masked": hidden, "targets": targets, "in_loss": in_loss}
        return {name: torch.from_numpy(array) for name, array in arrays.items()}, float(in_loss.sum())

    def build_model(self) -> torch.nn.Module:
        model: Any = super().build_model()
        if self.stage == "align":
            model.language_model.requires_grad_(False)
        return model

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        if self.has_language_model:
            return super().loss(model, batch)
        import torch.nn.functional as F

        inputs = {name: value for name, value in batch.tensors.items() if name.startswith("series")}
        output = model(**inputs).float()
        if self.stage == "classify":
            label = batch.tensors["label"]
            right = (output.argmax(-1) == label).sum()
            return Loss(F.cross_entropy(output, label, reduction="sum"), {"accuracy": right})
        error = (output - batch.tensors["targets"]) * batch.tensors["in_loss"]  # (B, N, P)
        return Loss(error.square().sum(), {"mae": error.detach().abs().sum()})

    @property
    def generation_metrics(self) -> GenerationMetrics | None:
        if not self.has_language_model:
            return None
        return GenerationMetrics(
            names=("pattern_accuracy",),
            get_prompt=self._get_prompt,
            score=_score_caption,
            tokenizer=self.tokenizer,
            max_new_tokens=self.max_new_tokens,
            max_samples=self.generate_max_samples,
        )

    def _get_prompt(self, example: Mapping[str, Any]) -> EncodedPrompt:
        ids = example["input_ids"][: int(example["prompt_length"])]
        patches = cut_patches(*from_columns(example), self.model_source.patches)
        return EncodedPrompt("", [int(token) for token in ids], series=patches)

    @classmethod
    def tiny(cls, folder: Path) -> dict[str, Any]:
        recipe = tiny_recipe(folder, "temporal", _tiny_record)
        encoder = {"patch_length": 4, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
        recipe["options"] = {"encoder": encoder, "prompt": "Curve?", "max_new_tokens": 8, "stage": "sft"}
        return recipe


def _score_caption(example: Mapping[str, Any], caption: str) -> dict[str, float]:
    references = json.loads(bytes(int(byte) for byte in example["answers"]))
    return {"pattern_accuracy": names_right_pattern(caption, references)}


def _tiny_record(split: str, index: int) -> dict[str, Any]:
    """Return a short curve of one or two channels, some with missing values, that rises or falls."""
    draw = random.Random(f"{split}/{index}")
    rises, steps = draw.random() < 0.5, draw.randint(5, 14)
    line = [round((at if rises else -at) + draw.random(), 2) for at in range(steps)]
    other = [None if draw.random() < 0.2 else round(draw.random(), 2) for _ in range(steps)]
    series = [line, other] if index % 3 == 0 else line
    return {"series": series, "caption": "rises" if rises else "falls", "label": "up" if rises else "down"}

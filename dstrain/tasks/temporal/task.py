"""Task temporal: questions about curves, answered by an LLM behind a temporal encoder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from dstrain.config.schema import ModelConfig, TrainDatasetConfig
from dstrain.data.encoding.conversations import EncodedPrompt, encode_answers, insert_soft_tokens
from dstrain.data.encoding.rendering import EncodingConfig, PlaceholderExpansion
from dstrain.data.formats.conversations import Conversation, ParsedPrompt
from dstrain.data.formats.messages import Message, has_images
from dstrain.data.prepare import NO_TRAIN_DATA, RecordEncode
from dstrain.data.records import EncodeResult, as_record, try_parse
from dstrain.models.checks import ModelValidator
from dstrain.models.load import MISSING_MODEL, check_vocab_size, is_multimodal, read_config
from dstrain.models.params import check_freeze_and_groups
from dstrain.models.weights import check_weight_files
from dstrain.task import (
    BadRecord,
    Batch,
    ConcatSource,
    DataError,
    DatasetConfig,
    Fault,
    Loss,
    RecipeError,
    RunConfig,
    Source,
    TokenStore,
    policy_of,
    prepare,
)
from dstrain.tasks.common.answers import ANSWER_METRICS
from dstrain.tasks.common.generation import StoredPrompts
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.common.task import AnswerMetric
from dstrain.tasks.common.text import TextChecks, TextExport
from dstrain.tasks.sft import SFT
from dstrain.tasks.temporal.series import (
    EncoderOptions,
    PatchConfig,
    Patches,
    SeriesRecord,
    SyntheticCurves,
    SyntheticOptions,
    choose_masked,
    count_series,
    cut_patches,
    describe_series,
    from_columns,
    read_label,
    read_series_record,
    read_values,
    stack_patches,
    suggest_label,
    summarize_values,
    to_columns,
)
from dstrain.tasks.temporal.tables import open_series

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from dstrain.task import Batch


RECORD_VERSION = 2
"""Increase it when the same records give other examples, or another report of them: cached ones are then ignored."""
LANGUAGE_STAGES = ("align", "sft")
"""Stages with a language model."""


@dataclass(frozen=True, kw_only=True)
class TemporalModelSource(ModelSource):
    """A temporal model: `model` of the recipe names a language model, or an exported temporal model."""

    @property
    def has_language_model(self) -> bool:
        """True where the model reads and writes text."""
        found: bool = self.task.has_language_model
        return found

    @property
    def reads_text(self) -> bool:
        return self.has_language_model

    @property
    def is_named(self) -> bool:
        return not self.has_language_model or super().is_named

    @property
    def can_generate(self) -> bool:
        return self.has_language_model

    @property
    def is_multimodal(self) -> bool:
        return False

    @property
    def has_encoder(self) -> bool:
        """True where model.path is an exported temporal model."""
        from dstrain.models.folder import is_temporal_folder, resolve_base_model

        return is_temporal_folder(resolve_base_model(self.recipe.model).path)

    @property
    def wraps_language_model(self) -> bool:
        """True where model.path is a language model, around which a temporal model is built."""
        return self.has_language_model and self.recipe.model.path is not None and not self.has_encoder

    @property
    def language_source(self) -> ModelSource:
        """The language model without an encoder."""
        return ModelSource(task=self.task)

    @cached_property
    def config(self) -> PretrainedConfig:
        return self._read_config(self.recipe.model)

    def _read_config(self, model: ModelConfig) -> PretrainedConfig:
        """Return a `TemporalConfig` with the sizes of a saved encoder, or of the options. Raises RecipeError."""
        from dstrain.tasks.temporal.model import TemporalConfig  # also registers the type with transformers

        own = self.task.encoder.config_values()
        if not self.has_language_model:
            config = read_config(model) if self.has_encoder else TemporalConfig(**own)
            config.text_config = None
        else:
            config = read_config(model)
            if not isinstance(config, TemporalConfig):
                if is_multimodal(config):
                    problem = f"{config.model_type} takes images; task {self.recipe.task} needs a text-only model"
                    fix = "name a causal language model (Llama, Qwen, GPT-2 …)"
                    raise RecipeError(Fault("model.path" if model.path else "model.config", problem, fix))
                config = TemporalConfig(text_config=config, **own)
        if self.task.stage == "classify":
            labels = self.task.known_labels
            config.id2label = dict(enumerate(labels))
            config.label2id = {label: index for index, label in enumerate(labels)}
        return config

    @cached_property
    def saved_labels(self) -> tuple[str, ...]:
        """The labels of an exported classifier; empty where model.path is none."""
        if not self.has_encoder:
            return ()
        import dstrain.tasks.temporal.model  # noqa: F401  # registers the type

        config: Any = read_config(self.recipe.model)
        if "TemporalForClassification" not in (config.architectures or ()):
            return ()
        return tuple(config.id2label[index] for index in sorted(config.id2label))

    @cached_property
    def patches(self) -> PatchConfig:
        """How series are cut into patches."""
        if not self.has_encoder:
            patches: PatchConfig = self.task.encoder.patches  # without transformers
            return patches
        config: Any = self.config
        return PatchConfig(config.patch_length, config.patches_per_token)

    @property
    def auto_class(self) -> Any:
        from dstrain.tasks.temporal.model import AutoTemporalModel

        return AutoTemporalModel(self.task.stage)

    def build_config(self, model: ModelConfig) -> PretrainedConfig:
        config: Any = self._read_config(model)
        if model.config is not None and self.has_language_model:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config.text_config, name, getattr(self.tokenizer, name))
        if self.has_language_model:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(config.text_config, name, None))
        return config

    @cached_property
    def recipe_tokenizer(self) -> Any:
        """The language model's tokenizer; None for an encoder alone."""
        return super().recipe_tokenizer if self.has_language_model else None

    @cached_property
    def vision_processor(self) -> None:
        return None


@dataclass(frozen=True, kw_only=True)
class TemporalChecks(TextChecks):
    """The checks of a text task for the language model, and of the encoder's settings."""

    task: Temporal

    def required_keys(self) -> None:
        recipe, source = self.task.recipe, self.task.model_source
        faults = [MISSING_MODEL] * (not source.is_named)
        faults += [NO_TRAIN_DATA] * (not self.task.training_items)
        if source.is_named and not source.has_encoder and not faults:
            faults += self.model_faults()
        if not source.has_language_model and recipe.model.path is not None and not source.has_encoder:
            problem = f"is not an exported temporal model, and stage {self.task.stage} has no language model"
            faults.append(Fault("model.path", problem, "give an export of task temporal, or leave it out"))
        if faults:
            raise RecipeError(faults)

    def run(self) -> None:
        recipe, source = self.task.recipe, self.task.model_source
        self._check_encoder(source)
        check_weight_files(recipe.model)
        if source.has_language_model:
            check_vocab_size(recipe.model, source.config, len(self.task.tokenizer), False)
        meta_model = source.build_meta_model()
        if source.wraps_language_model:
            check_freeze_and_groups(meta_model, recipe)
            meta_model = source.language_source.build_meta_model()
        self.validator.check(meta_model)

    def _check_encoder(self, source: Any) -> None:
        given = self.task.recipe.options.get("encoder", {})
        if source.has_encoder and (names := self.task.encoder.find_mismatched(source.config, given)):
            problem = f"differs from the encoder in {self.task.recipe.model.path} ({', '.join(names)})"
            raise RecipeError(
                Fault(
                    "options.encoder",
                    problem,
                    "remove it, or write options.encoder={}: a saved encoder keeps its sizes",
                )
            )

    def info_messages(self) -> Sequence[str]:
        return super().info_messages() if self.task.has_language_model else self.validator.info_messages

    @cached_property
    def validator(self) -> ModelValidator:
        task, recipe = self.task, self.task.recipe
        if task.model_source.wraps_language_model:  # whose parts the patterns of the recipe may not name
            model = recipe.model.model_copy(update={"freeze": [], "lora": None, "init": None})
            optim = recipe.optim.model_copy(update={"groups": {}})
            recipe = recipe.model_copy(update={"model": model, "optim": optim})
        heads = task.modules_to_save if task.stage == "classify" else ("reconstruction", "mask_embedding")
        return ModelValidator(recipe, heads if not task.has_language_model else (), task.has_language_model)


@dataclass(frozen=True)
class TemporalExport(TextExport):
    """Exports a folder that `dstrain.tasks.temporal.model` loads; the labels of a classifier are in its config."""

    task: Temporal

    def recipe(self, merged: bool) -> RunConfig:
        recipe = super().recipe(merged)
        if self.task.stage != "classify":
            return recipe
        options: dict[str, Any] = {**recipe.options, "labels": list(self.task.known_labels)}
        return recipe.model_copy(update={"options": options})


# Shapes: B series, N patches, P values of a patch.


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

    learning_rate = 1.0e-4
    packs_batches = False
    answer_metrics: ClassVar[Mapping[str, AnswerMetric]] = {
        **ANSWER_METRICS,
        "pattern_accuracy": lambda caption, references: names_right_pattern(caption, references),
    }
    default_answer_metrics = ("pattern_accuracy",)
    default_max_new_tokens = 24
    scores_answers = False
    is_planned = False  # the encoder beside the language model is not computed

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric_names", METRICS[self.stage])
        if not 0 < self.mask_ratio < 1:
            raise ValueError(f"mask_ratio is {self.mask_ratio:g}, but it must be above 0 and below 1")
        if self.recipe.eval.generate and self.recipe.eval.generate.reward_model:
            raise ValueError("eval.generate.reward_model cannot read a series; leave it out")
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
        return TemporalModelSource(task=self)

    @cached_property
    def checks(self) -> TemporalChecks:
        return TemporalChecks(parse_record=self.parse_record, task=self)

    @property
    def export(self) -> TemporalExport:
        return TemporalExport(self, self.modules_to_save)

    @property
    def training_items(self) -> Sequence[TrainDatasetConfig]:
        return [*super().training_items, *([SYNTHETIC_CURVES] if self.synthetic else [])]

    def open_source(self, item: DatasetConfig) -> Source:
        if item is SYNTHETIC_CURVES:
            assert self.synthetic is not None
            return SyntheticCurves(self.synthetic)
        return open_series(item, self.recipe.data.columns)

    @property
    def label_column(self) -> str:  # type: ignore[override]  # depends on the stage
        return "label" if self.stage == "classify" else ""

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

    def describe_record(self, record: Mapping[str, Any], parsed: Any) -> list[str]:
        values = read_values(record["series"])
        texts = {"label": parsed.label, "prompt": parsed.prompt, "caption": " | ".join(parsed.captions)}
        channels, steps = values.shape
        lines = [f"{channels} channel{'s' * (channels != 1)} of {steps} value{'s' * (steps != 1)}"]
        lines += [f"channel {number}: {summarize_values(channel)}" for number, channel in enumerate(values[:8], 1)]
        lines += [f"… and {channels - 8} more channels"] * (channels > 8)
        return [*lines, *(f"{name}: {text}" for name, text in texts.items() if text)]

    def parse(self, record: Mapping[str, Any]) -> SeriesRecord:  # type: ignore[override]  # not a conversation
        if not self.has_language_model:  # captions are not used there, and the run says so
            record = as_record(record).without("caption", "captions", "prompt")
        sample = read_series_record(record)
        as_record(record).note_content(count_series(sample.values.shape, self._patch_length), describe_series)
        if self.has_language_model and not sample.captions:
            raise BadRecord("the record has no 'caption'; write one, or use options.stage classify or masked")
        if self.stage == "classify" and sample.label is None:
            raise BadRecord(f"the record has no 'label'; {suggest_label(record)}, or use another options.stage")
        return sample

    @cached_property
    def _patch_length(self) -> int:
        return self.model_source.patches.length

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        # The curve is not parsed: a tokenizer needs the texts alone.
        captions = record.get("caption") if record.get("captions") is None else record["captions"]
        yield from [captions] if isinstance(captions, str) else (captions or ())
        yield record.get("prompt") or self.prompt

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
            return {"what": "series", "version": RECORD_VERSION, **lengths, **labels}
        own = {"what": "captioned series", "version": RECORD_VERSION, "prompt": self.prompt}
        own |= {"patches": [patches.length, patches.per_token]}
        return {**super().encode_key(), **own}

    def build_store(self, source: ConcatSource) -> TokenStore:
        if self.has_language_model:
            return super().build_store(source)
        encode = RecordEncode(self.parse_record, self.encode_text_only)
        return prepare(source, encode, self.encode_key(), policy_of(self.recipe), settings=self.example_settings)

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

    def export_outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        if self.has_language_model:
            return super().export_outputs(model, batch)
        return self.loss(model, batch).total

    @cached_property
    def prompts(self) -> SeriesPrompts:
        return SeriesPrompts(self)


class SeriesPrompts(StoredPrompts):
    """Questions about series."""

    task: Temporal

    def read_prompt(self, record: Mapping[str, Any]) -> ParsedPrompt:
        if "series" not in record:  # a text from the command line
            return super().read_prompt(record)
        sample = read_series_record(record)
        patches = cut_patches(sample.values, sample.stats, self.task.model_source.patches)
        return ParsedPrompt([{"role": "user", "content": sample.prompt or self.task.prompt}], soft_inputs=patches)

    def encode(self, example: Mapping[str, Any]) -> EncodedPrompt | None:
        prompt = super().encode(example)
        assert prompt is not None, "every example has one"
        return replace(prompt, soft_inputs=cut_patches(*from_columns(example), self.task.model_source.patches))


@dataclass(frozen=True)
class CaptionEncoder:
    """Encodes each caption of a series as the answer to a prompt, after the soft tokens of the series."""

    tokenizer: Any
    config: EncodingConfig
    patches: PatchConfig
    prompt: str
    """The user's turn where a record has none."""

    def encode(self, samples: Sequence[SeriesRecord]) -> list[list[EncodeResult]]:
        """Return the examples of each record, one for each caption."""
        pairs = [(sample, caption) for sample in samples for caption in sample.captions]
        conversations = [Conversation(self._messages(*pair), (1,)) for pair in pairs]
        accepted = [sample.captions for sample, _ in pairs]
        examples = iter(encode_answers(self.tokenizer, conversations, accepted, self.config))
        return [[self._add_series(sample, next(examples)) for _ in sample.captions] for sample in samples]

    def _messages(self, sample: SeriesRecord, caption: str) -> list[Message]:
        asked: Message = {"role": "user", "content": sample.prompt or self.prompt}
        return [asked, {"role": "assistant", "content": caption}]

    def _add_series(self, sample: SeriesRecord, example: EncodeResult) -> EncodeResult:
        """Return the example with the series and its soft tokens."""
        if isinstance(example, BadRecord):
            return example
        count = self.patches.count_tokens(*sample.values.shape)
        ids = insert_soft_tokens(self.tokenizer, example["input_ids"], count)
        loss_mask = [0] * count + [*example["loss_mask"]]
        if len(ids) > self.config.max_length:
            total = f"{count} soft tokens and {len(ids) - count} tokens of text"
            fix = "raise data.max_length or options.encoder.patch_length, or shorten the record"
            return BadRecord(f"the record has {total}, above data.max_length {self.config.max_length}; {fix}")
        columns = {"input_ids": ids, "loss_mask": loss_mask, "prompt_length": count + example["prompt_length"]}
        return {**example, **columns, **to_columns(sample.values, sample.stats)}


PATTERN_WORDS: dict[str, str] = {
    "peak": r"peak\w*|pea?ks?|spik\w*|hump\w*|bump\w*|mound\w*|highest|high point|maximum|max|tops?|crest\w*|hill|apex\w*|"
    r"climax\w*|pinnacle|summit",
    "dip": r"dip\w*|trou?gh\w*|troo\w*|lowest|low point|minimum|min|bottom\w*|valley\w*|dents?",
    "plateau": r"plat\w*|pleat\w*|flat\w*|level\w*|constant\w*|stable|stagna\w*|unchang\w*|unwavering|consistent|"
    r"maintain\w*|(?:stays?|remains?|remaining|is|mostly) (?:\w+ )?(?:the same|steady|same)|(?:does not|no) change|"
    r"stabili[sz]\w*|same (?:value|level|place|point)",
    "up": r"incr\w*|ris(?:e|es|ing)|rose|rais\w*|grow\w*|climb\w*|up(?:wards?|hill|turn|rising|swing|s)?|gain\w*|"
    r"ascen\w*|inclin\w*|jumps?|goes up|going up|soar\w*|surg\w*|hikes?|higher|greater|recover\w*|rebound\w*|"
    r"positive slope|slopes? positive\w*",
    "down": r"decr\w*|desc?re\w*|decea\w*|declin\w*|fall\w*|fell|drop\w*|down(?:wards?|hill|turn|swing|s)?|descen\w*|"
    r"slump\w*|loss|plummet\w*|plung\w*|dives?|reduc\w*|deteriorat\w*|degrad\w*|sink\w*|lowers?|less|crash\w*|"
    r"collaps\w*|tails? off|tailing off|negative slope|slopes? negative\w*",
    "periodic": r"periodic\w*|oscillat\w*|repeat\w*|cycl\w*|waves?|seasonal\w*|fluctuat\w*|zig ?zag\w*|volatile",
    "anomaly": r"anomal\w*|outlier\w*|sudden jump|unusual\w*",
}
"""Pattern -> regular expression of the words that name it, as people write and misspell them."""
_LESS_CERTAIN_WORDS = {"plateau": r"stead\w*|even(?:ly)?|straight|similar|sideways"}
"""The same, for words that name a pattern only in a caption that names no other: `a steady increase` is up."""
_CERTAIN_PATTERNS = {name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in PATTERN_WORDS.items()}
_LESS_CERTAIN_PATTERNS = {
    name: re.compile(rf"\b(?:{words})\b", re.IGNORECASE) for name, words in _LESS_CERTAIN_WORDS.items()
}


def find_patterns(caption: str) -> frozenset[str]:
    """Return the patterns that a caption names."""
    found = frozenset(name for name, words in _CERTAIN_PATTERNS.items() if words.search(caption))
    return found or frozenset(name for name, words in _LESS_CERTAIN_PATTERNS.items() if words.search(caption))


def names_right_pattern(caption: str, references: Iterable[str]) -> float:
    """Return 1 where the caption names patterns and a reference names each of them, else 0.

    A curve has several true captions, each about another part of it; so any reference may name a pattern. Where no
    reference names one, a caption is right if it names none.
    """
    found = find_patterns(caption)
    known = frozenset().union(*map(find_patterns, references))
    return float(found == known) if not known else float(bool(found) and found <= known)

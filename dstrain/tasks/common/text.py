"""TextTask: tasks on text with or without images, from records to packed batches."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from dstrain.batch import PADDED, Batch, PackingMode
from dstrain.config.schema import BatchConfig, DatasetConfig, GenerateConfig, LoraConfig, ModelConfig, RunConfig
from dstrain.data.formats.answers import PromptAnswers, read_prompt_answers
from dstrain.data.formats.conversations import ParsedPrompt, get_prompt, read_prompt
from dstrain.data.formats.images import RecordWithImages, read_with_images
from dstrain.data.formats.messages import has_images
from dstrain.data.records import BadRecord, tokenizer_fingerprint
from dstrain.data.sources.base import ConcatSource, Source
from dstrain.data.template_clock import describe_written_times, reads_clock
from dstrain.errors import Fault, RecipeError
from dstrain.models.checks import (
    ModelValidator,
    check_length_dependent,
    check_model,
    check_trains_on_text,
    max_positions,
)
from dstrain.models.folder import resolve_base_model
from dstrain.models.load import MISSING_MODEL, check_vocab_size
from dstrain.models.weights import check_weight_files
from dstrain.tasks.common.answers import ANSWER_METRICS
from dstrain.tasks.common.generation import HeldOutPrompts
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.common.record_task import RecordTask, policy_of
from dstrain.tasks.common.task import AnswerMetric, Checks, Export, GenerationMetrics, LossInputs, Split

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image
    from transformers import PretrainedConfig

    from dstrain.data.encoding.rendering import PlaceholderExpansion
    from dstrain.data.loading.rows import PackedRows, PaddedRows
    from dstrain.data.prepare import ExampleSettings
    from dstrain.data.records import EncodeResult
    from dstrain.data.token_store import TokenColumns, TokenizedDataset, TokenStore


JUDGE_METRICS = ("reward", "win_rate")
"""Metrics of generated answers that a reward model gives: its mean score, and how often it prefers them."""
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
    from dstrain.models.attention.sequence import sequence_unsupported_reason

    # Transformers' own config may belong to a model class that came with the weights.
    if model.trust_remote_code and getattr(config, "auto_map", None):
        return "the model runs code that came with its weights"
    if model.attn_implementation != "auto":
        config = copy.deepcopy(config)  # the model is built from the other one
        config._attn_implementation = model.attn_implementation
    reason = packing_unsupported_reason(config, shares_prefixes)
    return reason or sequence_unsupported_reason(config.get_text_config(), sequence)


@dataclass(frozen=True, kw_only=True)
class TextChecks(Checks):
    """Checks of the model, its files and its tokenizer."""

    task: TextTask

    def required_keys(self) -> None:
        from dstrain.data.prepare import NO_TRAIN_DATA

        faults = [MISSING_MODEL] * (not self.task.model_source.is_named)
        faults += [NO_TRAIN_DATA] * (not self.task.training_items)
        own = self.task.has_own_tokenizer or self.task.has_own_source_load
        if faults := faults or ([] if own else self.model_faults()):
            raise RecipeError(faults)

    def model_faults(self) -> list[Fault]:
        """Return the faults of the models that the recipe names, found in their small files."""
        task = self.task
        return check_model(task.recipe, can_generate=task.can_generate, needs_vision=task.needs_vision)

    def run(self) -> None:
        from dstrain.models.tiles import check_tiles

        model, source = self.task.recipe.model, self.task.model_source
        check_weight_files(model)
        check_vocab_size(model, source.config, len(self.task.tokenizer), source.is_multimodal)
        check_length_dependent(source.config, self.task.recipe, self.task.rows_per_sample)
        meta_model = source.build_meta_model()
        if self.task.generated_metric_names:
            self._check_room_for_answers(meta_model)
        check_tiles(meta_model, model.tiled_mlp)
        self.validator.check(meta_model)
        _ = self.task.packing  # raises where the recipe asks for batches that a model cannot take

    def _check_room_for_answers(self, model: torch.nn.Module) -> None:
        """Raise RecipeError where a prompt and a generated answer have more tokens than the model has positions."""
        data, longest = self.task.recipe.data, self.task.max_new_tokens
        key = "data.max_prompt_length" if data.max_prompt_length else "data.max_length"
        longest += data.max_prompt_length or data.max_length
        limit = max_positions(model, self.task.model_source.config)
        if limit is not None and limit < longest:
            problem = (
                f"with {self.task.max_new_tokens} generated tokens is {longest}, and the model has {limit} positions"
            )
            raise RecipeError(Fault(key, problem, "lower it, or eval.generate.max_new_tokens"))

    def device(self) -> None:
        self.task.model_source.check_attn_implementation()

    def warnings(self) -> Sequence[str]:
        from dstrain.data.encoding.conversations import describe_missing_end

        return [*self.validator.warnings, *describe_missing_end(self.task.tokenizer)]

    def info_messages(self) -> Sequence[str]:
        from dstrain.data.encoding.chat_template import describe_missing_template

        packing = [message] if (message := self.task.packing.message) else []
        return [
            *self.validator.info_messages,
            *describe_missing_template(self.task.tokenizer),
            *describe_written_times(self.task.tokenizer),
            *packing,
        ]

    def data_warnings(self, train: Any, held_out: Any) -> Sequence[str]:
        warnings = [*super().data_warnings(train, held_out)]
        splits = [("training", train), ("held-out", held_out)]
        for name, dataset in splits if self.task.label_column else []:
            if dataset is None or len(dataset) < 2:
                continue
            labels = dataset.column(self.task.label_column)
            if labels.min() == labels.max():
                warnings.append(
                    f"all {len(dataset)} samples of the {name} data have the same label: nothing can be learnt, or told, of "
                    "the difference between labels; add samples of another one"
                )
        return warnings

    def newly_initialized(self) -> Sequence[str]:
        return self.validator.newly_initialized

    @cached_property
    def validator(self) -> ModelValidator:
        task = self.task
        return ModelValidator(task.recipe, task.modules_to_save, task.model_source.can_generate)


@dataclass(frozen=True)
class TextExport(Export):
    """Exports a folder that transformers loads, with its tokenizer or processor."""

    task: TextTask

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return self.task.export_outputs(model, batch)

    def recipe(self, merged: bool) -> RunConfig:
        """Return the recipe with the base model as path, where the adapter of a folder was trained on."""
        recipe, model = self.task.recipe, self.task.recipe.model
        if model.lora is None or model.lora.create_new_adapter:
            return recipe
        lora = model.lora.model_copy(update={"create_new_adapter": True})
        base = resolve_base_model(model).model_copy(update={"lora": lora})
        return recipe.model_copy(update={"model": base})

    def save_extras(self, folder: Path) -> None:
        self.task.model_source.save_processor(folder)

    def reload(self, folder: Path) -> torch.nn.Module:
        return self.task.model_source.reload(folder)

    def make_probes(self, examples: Sequence[Any]) -> list[Batch]:
        # Padded: the reloaded model is the one that users load, without the attention function of packed batches.
        batch = self.task.recipe.batch.model_copy(update={"packing": False, "prefix_sharing": False})
        padded = replace(self.task, recipe=self.task.recipe.model_copy(update={"batch": batch}))
        return [padded.collate([example]) for example in examples]


@dataclass(frozen=True, kw_only=True)
class TextTask(RecordTask):
    """A task on records of text, with or without images, for a transformers model.

    Rows of a batch: R sequences of token ids.
    """

    is_planned = True
    rows_per_sample: ClassVar[int] = 2
    """Sequences of a sample in a batch."""
    ref_columns: ClassVar[tuple[str, ...]] = ()
    """Names of the outputs of a reference, the tensors that `reference_outputs` returns."""
    answer_metrics: ClassVar[Mapping[str, AnswerMetric]] = ANSWER_METRICS
    label_column: ClassVar[str] = ""
    """Column of the examples with the label of each; empty: they have none."""
    default_max_new_tokens: ClassVar[int] = 256
    """Limit of tokens of a generated answer where the recipe names none."""
    scores_answers: ClassVar[bool] = True
    """True where `score_answers` gives a value to each answer, for `dstrain score`."""
    modules_to_save: ClassVar[tuple[str, ...]] = ()
    """New parts of the model, trained in full where `model.lora` freezes the rest."""
    default_lora: ClassVar[LoraConfig | None] = None
    """Adapters where the recipe does not write `model.lora`; the value null there trains the weights."""

    @abstractmethod
    def parse(self, record: Mapping[str, Any]) -> Any:
        """Parse the text of a record. Raises BadRecord."""

    @abstractmethod
    def encode(self, samples: list[Any], images: PlaceholderExpansion | None) -> Sequence[EncodeResult]:
        """Return the example or the fault of each parsed record.

        `images` expands the image placeholders of the records; None for a text-only model.
        """

    @abstractmethod
    def encode_key(self) -> dict[str, Any]:
        """Return everything that `encode` depends on, except the tokenizer or processor."""

    @abstractmethod
    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        """Yield the texts of a record, to train a tokenizer on."""

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

    def split_group(self, record: dict[str, Any]) -> Any:
        """Return the record's prompt and images; None where nothing is asked before the answer."""
        item = self.parse_record(record)
        prompt = get_prompt(item.parsed)
        return [prompt, item.images] if prompt or item.images else None

    def open_prompts(self, item: DatasetConfig) -> Source:
        """Return the records of `dstrain generate`, which may have no answer, cut to `data.max_samples`."""
        return self.open_sources([item])

    def read_prompt(self, record: Mapping[str, Any]) -> ParsedPrompt:
        """Return the prompt of a record for `dstrain generate`, which may have no answer. Raises BadRecord."""
        return read_prompt(record)

    def read_answers(self, record: Mapping[str, Any]) -> RecordWithImages[PromptAnswers]:
        """Return a held-out record's prompt and its answers, all of them right. Raises BadRecord."""
        found = self.parse_with_images(record, read_prompt_answers)
        if found.parsed.form != "pair":
            return found
        return replace(found, parsed=replace(found.parsed, answers=found.parsed.answers[:1], form="answer"))

    def has_reference_answer(self, example: Mapping[str, Any]) -> bool:
        """Return whether the answer of a held-out example is one that a generated answer is compared with."""
        return True

    @property
    def generate_config(self) -> GenerateConfig | None:
        """What the recipe says of generated answers; None: an evaluation generates none."""
        found = self.recipe.eval.generate or (GenerateConfig() if self.default_answer_metrics else None)
        return found if found is not None and self.can_generate else None

    @property
    def generated_metric_names(self) -> tuple[str, ...]:
        generate = self.generate_config
        if generate is None:
            return ()
        names = self.default_answer_metrics if generate.metrics is None else tuple(generate.metrics)
        return (*names, *(JUDGE_METRICS if generate.reward_model else ()))

    @property
    def max_new_tokens(self) -> int:
        """Limit of tokens of a generated answer."""
        generate = self.generate_config
        return (generate and generate.max_new_tokens) or self.default_max_new_tokens

    @property
    def generation_metrics(self) -> GenerationMetrics | None:
        generate, names = self.generate_config, self.generated_metric_names
        if generate is None or not names:
            return None
        metrics = {name: self.answer_metrics[name] for name in names if name not in JUDGE_METRICS}
        prompts = self.held_out_prompts
        return GenerationMetrics(
            names=tuple(metrics),
            get_prompt=prompts.encode,
            score=lambda example, answer: {
                name: metric(answer, prompts.read_texts(example)) for name, metric in metrics.items()
            },
            tokenizer=self.tokenizer,
            vision_processor=self.model_source.vision_processor,
            max_new_tokens=self.max_new_tokens,
            max_samples=generate.samples,
        )

    @cached_property
    def held_out_prompts(self) -> HeldOutPrompts:
        """Prompts and right answers of held-out examples."""
        return HeldOutPrompts(self)

    @property
    def example_settings(self) -> ExampleSettings:
        from dstrain.data.encoding.template_check import TEMPLATE_COLUMNS
        from dstrain.data.encoding.tokenization import CUT_COLUMNS

        return replace(super().example_settings, counted=(*CUT_COLUMNS, *TEMPLATE_COLUMNS))

    @property
    def _tokens(self) -> TokenColumns:
        from dstrain.data.token_store import TokenColumns

        return TokenColumns(self.token_columns, self.has_pairs, "prompt_length" if self.has_pairs else None)

    def build_store(self, source: ConcatSource) -> TokenStore:
        """Return the source's examples, from the cache where they are in it. Raises DataError."""
        from dstrain.data.prepare import ImageRecordEncoder, RecordEncode, prepare

        policy, settings = policy_of(self.recipe), self.example_settings
        processor = self.model_source.vision_processor
        if processor is None:
            key = {**self.encode_key(), "tokenizer": tokenizer_fingerprint(self.tokenizer)}
            encode = RecordEncode(self._parse_text_only, partial(self.encode, images=None))
            return prepare(source, encode, key, policy, settings=settings)
        # Relative image paths mean other files in another folder.
        # Empty sources have no folder. `if one` does not open a source, as its length might.
        folders = [str(one.get_base_dir(0).resolve()) for one in source.sources if one]
        key = {**self.encode_key(), "processor": processor.fingerprint, "folders": folders}
        encoder = ImageRecordEncoder.create(processor, policy.processes)
        encode_images, write_index = encoder.make_encode(source, self.parse, self.encode)
        return prepare(source, encode_images, key, policy, settings=settings, write_extra=write_index)

    def examples(self, split: Split) -> TokenizedDataset | None:  # type: ignore[override]
        dataset = cast("TokenizedDataset | None", super().examples(split))
        if (
            dataset is not None
            and split == "train"
            and (index := dataset.store.image_index) is not None
            and not len(index)
        ):
            self._check_trains_on_text()
        return dataset

    def _check_trains_on_text(self) -> None:
        """Raise DataError where only vision parts are trained, and no record has an image."""
        model = self.recipe.model
        if model.freeze and not model.lora:
            check_trains_on_text(self.model_source.build_meta_model(), model)

    @cached_property
    def packing(self) -> PackingMode:
        """The form of the batches. Raises RecipeError where the recipe asks for one that a model cannot take."""
        untested = None
        if "packs_batches" not in vars(type(self)):
            untested = (
                f"{type(self).__name__} derives from a task that packs and may expect padded rows; if it does not, "
            )
            untested += "write packs_batches = True in the class, or set batch.packing: true"
        return resolve_packing(self.recipe.batch, self.packing_unsupported_reason, self.has_pairs, untested)

    def packing_unsupported_reason(self, shares_prefixes: bool) -> str | None:
        """Return why the task, or a model that reads its batches, cannot take packed ones; None: all can."""
        if not self.packs_batches:
            return f"task {self.recipe.task} has padded rows only"
        if self.loads_own_model:
            return f"task {self.recipe.task} makes its model in its own way"
        sequence = self.recipe.parallel.sequence
        return model_unsupported_reason(self.recipe.model, self.model_source.config, shares_prefixes, sequence)

    def sequence_parallel_unsupported_reason(self, size: int) -> str | None:
        from dstrain.models.attention.sequence import sequence_unsupported_reason
        from dstrain.models.router_loss import router_loss_coefficient

        config = self.model_source.config
        if reason := sequence_unsupported_reason(config.get_text_config(), size):
            return reason
        if not self.packing.is_packed:
            return self.packing.message or "batch.packing is false: only the tokens of packed batches can be shared"
        if router_loss_coefficient(config, self.recipe.model.router_aux_loss_coef):
            return "the loss of a router reads all tokens of a micro-batch; write model.router_aux_loss_coef: 0"
        return None

    def make_rows(self, sequences: Sequence[np.ndarray], num_pairs: int = 0) -> PaddedRows | PackedRows:
        """Return the sequences as rows of a batch. `num_pairs`: sequences i and num_pairs + i are a pair.

        Sequences after those of the pairs are packed on their own.
        """
        from dstrain.data.loading.rows import PaddedRows, pack_rows

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
        images: list[Image] = []
        for row, example in enumerate(examples):
            for index, stored in enumerate(example["images"]):
                image = stored.load(downscale)
                images.append(image if positions is None else self.augment_image(image, positions[row], index))
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

    @property
    def loss_inputs(self) -> LossInputs:
        return LossInputs(packing=lambda: self.packing)

    @cached_property
    def model_source(self) -> ModelSource:
        """The model that the recipe names: its config, tokenizer, processor and class."""
        return ModelSource(task=self)

    @property
    def texts_name(self) -> str:
        """Name of `iter_texts` in the key of a trained tokenizer, with every option that the texts depend on."""
        return type(self).iter_texts.__qualname__

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, with a pad token and the recipe's chat template."""
        return self.model_source.recipe_tokenizer  # what `super().tokenizer` of a subclass asks for

    @property
    def writes_time(self) -> bool:
        return self.reads_text and reads_clock(self.tokenizer)

    @property
    def has_own_tokenizer(self) -> bool:
        """True where a subclass, in a user's file, makes the tokenizer in its own way."""
        return type(self).tokenizer is not TextTask.tokenizer

    @property
    def reads_text(self) -> bool:
        return self.model_source.reads_text

    @property
    def can_generate(self) -> bool:
        return self.model_source.can_generate

    @property
    def tokenizer_digest(self) -> str | None:
        if not self.reads_text:
            return None
        processor = self.model_source.vision_processor
        return tokenizer_fingerprint(self.tokenizer) if processor is None else processor.fingerprint

    @property
    def has_own_source_load(self) -> bool:
        """True where `model_source` loads in its own way: model.path may then mean anything."""
        return type(self.model_source).load is not ModelSource.load

    @property
    def loads_own_model(self) -> bool:
        """True where a subclass, in a user's file, makes the model in its own way."""
        return self.has_own_source_load or type(self).build_model is not TextTask.build_model

    def build_model(self) -> torch.nn.Module:
        return self.enable_packing(self.model_source.load(self.recipe.model))

    def enable_packing(self, model: torch.nn.Module) -> torch.nn.Module:
        """Prepare a model for packed batches, where the task has them. Returns it."""
        if self.packing.is_packed:
            from dstrain.models.attention.packed import enable_packed_attention

            enable_packed_attention(model)
        return model

    @cached_property
    def checks(self) -> TextChecks:
        return TextChecks(parse_record=self.parse_record, task=self)

    def answer_tensors(
        self, rows: PaddedRows | PackedRows, answers: Sequence[tuple[np.ndarray, int]]
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that `score_answers` reads; `answers`: of each row its ids, and where the answer starts."""
        from dstrain.data.loading.rows import answer_masks

        return rows.target_tensors(answer_masks(answers))

    def score_answers(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Return name -> value of each row's answer, (R,): what `dstrain score` writes."""
        from dstrain.tasks.common.forward import answer_log_probs

        return {
            "logp": answer_log_probs(model, batch).double().sum(-1),
            "num_tokens": batch.tensors["loss_mask"].sum(-1),
        }

    def export_outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return what a reloaded export has to reproduce on a probe batch."""
        return self.loss(model, batch).total

    @property
    def export(self) -> TextExport:
        return TextExport(self, self.modules_to_save)

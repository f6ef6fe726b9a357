"""TextTask: tasks on text with or without images, from records to packed batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from dstrain.batch import Batch, PackingMode
from dstrain.config.schema import RunConfig
from dstrain.data.encoding.chat_template import describe_written_times, tokenizer_fingerprint
from dstrain.data.formats.conversations import Conversation
from dstrain.data.formats.images import RecordWithImages, read_with_images
from dstrain.data.formats.messages import has_images
from dstrain.data.formats.preferences import Prompt
from dstrain.data.records import Record
from dstrain.data.sources.base import ConcatSource
from dstrain.errors import BadRecord, Fault, RecipeError
from dstrain.models.checks import (
    ModelValidator,
    check_frozen_model,
    check_length_dependent,
    check_model,
    check_trains_on_text,
    max_positions,
)
from dstrain.models.folder import check_local_folder, resolve_base_model
from dstrain.models.load import MISSING_MODEL, check_vocab_size
from dstrain.models.weights import check_weight_files
from dstrain.tasks.common.answers import ANSWER_METRICS
from dstrain.tasks.common.generation import Prompts
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.common.packing import Collator, model_unsupported_reason, resolve_packing
from dstrain.tasks.common.record_task import RecordTask, policy_of
from dstrain.tasks.common.reference import reference_unsupported_reason
from dstrain.tasks.common.task import AnswerMetric, Checks, Export, LossInputs, Reference, Split

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dstrain.data.encoding.rendering import PlaceholderExpansion
    from dstrain.data.loading.rows import PackedRows, PaddedRows
    from dstrain.data.prepare import ExampleSettings
    from dstrain.data.records import EncodeResult
    from dstrain.data.token_store import TokenizedDataset, TokenStore


@dataclass(frozen=True, kw_only=True)
class TextChecks(Checks):
    """Checks of the model, its files and its tokenizer."""

    task: TextTask

    def required_keys(self) -> None:
        from dstrain.data.prepare import NO_TRAIN_DATA

        faults = [MISSING_MODEL] * (not self.task.model_source.is_named)
        faults += [NO_TRAIN_DATA] * (not self.task.training_items)
        reads_model_files = not (self.task.has_own_tokenizer or self.task.model_source.has_own_load)
        if not faults and reads_model_files:
            faults = self.model_faults()
        if faults:
            raise RecipeError(faults)
        self.reference()

    def reference(self) -> None:
        reference = self.task.reference
        if reference.recipe_key is not None:
            check_local_folder(str(reference.config.path), reference.recipe_key)

    def model_faults(self) -> list[Fault]:
        """Return the faults of the models that the recipe names, found in their small files."""
        task = self.task
        faults = check_model(task.recipe, can_generate=task.model_source.can_generate, needs_vision=task.needs_vision)
        reference = task.reference
        if reference.recipe_key is not None:
            path, trusted = str(reference.config.path), task.recipe.model.trust_remote_code
            faults += check_frozen_model(path, reference.recipe_key, trusted)
        return faults

    def run(self) -> None:
        from dstrain.models.tiles import check_tiles

        model, source = self.task.recipe.model, self.task.model_source
        if model.path is not None:
            check_weight_files(model)
        check_vocab_size(model, source.config, len(self.task.tokenizer), source.is_multimodal)
        check_length_dependent(source.config, self.task.recipe, self.task.rows_per_sample)
        meta_model = source.build_meta_model()
        if self.task.prompts.metric_names:
            self._check_room_for_answers(meta_model)
        check_tiles(meta_model, model.tiled_mlp)
        self.validator.check(meta_model)
        _ = self.task.packing  # raises where the recipe asks for batches that a model cannot take

    def _check_room_for_answers(self, model: torch.nn.Module) -> None:
        """Raise RecipeError where a prompt and a generated answer have more tokens than the model has positions."""
        data, longest = self.task.recipe.data, self.task.prompts.max_new_tokens
        key = "data.max_prompt_length" if data.max_prompt_length else "data.max_length"
        longest += data.max_prompt_length or data.max_length
        limit = max_positions(model, self.task.model_source.config)
        if limit is not None and limit < longest:
            problem = f"with {self.task.prompts.max_new_tokens} generated tokens is {longest}, and the model has {limit} positions"
            raise RecipeError(Fault(key, problem, "lower it, or eval.generate.max_new_tokens"))

    def device(self) -> None:
        self.task.model_source.check_attn_implementation()

    def warnings(self) -> Sequence[str]:
        from dstrain.data.encoding.conversations import describe_missing_end

        if not self.task.model_source.can_generate:
            return self.validator.warnings
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
        """Return the recipe with the base model as path, where the adapter of a folder was trained on.

        It names the initial policy as `ref_model`, where that is the reference, and a folder or the hub has it.
        """
        recipe, model = self.task.recipe, self.task.recipe.model
        if model.lora is not None and not model.lora.create_new_adapter:
            lora = model.lora.model_copy(update={"create_new_adapter": True})
            base = resolve_base_model(model).model_copy(update={"lora": lora})
            recipe = recipe.model_copy(update={"model": base})
        reference = self.task.reference
        is_base = model.lora is not None and not merged and model.lora.create_new_adapter
        if reference.kind == "none" or reference.recipe_key is not None or is_base:
            return recipe
        if model.path is None or model.init is not None:
            return recipe
        return recipe.model_copy(update={"options": {**recipe.options, "ref_model": model.path}})

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

    names_model = True
    is_planned = True
    rows_per_sample: ClassVar[int] = 2
    """Sequences of a sample in a batch."""
    answer_metrics: ClassVar[Mapping[str, AnswerMetric]] = ANSWER_METRICS
    label_column: ClassVar[str] = ""
    """Column of the examples with the label of each; empty: they have none."""
    default_max_new_tokens: ClassVar[int] = 256
    """Limit of tokens of a generated answer where the recipe names none."""
    scores_answers: ClassVar[bool] = True
    """True where `score_answers` gives a value to each answer, for `dstrain score`."""
    modules_to_save: ClassVar[tuple[str, ...]] = ()
    """New parts of the model, trained in full where `model.lora` freezes the rest."""

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
        source = self.model_source
        if not has_images(record):
            parsed = parse(record)  # a fault of the record is reported before the model is read
            takes_images = source.is_named and source.is_multimodal
            return read_with_images(record, parse) if takes_images else RecordWithImages(parsed)
        if source.is_named and not source.is_multimodal:
            raise BadRecord(
                "the record has an image, and the model is text-only; "
                "name a vision-language model, or remove the record"
            )
        return read_with_images(record, parse)

    def encode_text_only(self, items: list[RecordWithImages[Any]]) -> Sequence[EncodeResult]:
        """Return `encode` of parsed records, for a model that takes no images."""
        return self.encode([item.parsed for item in items], None)

    def split_group(self, record: dict[str, Any]) -> Any:
        """Return the record's prompt and images; None where nothing is asked before the answer."""
        item = record.parsed if isinstance(record, Record) else None
        if not isinstance(item, RecordWithImages):
            item = self.parse_record(record)
        prompt = _get_prompt(item.parsed)
        return [prompt, item.images] if prompt or item.images else None

    @property
    def example_settings(self) -> ExampleSettings:
        from dstrain.data.encoding.rendering import CUT_COLUMNS
        from dstrain.data.encoding.template_check import TEMPLATE_COLUMNS
        from dstrain.data.token_store import TokenColumns

        tokens = TokenColumns(self.token_columns, self.has_pairs, "prompt_length" if self.has_pairs else None)
        return replace(super().example_settings, tokens=tokens, counted=(*CUT_COLUMNS, *TEMPLATE_COLUMNS))

    def build_store(self, source: ConcatSource) -> TokenStore:
        """Return the source's examples, from the cache where they are in it. Raises DataError."""
        from dstrain.data.prepare import ImageRecordEncoder, RecordEncode, prepare

        policy, settings = policy_of(self.recipe), self.example_settings
        processor = self.model_source.vision_processor
        if processor is None:
            key = {**self.encode_key(), "tokenizer": tokenizer_fingerprint(self.tokenizer)}
            encode = RecordEncode(self.parse_record, self.encode_text_only)
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
        if dataset is None or split != "train":
            return dataset
        images, model = dataset.store.image_index, self.recipe.model
        if images is not None and not len(images) and model.freeze and not model.lora:
            check_trains_on_text(self.model_source.build_meta_model(), model)
        return dataset

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
        model, sequence = self.recipe.model, self.recipe.parallel.sequence
        reason = model_unsupported_reason(model, self.model_source.config, shares_prefixes, sequence)
        if reason is None and self.reference.recipe_key is not None:
            reason = reference_unsupported_reason(self.reference, shares_prefixes, sequence)
        return reason

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

    @cached_property
    def collator(self) -> Collator:
        """Makes the rows of batches, in the form that `packing` says."""
        processor = self.model_source.vision_processor
        return Collator(packing=self.packing, pad_token_id=self.tokenizer.pad_token_id, vision_processor=processor)

    @cached_property
    def prompts(self) -> Prompts:
        """What the model is asked, and its answers compared with, outside of training."""
        return Prompts(self)

    @property
    def reference(self) -> Reference:
        """The model whose outputs the loss reads, beside the one that is trained."""
        return Reference()

    @property
    def loss_inputs(self) -> LossInputs:
        return LossInputs(reference=self.reference, packing=lambda: self.packing)

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
    def has_own_tokenizer(self) -> bool:
        return type(self).tokenizer is not TextTask.tokenizer

    @property
    def loads_own_model(self) -> bool:
        """True where a subclass, in a user's file, makes the model in its own way."""
        return self.model_source.has_own_load or type(self).build_model is not TextTask.build_model

    def build_model(self) -> torch.nn.Module:
        return self.enable_packing(self.model_source.load(self.recipe.model))

    def enable_packing(self, model: torch.nn.Module) -> torch.nn.Module:
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


def _get_prompt(parsed: Any) -> Prompt | None:
    """Return what stands before the first answer of a parsed record, None where that asks nothing.

    The answers of a record have one prompt.
    """
    first = parsed[0] if isinstance(parsed, list) and parsed else parsed
    prompt = getattr(first, "prompt", None)
    if isinstance(first, Conversation):
        prompt = first.messages[: first.trained_turns[0]]
    if not isinstance(prompt, str) and all(message["role"] == "system" for message in prompt or ()):
        return None
    return prompt or None

"""Base class of tasks on text: records of files, tokens in a cache, a transformers model.

What reads data is imported where it is used: `dstrain plan` asks a task for its properties alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from dstrain.batch import Batch
from dstrain.config.schema import DatasetConfig, LoraConfig
from dstrain.data.formats.prompts import ParsedPrompt, get_prompt, read_prompt
from dstrain.data.sources.base import ConcatSource, Source
from dstrain.errors import RecipeError
from dstrain.models.checks.compatibility import ModelValidator, check_trains_on_text
from dstrain.models.checks.max_positions import check_length_dependent
from dstrain.models.checks.preflight import check_model
from dstrain.models.load import MISSING_MODEL, check_vocab_size
from dstrain.models.weights.check_files import check_weight_files
from dstrain.tasks.common.model_source import ModelSource, TrainingRecords
from dstrain.tasks.common.record_task import RecordTask
from dstrain.tasks.common.task import Checks, Export, GenerationMetrics, LossInputs, Split, has_dropout_disabled
from dstrain.tasks.data.text_data import TextData

if TYPE_CHECKING:
    import torch

    from dstrain.data.cache.build import ExampleSettings
    from dstrain.data.cache.token_store import TokenColumns, TokenizedDataset, TokenStore
    from dstrain.data.encoding.rendering import PlaceholderExpansion
    from dstrain.data.records import EncodeResult
    from dstrain.tasks.common.store_builder import StoreBuilder


@dataclass(frozen=True, kw_only=True)
class TextChecks(Checks):
    """Checks of the model, its files and its tokenizer."""

    task: TextTask

    def required_keys(self) -> None:
        from dstrain.data.cache.dataset import NO_TRAIN_DATA

        recipe = self.task.recipe
        faults = [MISSING_MODEL] * (not self.task.model_source.is_named)
        faults += [NO_TRAIN_DATA] * (not self.task.training_items)
        own = self.task.has_own_tokenizer or self.task.has_own_source_load
        if faults := faults or ([] if own else check_model(recipe)):
            raise RecipeError(faults)

    def run(self) -> None:
        model, source = self.task.recipe.model, self.task.model_source
        check_weight_files(model)
        check_vocab_size(model, source.config, len(self.task.tokenizer), source.is_multimodal)
        check_length_dependent(source.config, self.task.recipe, self.task.rows_per_sample)
        self.validator.check(source.build_meta_model())
        _ = self.task.packing  # raises where the recipe asks for batches that a model cannot take

    def device(self) -> None:
        self.task.model_source.check_attn_implementation()

    def warnings(self) -> Sequence[str]:
        from dstrain.data.encoding.prompts import describe_missing_end

        return [*self.validator.warnings, *describe_missing_end(self.task.tokenizer)]

    def info_messages(self) -> Sequence[str]:
        from dstrain.data.encoding.rendering import describe_missing_template

        packing = [message] if (message := self.task.packing.message) else []
        return [*self.validator.info_messages, *describe_missing_template(self.task.tokenizer), *packing]

    @cached_property
    def validator(self) -> ModelValidator:
        task = self.task
        return ModelValidator(task.recipe, task.modules_to_save, task.model_source.can_generate)


@dataclass(frozen=True)
class TextExport(Export):
    """Exports a folder that transformers loads, with its tokenizer or processor."""

    task: TextTask

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
class TextTask(TextData, RecordTask):
    """A task on records of text, with or without images, for a transformers model."""

    source_class: ClassVar[type[ModelSource]] = ModelSource
    checks_class: ClassVar[type[TextChecks]] = TextChecks
    export_class: ClassVar[type[TextExport]] = TextExport
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

        `images` expands the image placeholders of the records; None for a text-only model. A task
        whose encoder has a state gives a property instead that returns a new `SequentialEncoder`.
        """

    @abstractmethod
    def encode_key(self) -> dict[str, Any]:
        """Return everything that `encode` depends on, except the tokenizer or processor."""

    @abstractmethod
    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        """Yield the texts of a record, to train a tokenizer on."""

    @cached_property
    def model_source(self) -> ModelSource:
        """The model that the recipe names: its config, tokenizer, processor and class."""
        return self.source_class(
            recipe=self.recipe,
            records=TrainingRecords(self._open_training, self.iter_texts, self.texts_name, self.parse_record),
            disable_dropout=has_dropout_disabled(self),
            get_tokenizer=self._get_tokenizer if self.has_own_tokenizer else None,
        )

    @property
    def texts_name(self) -> str:
        """Name of `iter_texts` in the key of a trained tokenizer, with every option that the texts depend on."""
        return type(self).iter_texts.__qualname__

    def _open_training(self) -> ConcatSource:
        return self.open_sources(self.training_items)

    def _get_tokenizer(self) -> Any:
        return self.tokenizer

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, with a pad token and the recipe's chat template."""
        return self.model_source.recipe_tokenizer  # what `super().tokenizer` of a subclass asks for

    @property
    def has_own_tokenizer(self) -> bool:
        """True where a subclass, in a user's file, makes the tokenizer in its own way."""
        return type(self).tokenizer is not TextTask.tokenizer

    @property
    def loads_own_model(self) -> bool:
        """True where a subclass, in a user's file, makes the model in its own way."""
        return self.has_own_source_load or type(self).build_model is not TextTask.build_model

    @property
    def has_own_source_load(self) -> bool:
        """True where `source_class` loads in its own way: model.path may then mean anything."""
        return self.source_class.load is not ModelSource.load

    @cached_property
    def checks(self) -> TextChecks:
        return self.checks_class(parse_record=self.parse_record, task=self)

    @property
    def generation_metrics(self) -> GenerationMetrics | None:
        """Metrics of answers that the model generates in an evaluation; None: it generates none."""
        return None

    @property
    def export(self) -> TextExport:
        return self.export_class(self, self.modules_to_save)

    @property
    def _tokens(self) -> TokenColumns:
        from dstrain.data.cache.token_store import TokenColumns

        return TokenColumns(self.token_columns, self.has_pairs, "prompt_length" if self.has_pairs else None)

    @property
    def example_settings(self) -> ExampleSettings:
        from dstrain.data.encoding.conservation import LOST_COLUMNS
        from dstrain.data.encoding.tokenization import CUT_COLUMNS

        return replace(super().example_settings, counted=(*CUT_COLUMNS, *LOST_COLUMNS))

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

    def build_store(self, source: ConcatSource) -> TokenStore:
        """Return the source's examples, from the cache where they are in it. Raises DataError."""
        processor = self.model_source.vision_processor
        if processor is None:
            return self.store_builder.build(source, self.tokenizer)
        return self.store_builder.build_with_images(source, processor)

    @property
    def store_builder(self) -> StoreBuilder:
        """Builder of this task's token stores, with its `parse` and `encode`."""
        from dstrain.tasks.common.store_builder import StoreBuilder

        return StoreBuilder(
            recipe=self.recipe,
            parse=self.parse,
            parse_text_only=self._parse_text_only,
            encode=self.encode,
            key=self.encode_key(),
            settings=self.example_settings,
        )

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

    @property
    def loss_inputs(self) -> LossInputs:
        return LossInputs(packing=lambda: self.packing)

    def build_model(self) -> torch.nn.Module:
        return self.enable_packing(self.model_source.load(self.recipe.model))

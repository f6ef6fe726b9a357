"""What tasks on text share: a tokenizer, data files, and a cache of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.batch import Batch
from dstrain.cache_dir import cache_root
from dstrain.config.schema import DatasetConfig, ModelConfig, ProcessorConfig, TokenizerConfig
from dstrain.data.cache.build import compose_encode, prepare
from dstrain.data.cache.build_images import EncodeParsed, ImageRecordEncoder, encode_image_prompts
from dstrain.data.cache.dataset import NO_TRAIN_DATA, TokenizedDataset, get_source_sizes, split_examples
from dstrain.data.cache.token_store import TokenStore
from dstrain.data.encoding.chat_template import describe_missing_template, resolve_chat_template
from dstrain.data.encoding.prompts import EncodedPrompt, encode_prompts
from dstrain.data.encoding.train_tokenizer import load_or_train_tokenizer
from dstrain.data.fingerprint import tokenizer_fingerprint
from dstrain.data.formats.image_placeholders import RecordWithImages, has_images, read_with_images
from dstrain.data.formats.prompts import ParsedPrompt, read_prompt
from dstrain.data.records import BadRecord
from dstrain.data.sources.base import Source
from dstrain.data.sources.open import ConcatSource, HeadSource, open_source
from dstrain.data.vision.processor import VisionProcessor
from dstrain.data.vision.statistics import compute_image_stats
from dstrain.errors import DataError, Fault, RecipeError
from dstrain.launch.threads import count_available_cores
from dstrain.models.adapters.load import load_adapters
from dstrain.models.checks.compatibility import ModelValidator, check_trains_on_text
from dstrain.models.checks.preflight import check_model
from dstrain.models.folder.tokenizer_files import find_tokenizer_folder
from dstrain.models.load import (
    MISSING_MODEL,
    build_meta_model,
    check_vocab_size,
    enable_gradient_checkpointing,
    load_model,
    read_config,
    read_tokenizer,
)
from dstrain.models.padding import set_pad_token
from dstrain.models.processors import (
    build_processor,
    count_special_tokens,
    is_multimodal,
    read_processor,
    sync_config_with_processor,
)
from dstrain.models.weights.check_files import check_weight_files
from dstrain.tasks.common.bad_record_policy import policy_of
from dstrain.tasks.common.task import Split, Task

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """A task on records of text, learnt by a model of transformers."""

    auto_class_name: ClassVar[str] = "AutoModelForCausalLM"
    """The class of transformers that makes the model."""

    @abstractmethod
    def tokenize(self, source: ConcatSource) -> TokenStore:
        """The source's examples, from the cache where they are there. Raises DataError."""

    @abstractmethod
    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        """The texts of a record, to train a tokenizer on."""

    def parse_record(self, record: dict[str, Any]) -> Any:
        """Read one record, for `dstrain data check`, which looks at the images of a `Seen`. Raises BadRecord."""
        return list(self.iter_texts(record))

    def parse_with_images(
        self, record: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], Any]
    ) -> RecordWithImages[Any]:
        """What `read` makes of a record's text, and its images where the model sees. Raises BadRecord.

        Where no model is named yet, every record is taken for one that it can use.
        """
        known = self.recipe.model.path or self.recipe.model.config
        if not has_images(record):
            said = parse(record)  # what is wrong with it is told before the model is looked at
            return read_with_images(record, parse) if known and self.is_multimodal else RecordWithImages(said)
        if known and not self.is_multimodal:
            raise BadRecord("it holds an image, and the model sees none; name one that does, or remove the record")
        return read_with_images(record, parse)

    def build_store(
        self, source: ConcatSource, parse: Callable[..., Any], encode: EncodeParsed, key: dict[str, Any]
    ) -> TokenStore:
        """The examples that `encode` makes of what `read` reads, with the images of a model that sees. Raises DataError.

        `key` names all that `encode` depends on beside the tokenizer or the processor, and where relative paths start.
        """
        policy = policy_of(self.recipe)
        if self.vision_processor is None:
            full = {**key, "tokenizer": tokenizer_fingerprint(self.tokenizer)}
            said = lambda record: self.parse_with_images(record, parse).parsed  # noqa: E731
            return prepare(source, compose_encode(said, lambda items: encode(items, None)), full, policy)
        eyes = ImageRecordEncoder.create(self.vision_processor, count_available_cores())
        folders = [
            str(one.get_base_dir(0).resolve()) for one in source.sources if one
        ]  # the length may need to open it
        full = {**key, "processor": self.vision_processor.fingerprint, "folders": folders}
        return prepare(source, eyes.make_encode(source, parse, encode), full, policy)

    def encode_prompts(
        self, parsed: Sequence[RecordWithImages[ParsedPrompt]], folders: Sequence[Path], max_length: int | None = None
    ) -> list[EncodedPrompt | BadRecord]:
        """What records ask, as the model sees it; relative paths of images start from their record's folder."""
        if self.vision_processor is None:
            return encode_prompts(self.tokenizer, [one.parsed for one in parsed], max_length)
        return encode_image_prompts(self.vision_processor, parsed, folders, max_length)

    def with_images(self, batch: Batch, examples: Sequence[Mapping[str, Any]], repeats: int = 1) -> Batch:
        """The batch with its examples' images, whose rows come so many times one after another."""
        if self.vision_processor is None:
            return batch
        if "images" not in examples[0]:  # nor in any other
            return self.vision_processor.attach_no_images(batch)
        images = [
            self.augment_image(shown.load(), example, at)
            for example in examples
            for at, shown in enumerate(example["images"])
        ]
        return self.vision_processor.attach_images(batch, images * repeats)

    def augment_image(self, image: Image, example: Mapping[str, Any], index: int) -> Image:
        """The image as it is learnt from."""
        return image

    @property
    def can_generate(self) -> bool:
        """Whether its model writes answers, token by token."""
        return self.auto_class_name == "AutoModelForCausalLM"

    @cached_property
    def is_multimodal(self) -> bool:
        """Whether the model looks at images."""
        return is_multimodal(self.model_config)

    def parse_prompt(self, record: dict[str, Any]) -> RecordWithImages[ParsedPrompt]:
        """What a record asks, for a model that `answers`. Raises BadRecord."""
        return self.parse_with_images(record, read_prompt)

    def check_required_keys(self) -> None:
        model, train = self.recipe.model, self.recipe.data.train
        faults = [MISSING_MODEL] * (not (model.path or model.config)) + [NO_TRAIN_DATA] * (not train)
        own = any(getattr(type(self), name) is not getattr(TextTask, name) for name in ("load", "tokenizer"))
        if faults := faults or ([] if own else check_model(self.recipe)):
            raise RecipeError(faults)

    def check(self) -> None:
        model = self.recipe.model
        check_weight_files(model)
        check_vocab_size(model, self.model_config, len(self.tokenizer), self.is_multimodal)
        self.model_validator.check(build_meta_model(self.auto_class, model, self.build_config(model)))

    def warnings(self) -> Sequence[str]:
        return self.model_validator.warnings

    def info_messages(self) -> Sequence[str]:
        return [*self.model_validator.info_messages, *describe_missing_template(self.tokenizer)]

    @cached_property
    def model_validator(self) -> ModelValidator:
        return ModelValidator(self.recipe, self.heads, self.can_generate)

    @property
    def auto_class(self) -> Any:
        import transformers

        if self.is_multimodal and not self.can_generate:
            from dstrain.models.reward_model import AutoRewardModel

            return AutoRewardModel()
        if self.is_multimodal:
            return transformers.AutoModelForImageTextToText
        return getattr(transformers, self.auto_class_name)

    def build_config(self, model: ModelConfig) -> PretrainedConfig:
        """The model's config as the task needs it."""
        config = read_config(model)
        if model.config is not None:  # its defaults are another tokenizer's
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(self.tokenizer, name))
            if self.vision_processor is not None:
                sync_config_with_processor(config, self.vision_processor.hf_processor)
        return config

    def load(self, model: ModelConfig) -> torch.nn.Module:
        """The task's kind of model, as `model` says. Collective under ZeRO-3."""
        from dstrain.tasks.common.losses import disable_dropout_in_model

        made = load_model(self.auto_class, model, self.build_config(model), self.recipe.seed)
        if getattr(self, "disable_dropout", False):
            disable_dropout_in_model(made)
        if model.gradient_checkpointing:
            enable_gradient_checkpointing(made)
        return made

    def build_model(self) -> torch.nn.Module:
        return self.load(self.recipe.model)

    def reload(self, folder: Path) -> torch.nn.Module:
        if not (folder / "adapter_config.json").is_file():
            return self.auto_class.from_pretrained(str(folder))
        return load_adapters(self.load(self.recipe.model), folder)

    @cached_property
    def model_config(self) -> PretrainedConfig:
        """The model's config as it is on disk or in the recipe."""
        return read_config(self.recipe.model)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, with a pad token (`give_pad_token`)."""
        return (
            self._set_chat_template(self._base_tokenizer)
            if self.vision_processor is None
            else self.vision_processor.tokenizer
        )

    def _set_chat_template(self, tokenizer: Any, image_token: str = "") -> Any:
        """The tokenizer with the recipe's chat template, where it names one. Raises RecipeError."""
        wanted = self.recipe.model.chat_template
        if wanted is not None:
            tokenizer.chat_template = resolve_chat_template(wanted, tokenizer, image_token)
        return tokenizer

    @cached_property
    def vision_processor(self) -> VisionProcessor | None:
        """The processor of a model that sees images; None of another."""
        if not self.is_multimodal:
            return None
        model = self.recipe.model
        name = model.processor if isinstance(model.processor, str) else find_tokenizer_folder(model.path)
        if name is None:
            return self._wrap_processor(build_processor(self.model_config, self._base_tokenizer, *self._image_stats()))
        if model.tokenizer is not None:
            mend = "leave it out, or put it into the folder that model.processor names"
            raise RecipeError(Fault("model.tokenizer", "of a model that sees, the processor has the tokenizer", mend))
        key = "model.processor" if isinstance(model.processor, str) else "model.path"
        return self._wrap_processor(read_processor(name, key, model.trust_remote_code))

    def _wrap_processor(self, processor: Any) -> VisionProcessor:
        sight = VisionProcessor(processor)
        processor.chat_template = self._set_chat_template(processor.tokenizer, sight.image_token).chat_template
        return sight

    def _image_stats(self) -> tuple[list[float] | None, list[float] | None]:
        """Mean and deviation of the training images, where the recipe asks for them."""
        wanted = self.recipe.model.processor
        if not isinstance(wanted, ProcessorConfig) or wanted.normalize is None:
            return None, None
        return compute_image_stats(
            self.open_sources(self.recipe.data.train), self.parse_record, cache_root(), count_available_cores()
        )

    @cached_property
    def _base_tokenizer(self) -> Any:
        """The tokenizer, in a folder or trained; what a processor adds to it is not there yet."""
        model = self.recipe.model
        wanted = model.tokenizer
        if wanted is None and model.config is not None:
            size = getattr(self.model_config.get_text_config(), "vocab_size", 32000)
            size -= count_special_tokens(self.model_config) if self.is_multimodal else 0
            wanted = TokenizerConfig.model_construct(vocab_size=size)  # a size too small is refused below, by its name
        if isinstance(wanted, TokenizerConfig):
            source = self.open_sources(self.recipe.data.train)
            return load_or_train_tokenizer(source, self.iter_texts, wanted.vocab_size, cache_root(), wanted.alphabet)
        key = "model.path" if wanted is None else "model.tokenizer"
        tokenizer = read_tokenizer(wanted or find_tokenizer_folder(model.path) or "", key, model.trust_remote_code)
        set_pad_token(tokenizer, key)
        return tokenizer

    def examples(self, split: Split) -> TokenizedDataset | None:  # type: ignore[override]  # length and index are all that is asked
        data = self.recipe.data
        if split == "eval" and data.eval:
            source = self.open_sources([data.eval])
            held_out = self.tokenize(source)
            return split_examples(held_out, get_source_sizes(held_out, source), (1.0,), 0.0, 0)[0]
        if split == "eval" and not data.eval_fraction:
            return None
        if not data.train:
            raise DataError(NO_TRAIN_DATA)
        source = self.open_sources(data.train)
        weights = tuple(item.weight for item in data.train)
        store = self.tokenize(source)
        if store.image_index is not None and not len(store.image_index):
            self._check_trains_on_text()
        train, test = split_examples(
            store, get_source_sizes(store, source), weights, data.eval_fraction, self.recipe.seed
        )
        return train if split == "train" else test

    def _check_trains_on_text(self) -> None:
        """Raise DataError where only what looks at images learns: it takes no part where none is."""
        model = self.recipe.model
        if model.freeze and not model.lora:
            check_trains_on_text(build_meta_model(self.auto_class, model, self.build_config(model)), model)

    def save_extras(self, folder: Path) -> None:
        (self.tokenizer if self.vision_processor is None else self.vision_processor.hf_processor).save_pretrained(
            str(folder)
        )

    def wrap_source(self, source: Source, item: DatasetConfig) -> Source:
        """The source as the task reads it; a training source is a SourceConfig."""
        return source

    def open_sources(self, items: Sequence[DatasetConfig]) -> ConcatSource:
        data = self.recipe.data
        files = [self.wrap_source(open_source(item, data.columns), item) for item in items]
        return ConcatSource([HeadSource(file, data.max_samples) for file in files] if data.max_samples else files)

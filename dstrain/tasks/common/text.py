"""What tasks on text share: a tokenizer, data files, and a cache of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.batch import Batch
from dstrain.config.schema import HeldOutConfig, ModelConfig, ProcessorConfig, TokenizerConfig
from dstrain.data.cache.build import prepare, read_each, tokenizer_fingerprint
from dstrain.data.cache.build_images import EncodeSeen, Eyes, look_at_prompts
from dstrain.data.cache.dataset import NO_DATA, Examples, source_sizes, split_examples
from dstrain.data.cache.token_store import TokenStore, cache_root
from dstrain.data.encoding.chat_template import read_template
from dstrain.data.encoding.default_template import describe_untemplated
from dstrain.data.encoding.train_tokenizer import trained_tokenizer
from dstrain.data.formats.image_placeholders import Seen, has_images, read_seen
from dstrain.data.formats.messages import BadRecord
from dstrain.data.formats.prompts import Asked, Prompt, encode_prompts, read_prompt
from dstrain.data.sources.open import First, Joined, Source, open_source
from dstrain.data.vision.processor import Sight
from dstrain.data.vision.statistics import image_colours
from dstrain.errors import DataError, Fault, RecipeError
from dstrain.launch.threads import cores_here
from dstrain.models.adapters.folder import load_adapters
from dstrain.models.checks.compatibility import Fit, check_text_teaches
from dstrain.models.checks.preflight import check_model, tokenizer_folder
from dstrain.models.load import (
    NO_MODEL,
    check_vocabulary,
    load_model,
    read_config,
    read_tokenizer,
    skeleton,
    switch_on_checkpointing,
)
from dstrain.models.padding import give_pad_token
from dstrain.models.processors import fit_config, make_processor, read_processor, sees, special_tokens
from dstrain.models.weights.check_files import check_weights
from dstrain.tasks.common.bad_record_policy import policy_of
from dstrain.tasks.common.task import Split, Task

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class TextTask(Task):
    """A task on records of text, learnt by a model of transformers."""

    auto: ClassVar[str] = "AutoModelForCausalLM"
    """The class of transformers that makes the model."""

    @abstractmethod
    def tokens(self, source: Joined) -> TokenStore:
        """The source's examples, from the cache where they are there. Raises DataError."""

    @abstractmethod
    def texts(self, record: dict[str, Any]) -> Iterator[str]:
        """The texts of a record, to train a tokenizer on."""

    def convert(self, record: dict[str, Any]) -> Any:
        """Read one record, for `dstrain data check`, which looks at the images of a `Seen`. Raises BadRecord."""
        return list(self.texts(record))

    def read(self, record: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Any]) -> Seen[Any]:
        """What `read` makes of a record's text, and its images where the model sees. Raises BadRecord.

        Where no model is named yet, every record is taken for one that it can use.
        """
        known = self.recipe.model.path or self.recipe.model.config
        if not has_images(record):
            said = read(record)  # what is wrong with it is told before the model is looked at
            return read_seen(record, read) if known and self.sees else Seen(said)
        if known and not self.sees:
            raise BadRecord("it holds an image, and the model sees none; name one that does, or remove the record")
        return read_seen(record, read)

    def store(self, source: Joined, read: Callable[..., Any], encode: EncodeSeen, key: dict[str, Any]) -> TokenStore:
        """The examples that `encode` makes of what `read` reads, with the images of a model that sees. Raises DataError.

        `key` names all that `encode` depends on beside the tokenizer or the processor, and where relative paths start.
        """
        policy = policy_of(self.recipe)
        if self.sight is None:
            full = {**key, "tokenizer": tokenizer_fingerprint(self.tokenizer)}
            said = lambda record: self.read(record, read).said  # noqa: E731
            return prepare(source, read_each(said, lambda items: encode(items, None)), full, policy)
        eyes = Eyes.with_album(self.sight, cores_here())
        folders = [str(one.folder_of(0).resolve()) for one in source.sources if one]  # the length may need to open it
        full = {**key, "processor": self.sight.fingerprint, "folders": folders}
        return prepare(source, eyes.encoder(source, read, encode), full, policy)

    def prompts(
        self, asked: Sequence[Seen[Asked]], folders: Sequence[Path], limit: int | None = None
    ) -> list[Prompt | BadRecord]:
        """What records ask, as the model sees it; relative paths of images start from their record's folder."""
        if self.sight is None:
            return encode_prompts(self.tokenizer, [one.said for one in asked], limit)
        return look_at_prompts(self.sight, asked, folders, limit)

    def with_images(self, batch: Batch, examples: Sequence[Mapping[str, Any]], times: int = 1) -> Batch:
        """The batch with its examples' images, whose rows come so many times one after another."""
        if self.sight is None:
            return batch
        if "images" not in examples[0]:  # nor in any other
            return self.sight.without_images(batch)
        images = [
            self.alter(shown.load(), example, at) for example in examples for at, shown in enumerate(example["images"])
        ]
        return self.sight.into(batch, images * times)

    def alter(self, image: Image, example: Mapping[str, Any], which: int) -> Image:
        """The image as it is learnt from."""
        return image

    @property
    def answers(self) -> bool:
        """Whether its model writes answers, token by token."""
        return self.auto == "AutoModelForCausalLM"

    @cached_property
    def sees(self) -> bool:
        """Whether the model looks at images."""
        return sees(self.model_config)

    def prompt(self, record: dict[str, Any]) -> Seen[Asked]:
        """What a record asks, for a model that `answers`. Raises BadRecord."""
        return self.read(record, read_prompt)

    def check_named(self) -> None:
        model, train = self.recipe.model, self.recipe.data.train
        faults = [NO_MODEL] * (not (model.path or model.config)) + [NO_DATA] * (not train)
        own = any(getattr(type(self), name) is not getattr(TextTask, name) for name in ("load", "tokenizer"))
        if faults := faults or ([] if own else check_model(self.recipe)):
            raise RecipeError(faults)

    def check(self) -> None:
        model = self.recipe.model
        check_weights(model)
        check_vocabulary(model, self.model_config, len(self.tokenizer), self.sees)
        self.fit.check(skeleton(self.auto_class, model, self.config_for(model)))

    def warnings(self) -> Sequence[str]:
        return self.fit.surprises

    def notices(self) -> Sequence[str]:
        return [*self.fit.notices, *describe_untemplated(self.tokenizer)]

    @cached_property
    def fit(self) -> Fit:
        return Fit(self.recipe, self.heads, self.answers)

    @property
    def auto_class(self) -> Any:
        import transformers

        if self.sees and not self.answers:
            from dstrain.models.reward_model import ScoredAuto

            return ScoredAuto()
        if self.sees:
            return transformers.AutoModelForImageTextToText
        return getattr(transformers, self.auto)

    def config_for(self, model: ModelConfig) -> PretrainedConfig:
        """The model's config as the task needs it."""
        config = read_config(model)
        if model.config is not None:  # its defaults are another tokenizer's
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(self.tokenizer, name))
            if self.sight is not None:
                fit_config(config, self.sight.processor)
        return config

    def load(self, model: ModelConfig) -> torch.nn.Module:
        """The task's kind of model, as `model` says. Collective under ZeRO-3."""
        from dstrain.tasks.common.losses import switch_off_dropout

        made = load_model(self.auto_class, model, self.config_for(model), self.recipe.seed)
        if getattr(self, "disable_dropout", False):
            switch_off_dropout(made)
        if model.gradient_checkpointing:
            switch_on_checkpointing(made)
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
        return self._with_template(self._words) if self.sight is None else self.sight.tokenizer

    def _with_template(self, tokenizer: Any, image: str = "") -> Any:
        """The tokenizer with the recipe's chat template, where it names one. Raises RecipeError."""
        wanted = self.recipe.model.chat_template
        if wanted is not None:
            tokenizer.chat_template = read_template(wanted, tokenizer, image)
        return tokenizer

    @cached_property
    def sight(self) -> Sight | None:
        """The processor of a model that sees images; None of another."""
        if not self.sees:
            return None
        model = self.recipe.model
        name = model.processor if isinstance(model.processor, str) else tokenizer_folder(model.path)
        if name is None:
            return self._sight_of(make_processor(self.model_config, self._words, *self._colours()))
        if model.tokenizer is not None:
            mend = "leave it out, or put it into the folder that model.processor names"
            raise RecipeError(Fault("model.tokenizer", "of a model that sees, the processor has the tokenizer", mend))
        key = "model.processor" if isinstance(model.processor, str) else "model.path"
        return self._sight_of(read_processor(name, key, model.trust_remote_code))

    def _sight_of(self, processor: Any) -> Sight:
        sight = Sight(processor)
        processor.chat_template = self._with_template(processor.tokenizer, sight.mark).chat_template
        return sight

    def _colours(self) -> tuple[list[float] | None, list[float] | None]:
        """Mean and deviation of the training images, where the recipe asks for them."""
        wanted = self.recipe.model.processor
        if not isinstance(wanted, ProcessorConfig) or wanted.normalize is None:
            return None, None
        return image_colours(self.source(self.recipe.data.train), self.convert, cache_root(), cores_here())

    @cached_property
    def _words(self) -> Any:
        """The tokenizer, in a folder or trained; what a processor adds to it is not there yet."""
        model = self.recipe.model
        wanted = model.tokenizer
        if wanted is None and model.config is not None:
            size = getattr(self.model_config.get_text_config(), "vocab_size", 32000)
            size -= special_tokens(self.model_config) if self.sees else 0
            wanted = TokenizerConfig.model_construct(vocab_size=size)  # a size too small is refused below, by its name
        if isinstance(wanted, TokenizerConfig):
            source = self.source(self.recipe.data.train)
            return trained_tokenizer(source, self.texts, wanted.vocab_size, cache_root(), wanted.alphabet)
        key = "model.path" if wanted is None else "model.tokenizer"
        tokenizer = read_tokenizer(wanted or tokenizer_folder(model.path) or "", key, model.trust_remote_code)
        give_pad_token(tokenizer, key)
        return tokenizer

    def examples(self, split: Split) -> Examples | None:  # type: ignore[override]  # length and index are all that is asked
        data = self.recipe.data
        if split == "eval" and data.eval:
            source = self.source([data.eval])
            held_out = self.tokens(source)
            return split_examples(held_out, source_sizes(held_out, source), (1.0,), 0.0, 0)[0]
        if split == "eval" and not data.eval_fraction:
            return None
        if not data.train:
            raise DataError(NO_DATA)
        source = self.source(data.train)
        weights = tuple(item.weight for item in data.train)
        store = self.tokens(source)
        if store.album is not None and not len(store.album):
            self._check_text_teaches()
        train, test = split_examples(store, source_sizes(store, source), weights, data.eval_fraction, self.recipe.seed)
        return train if split == "train" else test

    def _check_text_teaches(self) -> None:
        """Raise DataError where only what looks at images learns: it takes no part where none is."""
        model = self.recipe.model
        if model.freeze and not model.lora:
            check_text_teaches(skeleton(self.auto_class, model, self.config_for(model)), model)

    def save_extras(self, folder: Path) -> None:
        (self.tokenizer if self.sight is None else self.sight.processor).save_pretrained(str(folder))

    def prepared(self, source: Source, item: HeldOutConfig) -> Source:
        """The source as the task reads it; a training source is a SourceConfig."""
        return source

    def source(self, items: Sequence[HeldOutConfig]) -> Joined:
        data = self.recipe.data
        files = [self.prepared(open_source(item, data.columns), item) for item in items]
        return Joined([First(file, data.max_samples) for file in files] if data.max_samples else files)

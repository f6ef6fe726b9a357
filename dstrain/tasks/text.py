"""What tasks on text share: a tokenizer, data files, and a cache of tokens."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.config.schema import HeldOutConfig, ModelConfig, TokenizerConfig
from dstrain.data.examples import Examples, split_examples
from dstrain.data.prompts import Asked, read_prompt
from dstrain.data.source import First, Joined, open_source
from dstrain.data.store import TokenStore, cache_root
from dstrain.data.tokenizer import trained_tokenizer
from dstrain.errors import DataError, Fault, RecipeError
from dstrain.models.freeze import check_parts
from dstrain.models.init import check_init
from dstrain.models.load import (
    check_weights,
    load_model,
    read_config,
    read_tokenizer,
    skeleton,
    switch_on_checkpointing,
)
from dstrain.tasks.base import Split, Task

if TYPE_CHECKING:
    import torch
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
        """Read one record. Raises BadRecord; `dstrain data check` calls it for every record."""
        return list(self.texts(record))

    @property
    def answers(self) -> bool:
        """Whether its model writes answers, token by token."""
        return self.auto == "AutoModelForCausalLM"

    def prompt(self, record: dict[str, Any]) -> Asked:
        """What a record asks, for a model that `answers`. Raises BadRecord."""
        return read_prompt(record)

    def check(self) -> None:
        model = self.recipe.model
        check_weights(model)
        size = getattr(self.model_config, "vocab_size", None)
        if size is not None and len(self.tokenizer) > size:
            where = "model.config.vocab_size" if model.config else "model.tokenizer"
            raise RecipeError(
                Fault(
                    where,
                    f"the tokenizer has {len(self.tokenizer)} entries, the model {size}",
                    "give the model at least as many",
                )
            )
        bones = skeleton(self.auto_class, model, self.config_for(model))
        check_parts(bones, self.recipe)
        if model.init is not None:
            check_init(bones, model.init)

    @property
    def auto_class(self) -> Any:
        import transformers

        return getattr(transformers, self.auto)

    def config_for(self, model: ModelConfig) -> PretrainedConfig:
        """The model's config as the task needs it."""
        config = read_config(model)
        if model.config is not None:  # its defaults are another tokenizer's
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                setattr(config, name, getattr(self.tokenizer, name))
        return config

    def load(self, model: ModelConfig) -> torch.nn.Module:
        """The task's kind of model, as `model` says. Collective under ZeRO-3."""
        from dstrain.tasks.ops import switch_off_dropout

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
        from peft import PeftModel

        return PeftModel.from_pretrained(self.load(self.recipe.model), str(folder))

    @cached_property
    def model_config(self) -> PretrainedConfig:
        """The model's config as it is on disk or in the recipe."""
        return read_config(self.recipe.model)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer; one without a pad token pads with its EOS."""
        model = self.recipe.model
        wanted = model.tokenizer
        if wanted is None and model.config is not None:
            size = getattr(self.model_config, "vocab_size", 32000)
            wanted = TokenizerConfig.model_construct(vocab_size=size)  # a size too small is refused below, by its name
        if isinstance(wanted, TokenizerConfig):
            source = self._source(self.recipe.data.train)
            return trained_tokenizer(source, self.texts, wanted.vocab_size, cache_root())
        key = "model.path" if wanted is None else "model.tokenizer"
        tokenizer = read_tokenizer(wanted or model.path or "", key, model.trust_remote_code)
        if tokenizer.pad_token is None:
            if tokenizer.eos_token is None:
                raise RecipeError(
                    Fault(key, "the tokenizer has neither a pad nor an EOS token", "add one and save it again")
                )
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def examples(self, split: Split) -> Examples | None:  # type: ignore[override]  # length and index are all that is asked
        data = self.recipe.data
        if split == "eval" and data.eval:
            source = self._source([data.eval])
            return split_examples(self.tokens(source), source.sizes, (1.0,), 0.0, 0)[0]
        if split == "eval" and not data.eval_fraction:
            return None
        if not data.train:
            raise DataError(Fault("data.train", "names no file", "write `data: {train: pairs.jsonl}`"))
        source = self._source(data.train)
        weights = tuple(item.weight for item in data.train)
        train, test = split_examples(self.tokens(source), source.sizes, weights, data.eval_fraction, self.recipe.seed)
        return train if split == "train" else test

    def save_extras(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(str(folder))

    def _source(self, items: Sequence[HeldOutConfig]) -> Joined:
        data = self.recipe.data
        files = [open_source(item, data.columns) for item in items]
        return Joined([First(file, data.max_samples) for file in files] if data.max_samples else files)


def tiny_recipe(folder: Path, task: str, record: Callable[[str, int], dict[str, Any]]) -> dict[str, Any]:
    """A recipe of seconds, with its data written into the folder: record(split, index) for each."""
    for name, count in (("train", 64), ("eval", 16)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record(name, i)) + "\n" for i in range(count)))
    return {
        "task": task,
        "model": {
            "config": {
                "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            }
        },
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 48},
        "batch": {"total": 4, "micro": 2},
        "optim": {"lr": 1e-3},
        "steps": 4,
        "log": {"every": 1, "tensorboard": False},
        "ds_config": "zero2",
    }  # fmt: skip

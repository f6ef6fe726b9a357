"""Frozen reward models, in folders that `dstrain export` wrote, that score the pairs of another task."""

# Shapes: B pairs, L tokens; a batch of a task on pairs has 2B rows, the chosen answers first.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch
from dstrain.config.schema import DatasetConfig, EvalConfig, ModelConfig
from dstrain.data.dataset import Dataset
from dstrain.errors import MAX_NAMES, DataError, Fault, RecipeError
from dstrain.tasks.common.judge import ExportedRewardModel
from dstrain.tasks.common.pairs import PairTask
from dstrain.tasks.common.task import Scorer, Split
from dstrain.tasks.common.text import TextTask
from dstrain.tasks.rm import SCORE_POSITIONS, RewardModel
from dstrain.tasks.safety.options import HEADS, SafetyOptions

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dstrain.data.sources.base import ConcatSource
    from dstrain.data.token_store import TokenStore

SIDES = ("chosen", "rejected")


def cached_scores(examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Return the precomputed scores in the examples, (B,) float32 each; empty where there are none."""
    import torch

    names = [f"{name}_{side}" for name in HEADS for side in SIDES]
    return {
        name: torch.tensor([example[name] for example in examples], dtype=torch.float32)
        for name in names
        if name in examples[0]
    }


@dataclass(frozen=True, kw_only=True)
class FrozenRewardModel(ExportedRewardModel):
    """The export of a reward model, which scores both answers of each pair of `policy`'s data.

    Cached, it reads the records in its own encoding, with the policy's limits on lengths; online, the policy's batches.
    """

    name: str
    """One of HEADS."""
    is_cached: bool
    policy: PairTask

    @property
    def key(self) -> str:
        return f"options.safety.{self.name}_rm"

    @cached_property
    def task(self) -> RewardModel:
        """Task rm on the policy's data, with the folder as its model."""
        recipe = self.policy.recipe
        model = ModelConfig(
            path=self.folder,
            dtype=recipe.model.dtype,
            attn_implementation=recipe.model.attn_implementation,
            trust_remote_code=recipe.model.trust_remote_code,
            gradient_checkpointing=False,
        )
        # Records that it cannot score are reported by `prepare`, with the policy's samples that they would leave out.
        data = recipe.data.model_copy(update={"on_error": "skip"})
        batch = recipe.batch
        if self.is_cached and batch.packing:  # its own batches are packed where it can read them
            batch = batch.model_copy(update={"packing": "auto", "prefix_sharing": "auto"})
        own = {"task": "rm", "options": {}, "model": model, "data": data, "batch": batch, "eval": EvalConfig()}
        return RewardModel(recipe=recipe.model_copy(update=own))

    def to_scorer(self) -> Scorer:
        return Scorer(
            name=self.name,
            recipe_key=self.key,
            is_cached=self.is_cached,
            task=self.task,
            config=self.task.recipe.model,
            build=self.task.build_model,
            outputs=self.outputs,
            prepare=self.prepare,
        )

    @cached_property
    def checked_task(self) -> RewardModel:
        """The task, after the checks of the model and its files that need torch. Raises RecipeError."""
        self.check_model()
        if not self.is_cached and input_fingerprint(self.task) != input_fingerprint(self.policy):
            problem = "the tokenizer, chat template or processor of the reward model is not the policy's"
            fix = "set options.safety.scoring: cached, which encodes the records for each reward model"
            raise RecipeError(Fault(self.key, problem, fix))
        return self.task

    def prepare(self, dataset: Dataset, split: Split) -> Dataset:
        """Check the model, and return the dataset with its records as the model reads them, if it is cached.

        Raises RecipeError for a model that cannot be used, DataError for samples that it cannot score.
        """
        from dstrain.data.prepare import align_store
        from dstrain.data.token_store import TokenizedDataset

        task = self.checked_task
        if not isinstance(dataset, TokenizedDataset):
            raise DataError(f"{self.key}: reward models score samples of a token store, not a {type(dataset).__name__}")
        has_images = dataset.store.image_index is not None and len(dataset.store.image_index) > 0
        if has_images and not task.model_source.is_multimodal:
            problem = "is a text-only reward model, and the records have images"
            fix = "train one on a vision-language model with the same kind of records"
            raise RecipeError(Fault(self.key, problem, fix))
        if not self.is_cached:
            return dataset
        source = task.open_sources(self._sources(split))
        try:
            store = task.build_store(source)
        except DataError as error:
            raise DataError(f"{self.key}: {error}") from error
        aligned, missing = align_store(dataset.store, store)
        if len(missing):
            raise DataError(self._describe_missing(missing, source, store))
        return replace(dataset, aligned_stores={**dataset.aligned_stores, self.name: aligned})

    def _sources(self, split: Split) -> Sequence[DatasetConfig]:
        data = self.policy.recipe.data
        return [data.eval] if split == "eval" and data.eval else data.train

    def _describe_missing(self, missing: np.ndarray, source: ConcatSource, store: TokenStore) -> str:
        reasons = dict(store.report.bad)
        named = [source.location(int(index)) for index in missing[:MAX_NAMES]]
        lines = [f"  {where}: {reasons.get(where, 'its encoding has no such sample')}" for where in named]
        lines += [f"  and {len(missing) - MAX_NAMES} more"] if len(missing) > MAX_NAMES else []
        told = f"{self.key}: the reward model cannot score {len(missing)} pairs that the policy is trained on:"
        return "\n".join([told, *lines, "remove these records, or raise data.max_length or data.max_prompt_length"])

    @property
    def positions_name(self) -> str:
        """Name of the tensor in the policy's packed batches that says where the scores are read."""
        return f"{self.name}_{SCORE_POSITIONS}"

    def packing_unsupported_reason(self, shares_prefixes: bool) -> str | None:
        """Return why the model cannot read the policy's batches if they are packed, or None."""
        try:
            reason = self.task.packing_unsupported_reason(shares_prefixes)
        except RecipeError:
            # A trained policy is used without its reward models, whose folders may be gone; a run names them.
            reason = "its config cannot be read"
        return f"of {self.key}: {reason}" if reason else None

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the scores of the chosen and of the rejected answers, (B,) each."""
        scores = self.task.scores(model, batch if self.is_cached else self._with_own_ends(batch))
        return {f"{self.name}_{side}": column for side, column in zip(SIDES, scores.chunk(2), strict=True)}

    def _with_own_ends(self, batch: Batch) -> Batch:
        """Return the policy's batch with the model's pad token: scores are read at the last token before it."""
        if batch.is_packed:
            return batch.with_tensors({SCORE_POSITIONS: batch.tensors[self.positions_name]})
        pad, ids = self.task.tokenizer.pad_token_id, batch.tensors["input_ids"]  # (2B + dummy rows, L)
        if pad == self.policy.tokenizer.pad_token_id:
            return batch
        return batch.with_tensors({"input_ids": ids.masked_fill(batch.tensors["attention_mask"] == 0, pad)})


def input_fingerprint(task: TextTask) -> str:
    """Return a hash of tokenizer, chat template and processor; the pad token, which changes no token, is left out."""
    from dstrain.data.encoding.chat_template import tokenizer_fingerprint

    processor = task.model_source.vision_processor
    if processor is not None:
        return processor.compute_fingerprint(with_pad_token=False)
    return tokenizer_fingerprint(task.tokenizer, with_pad_token=False)


def make_reward_models(policy: PairTask, options: SafetyOptions) -> tuple[FrozenRewardModel, ...]:
    """Return the reward models that the options name, which score the policy's pairs."""
    folders = {name: getattr(options, f"{name}_rm") for name in HEADS}
    return tuple(
        FrozenRewardModel(name=name, folder=folder, is_cached=options.scoring == "cached", policy=policy)
        for name, folder in folders.items()
        if folder
    )

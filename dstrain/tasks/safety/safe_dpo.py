"""DPO with safety labels or scores: SafeDPO, MM-DPO and mDPO. Records, batches, corrupted images, losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch
from dstrain.data.dataset import Dataset
from dstrain.data.formats.preferences import SAFETY_KEYS, Preference, to_chosen_rejected
from dstrain.data.rng import CORRUPTION_STREAM, make_random_state
from dstrain.errors import BadRecord, DataError, Fault, RecipeError, suggest_name
from dstrain.tasks.common.pairs import PairChecks, pair_metrics
from dstrain.tasks.common.task import Loss, LossInputs, Split
from dstrain.tasks.dpo import DPO
from dstrain.tasks.safety.options import (
    HARMLESS_COLUMNS,
    HELPFUL_COLUMNS,
    LABEL_COLUMNS,
    MIN_CROP_AREA,
    PairOrder,
    SafetyOptions,
    order_pairs,
)
from dstrain.tasks.safety.reward_models import FrozenRewardModel, cached_scores, make_reward_models

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image

    from dstrain.data.loading.rows import PackedRows, PaddedRows
    from dstrain.data.token_store import TokenizedDataset


# Shapes: N examples of a split.


def column_names(options: SafetyOptions) -> tuple[str, ...]:
    """Return the columns that order the pairs before a step; empty where scores are computed in the step."""
    if options.scores_pairs and options.scoring == "online":
        return ()
    harmless = HARMLESS_COLUMNS if options.harmless_rm else LABEL_COLUMNS
    return (*harmless, *(HELPFUL_COLUMNS if options.helpful_rm else ()))


def order_dataset(dataset: TokenizedDataset, options: SafetyOptions, split: Split) -> TokenizedDataset:
    """Return the dataset with the numbers of reordered and dropped pairs in its report, if its pairs are reordered.

    Training data lose the pairs of two unsafe answers. Held-out data keep them, with weight 0 in the loss. Raises
    DataError where no pair has a safe answer, or none of a source of training data.
    """
    names = column_names(options)
    if options.method == "none" or not names:
        return dataset
    order = order_pairs({name: dataset.column(name) for name in names}, options.harmless_threshold)
    if not order.keep.any():
        raise DataError(_describe_unsafe(f"{len(dataset)} pairs", options, split, dataset))
    reordered, dropped = int(order.swap.sum()), int((~order.keep).sum())
    left_out = "dropped" if split == "train" else "left out of the loss"
    selection = f"{reordered} pairs reordered, {dropped} of two unsafe answers {left_out}"
    counts: dict[str, int | str] = {"pairs_reordered": reordered, "pairs_dropped": dropped, "selection": selection}
    if 2 * dropped > len(dataset):
        counts["selection_warning"] = (
            f"{len(dataset) - dropped} of {len(dataset)} pairs of the {'training' if split == 'train' else 'held-out'} data "
            f"are left, since the others have two unsafe answers{_describe_scores(dataset, options)}"
        )
    kept = dataset.select(order.keep) if split == "train" else dataset
    for number, (before, after) in enumerate(zip(dataset.sizes, kept.sizes, strict=True), 1):
        if before and not after:
            raise DataError(_describe_unsafe(f"{before} pairs of source {number}", options, split, dataset))
    return replace(kept, counts=counts)


SCORE_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def _describe_scores(dataset: TokenizedDataset, options: SafetyOptions) -> str:
    """Return the threshold and quantiles of the harmless scores, to choose another one; empty for labels."""
    import numpy as np

    if not options.harmless_rm:
        return ""
    scores = np.concatenate([dataset.column(name) for name in HARMLESS_COLUMNS])
    values = np.quantile(scores[np.isfinite(scores)], SCORE_QUANTILES)
    quantiles = ", ".join(f"{share:.0%} {value:.3g}" for share, value in zip(SCORE_QUANTILES, values, strict=True))
    threshold = f"options.safety.harmless_threshold {options.harmless_threshold:g}"
    return f" by {threshold}; quantiles of the scores: {quantiles}"


def _describe_unsafe(pairs: str, options: SafetyOptions, split: Split, dataset: TokenizedDataset) -> str:
    remedy = ", remove the source" if "source" in pairs else ""
    if options.harmless_rm:
        threshold = f"{options.harmless_threshold:g}"
        scores = [dataset.column(name) for name in HARMLESS_COLUMNS]
        low, high = min(float(one.min()) for one in scores), max(float(one.max()) for one in scores)
        return (
            f"data.{split}: no answer of its {pairs} has a harmless score of at least {threshold}, and all scores are "
            f"from {low:.3g} to {high:.3g}; "
            f"lower options.safety.harmless_threshold{remedy}"
        )
    return (
        f"data.{split}: both answers of all {pairs} are labelled unsafe; correct the labels{remedy}, "
        "or write options.safety.method: none"
    )


# Shapes of images: W width, H height.


CORRUPTION_VERSION = 1
"""Increase it when the same seed and sample give another image, so that cached reference outputs are ignored."""


def corrupt_image(image: Image, key: Sequence[int], max_area: float) -> Image:
    """Return a random part of the image in the image's own size, so that it has as many image tokens.

    mDPO, Wang et al. (arXiv 2406.11839), crops to at most 20 %. As in the authors' code (luka-group/mDPO, `crop_images`
    of modeling_bunny_phi.py: torchvision's RandomResizedCrop, scale 0.01 to 0.2) the share of the area is uniform from
    0.01 to `max_area`, and the place is uniform. Theirs draws an aspect ratio from 3/4 to 4/3, and a new crop in each
    step, of the processed pixels; this one keeps the ratio of the image, and `key` (seed, sample, number of the image)
    fixes it, so a cached reference sees the same image as the policy.
    """
    from PIL.Image import Resampling

    seed, sample, number = key
    share, left, top = make_random_state((seed, CORRUPTION_STREAM, sample, number)).random_sample(3)
    side = math.sqrt(MIN_CROP_AREA + share * (max_area - MIN_CROP_AREA))
    width, height = (max(1, round(side * length)) for length in image.size)
    x, y = int(left * (image.width - width + 1)), int(top * (image.height - height + 1))
    return image.resize(image.size, Resampling.BICUBIC, box=(x, y, x + width, y + height))


# Shapes: B pairs.


Examples = Sequence[Mapping[str, Any]]


def order_examples(examples: Examples, options: SafetyOptions) -> PairOrder | None:
    """Return the order of the pairs; None where it is the data's, or is not known before the step."""
    names = column_names(options)
    if options.method == "none" or not names or any(name not in examples[0] for name in names):
        return None
    import numpy as np

    columns = {name: np.array([example[name] for example in examples]) for name in names}
    return order_pairs(columns, options.harmless_threshold)


def pairs_with_images(examples: Examples) -> list[int]:
    """Return the positions in the batch of the pairs that have images."""
    return [index for index, example in enumerate(examples) if example.get("images")]


# Shapes: B pairs, B' of them with a corrupted image, K targets.


@dataclass(frozen=True, kw_only=True)
class SafeDPOChecks(PairChecks):
    """The checks of a task on pairs, of the reward models, and of images to corrupt."""

    task: SafeDPO

    def reference(self) -> None:
        super().reference()
        for model in self.task.reward_models:
            model.check_files()

    def run(self) -> None:
        super().run()
        source = self.task.model_source
        if self.task.shows_corrupted and not source.is_multimodal:
            problem = f"compares images, and {source.config.model_type} is a text-only model"
            fix = "leave it out, or name a vision-language model (LLaVA, Gemma 3, Idefics 3, Qwen2.5-VL …)"
            raise RecipeError(Fault("options.safety.image_weight", problem, fix))


@dataclass(frozen=True, kw_only=True)
class SafeDPO(DPO):
    """DPO where `safety` is set: SafeDPO, MM-DPO and mDPO, see `dstrain.tasks.safety.pair_loss`.

    Rows of a batch: B prompts with the data's chosen answers, B with the rejected ones, and B' preferred answers
    of pairs with images, whose images are corrupted. Labels and scores reorder pairs in the loss, not in the batch.
    """

    packs_batches = True

    safety: SafetyOptions = field(default_factory=SafetyOptions)
    """Safety-aware DPO: a block of options. An empty one, safety: {}, logs the safety metrics of the data's labels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        options = self.safety
        if options.method != "none" and options.scores_pairs and options.image_weight and self.precompute_ref_log_probs:
            raise ValueError(
                "precompute_ref_log_probs does not know which answer reward models prefer, and safety.image_weight "
                "needs its log-probs; leave out one of them, or label the data"
            )
        if options.changes_loss:
            others = {"loss_type": self.loss_type != "sigmoid", "label_smoothing": self.label_smoothing, "rpo_alpha": self.rpo_alpha}  # fmt: skip
            if wrong := [name for name, is_set in others.items() if is_set]:
                raise ValueError(
                    f"safety is a loss of its own, for loss_type sigmoid; leave out {' and '.join(wrong)}, or write "
                    "safety: {} to log its metrics only"
                )
        # Metrics depend on the options; the fields of a frozen dataclass are set this way in __post_init__.
        object.__setattr__(self, "metric_names", (*self.metric_names, *options.metric_names))

    @cached_property
    def checks(self) -> SafeDPOChecks:
        return SafeDPOChecks(parse_record=self.parse_record, task=self)

    @property
    def shows_corrupted(self) -> bool:
        """True where batches have rows with corrupted images."""
        return self.safety.image_weight > 0

    def parse(self, record: Mapping[str, Any]) -> Preference:
        preference = super().parse(record)
        if self.safety.scaling_weight and not self.safety.scores_pairs and preference.margin is None:
            raise BadRecord(
                "no 'margin', which options.safety.scaling_weight needs; write a number, or name helpful_rm"
            )
        chosen, rejected = read_safety_labels(record, self.safety.needs_labels)
        return replace(preference, chosen_safe=chosen, rejected_safe=rejected)

    def scalar_columns(self, preference: Preference) -> dict[str, float]:
        labels = (preference.chosen_safe, preference.rejected_safe)
        return super().scalar_columns(preference) | {
            name: float("nan" if label is None else label) for name, label in zip(LABEL_COLUMNS, labels, strict=True)
        }

    def encode_key(self) -> dict[str, Any]:
        needs_margin = bool(self.safety.scaling_weight) and not self.safety.scores_pairs
        return {**super().encode_key(), "safety_labels": self.safety.needs_labels, "margins": needs_margin}

    def examples(self, split: Split) -> TokenizedDataset | None:  # type: ignore[override]
        dataset = super().examples(split)
        if dataset is None:
            return dataset
        index = dataset.store.image_index
        if self.shows_corrupted and (index is None or not len(index)):
            raise DataError(f"data.{split}: no record has an image, and options.safety.image_weight needs some")
        return dataset if self.has_cached_scores else order_dataset(dataset, self.safety, split)

    @property
    def has_cached_scores(self) -> bool:
        """True where reward models score the pairs before training."""
        return self.safety.scores_pairs and self.safety.scoring == "cached"

    def _select_pairs(self, dataset: Dataset, split: Split) -> Dataset:
        """Return the dataset ordered by its scores, which only the started processes compute."""
        from dstrain.data.token_store import TokenizedDataset

        assert isinstance(dataset, TokenizedDataset)
        return order_dataset(dataset, self.safety, split)

    @cached_property
    def reward_models(self) -> tuple[FrozenRewardModel, ...]:
        """The frozen reward models that score the pairs."""
        return make_reward_models(self, self.safety)

    def sequence_parallel_unsupported_reason(self, size: int) -> str | None:
        if self.safety.drops_in_step:
            return "pairs get their weight in a step (options.safety.scoring: online); write scoring: cached"
        return super().sequence_parallel_unsupported_reason(size)

    def packing_unsupported_reason(self, shares_prefixes: bool) -> str | None:
        reason = super().packing_unsupported_reason(shares_prefixes)
        if self.shows_corrupted:
            reason = reason or "rows with corrupted images (options.safety.image_weight) are padded"
        online = [] if self.has_cached_scores else self.reward_models  # cached, they read batches of their own
        for model in online:
            reason = reason or model.packing_unsupported_reason(shares_prefixes)
        return reason

    def collate(self, examples: Examples) -> Batch:
        order = order_examples(examples, self.safety)
        # The pairs that the loss sums over; all where that is not known before the step.
        return replace(super().collate(examples), weight=float(len(examples) if order is None else order.keep.sum()))

    def length_diff(self, examples: Examples) -> list[float]:
        lengths, order = super().length_diff(examples), order_examples(examples, self.safety)
        if order is None:
            return lengths
        pairs = zip(lengths, order.swap, order.keep, strict=True)
        return [-length if swap else length for length, swap, keep in pairs if keep]

    def rows(self, examples: Examples) -> list[tuple[np.ndarray, int]]:
        shown = super().rows(examples)
        if self.shows_corrupted:
            order = order_examples(examples, self.safety)
            for index in pairs_with_images(examples):
                preferred = "rejected" if order is not None and order.swap[index] else "chosen"
                shown.append((examples[index][preferred], int(examples[index]["prompt_length"])))
        return shown

    def attach_images(self, batch: Batch, examples: Examples) -> Batch:
        images = self.collator.load_images(examples)
        corrupted: list[Image] = []
        if self.shows_corrupted and images is not None:
            for example, loaded in zip(examples, images, strict=True):
                for number, image in enumerate(loaded):
                    key = self.recipe.seed, example["sample"], number
                    corrupted.append(corrupt_image(image, key, self.safety.crop_max_area))
        return self.collator.attach_images(batch, images, repeats=2, more=corrupted)

    def loss_tensors(self, examples: Examples, rows: PaddedRows | PackedRows) -> dict[str, torch.Tensor]:
        import torch

        # Only for packed rows: an export is compared on padded ones, where the reward models' folders may be gone.
        online = self.reward_models if self.packing.is_packed and not self.has_cached_scores else ()
        pad_token_ids = {model.positions_name: model.task.tokenizer.pad_token_id for model in online}
        labels = {name: [example[name] for example in examples] for name in LABEL_COLUMNS if name in examples[0]}
        tensors = {
            **super().loss_tensors(examples, rows),
            **rows.score_tensors(pad_token_ids),
            **cached_scores(examples),
            **{name: torch.tensor(values, dtype=torch.float32) for name, values in labels.items()},  # (B,)
        }
        if self.shows_corrupted:
            tensors["corrupted_pairs"] = torch.tensor(pairs_with_images(examples), dtype=torch.int64)  # (B',)
        return tensors

    @property
    def ref_columns(self) -> tuple[str, ...]:
        return (*super().ref_columns, "ref_corrupted_logps") if self.shows_corrupted else super().ref_columns

    @property
    def reference_key(self) -> Mapping[str, Any]:
        if not self.shows_corrupted:
            return {}
        crop = [CORRUPTION_VERSION, self.recipe.seed, self.safety.crop_max_area]
        return {"corrupted": crop, "method": self.safety.method}

    def reference_outputs(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return log p of the answers under the reference, (B,) each; 0 for a corrupted image where there is none."""
        from dstrain.tasks.common.forward import answer_log_probs

        sums, count = answer_log_probs(model, batch).sum(-1), len(batch.tensors["margin"])
        found = dict(zip(self.ref_columns, sums[: 2 * count].chunk(2), strict=False))
        if self.shows_corrupted:
            found["ref_corrupted_logps"] = _scatter(sums[2 * count :], batch, 0.0)
        return found

    @property
    def loss_inputs(self) -> LossInputs:
        return replace(
            super().loss_inputs,
            scorers=[model.to_scorer() for model in self.reward_models],
            select=self._select_pairs if self.has_cached_scores else None,
            update_weight=self._with_pair_weight if self.safety.drops_in_step else None,
        )

    def _with_pair_weight(self, batch: Batch) -> Batch:
        from dstrain.tasks.safety.pair_loss import with_pair_weight

        return with_pair_weight(self.safety, batch)

    def pair_loss(self, ratios: torch.Tensor, sums: torch.Tensor, batch: Batch) -> Loss:
        """Return the loss; (2, B) log-ratios, (2B + B',) log-probs under the policy."""
        from dstrain.tasks.safety.pair_loss import SafePairs

        pairs, count = SafePairs.from_batch(self.safety, batch), ratios.shape[1]
        rewards = self.beta * ratios.detach()
        if not self.safety.changes_loss:
            plain = super().pair_loss(ratios, sums, batch)
            return Loss(plain.total, {**plain.metrics, **pairs.metrics(rewards)})
        preferred, other = pairs.reorder(ratios)
        losses, kept = pairs.losses(preferred, other, self.beta), pairs.trained_order.keep
        metrics = pair_metrics(pairs.reorder(rewards) * kept, pairs.reorder(sums[: 2 * count].view(2, -1)) * kept)
        metrics |= pairs.metrics(rewards)
        if self.shows_corrupted:
            corrupted = _scatter(sums[2 * count :], batch, float("nan")) - batch.tensors["ref_corrupted_logps"]  # (B,)
            losses = losses + pairs.image_losses(preferred, corrupted, self.beta)
            metrics |= pairs.image_metrics(self.beta * preferred.detach(), self.beta * corrupted.detach())
        return Loss(losses.sum(), metrics)


def _scatter(values: torch.Tensor, batch: Batch, fill: float) -> torch.Tensor:
    """Return the values (B',) at their pairs, (B,), `fill` at pairs without images."""
    import torch

    return torch.full_like(batch.tensors["margin"], fill, dtype=values.dtype).index_copy(
        0, batch.tensors["corrupted_pairs"], values
    )


def read_safety_labels(record: Mapping[str, Any], is_required: bool) -> tuple[bool | None, bool | None]:
    """Return whether the chosen and the rejected answer are safe, None where the record does not say.

    Raises BadRecord for a value that is neither true nor false, for one label without the other, and for a record
    without labels where they are required.
    """
    record = to_chosen_rejected(record)
    chosen, rejected = (_read_label(record, key) for key in SAFETY_KEYS)
    for key, value, other in zip(SAFETY_KEYS, (chosen, rejected), (rejected, chosen), strict=True):
        if value is None and (is_required or other is not None):
            near = suggest_name(key, [name for name in record if name not in (*SAFETY_KEYS, "chosen", "rejected")])
            hint = f" ({near})" if near.startswith("did you mean") else ""
            instead = ", or leave out options.safety.method" if is_required else ""
            fixes = f"write true or false, {'' if instead else 'or '}rename a column with data.columns{instead}"
            raise BadRecord(f"no '{key}'{hint}; {fixes}")
    return chosen, rejected


def _read_label(record: Mapping[str, Any], key: str) -> bool | None:
    value = record.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or value not in (0, 1):
        raise BadRecord(f"'{key}' is {value!r:.40}; write true for a safe answer, false for an unsafe one")
    return bool(value)

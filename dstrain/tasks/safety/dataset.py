"""Safety of a dataset's pairs: pairs of two unsafe answers leave the training data, and both are counted."""

# Shapes: N examples of a split.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dstrain.errors import DataError
from dstrain.tasks.common.task import Split
from dstrain.tasks.safety.options import SafetyOptions
from dstrain.tasks.safety.ordering import HARMLESS_COLUMNS, HELPFUL_COLUMNS, LABEL_COLUMNS, order_pairs

if TYPE_CHECKING:
    from dstrain.data.cache.token_store import TokenizedDataset


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
        raise DataError(_describe_unsafe(f"{len(dataset)} pairs", options, split))
    counts = {"pairs_reordered": int(order.swap.sum()), "pairs_dropped": int((~order.keep).sum())}
    kept = dataset.select(order.keep) if split == "train" else dataset
    for number, (before, after) in enumerate(zip(dataset.sizes, kept.sizes, strict=True), 1):
        if before and not after:
            raise DataError(_describe_unsafe(f"{before} pairs of source {number}", options, split))
    return replace(kept, counts=counts)


def describe_order(split: str, report: Mapping[str, Any]) -> str:
    """Return a line on the reordered and dropped pairs of a split's report; empty if it does not count them."""
    if "pairs_reordered" not in report:
        return ""
    left_out = "dropped" if split == "train" else "left out of the loss"
    reordered, dropped = report["pairs_reordered"], report["pairs_dropped"]
    return f"{split}: {reordered} pairs reordered, {dropped} of two unsafe answers {left_out}"


def _describe_unsafe(pairs: str, options: SafetyOptions, split: Split) -> str:
    remedy = ", remove the source" if "source" in pairs else ""
    if options.harmless_rm:
        threshold = f"{options.harmless_threshold:g}"
        return (
            f"data.{split}: no answer of its {pairs} has a harmless score of at least {threshold}; "
            f"lower options.safety.harmless_threshold{remedy}"
        )
    return (
        f"data.{split}: both answers of all {pairs} are labelled unsafe; correct the labels{remedy}, "
        "or write options.safety.method: none"
    )

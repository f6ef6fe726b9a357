"""Datasets of a token store: training and held-out rows, rows aligned with another store."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from dstrain.data.cache.build import PreparePolicy, check_bad_records
from dstrain.data.cache.token_store import AlignedStore, BuildReport, TokenizedDataset, TokenStore, describe_report
from dstrain.data.dataset import SequenceDataset
from dstrain.data.records import BadRecord, BadRow, try_parse
from dstrain.data.sources.base import ConcatSource
from dstrain.errors import DataError, Fault

HOLD_OUT_STREAM = 3
"""Stream of random numbers of held-out records."""
NO_TRAIN_DATA = Fault("data.train", "is not set", "write `data: {train: pairs.jsonl}`")


def align_store(store: TokenStore, other: TokenStore) -> tuple[AlignedStore, np.ndarray]:
    """Return the rows of `other` with the records of `store`'s rows, and the records that `other` lacks, (K,).

    Both are built from the same sources with one example for a record. The row of a missing record is 0.
    """
    wanted, known = store.record_indices, other.record_indices
    order = np.argsort(known, kind="stable")
    found = np.searchsorted(known, wanted, sorter=order).clip(max=max(len(known) - 1, 0))
    rows = order[found] if len(known) else np.zeros(len(wanted), dtype=np.int64)
    is_missing = known[rows] != wanted if len(known) else np.ones(len(wanted), dtype=bool)
    return AlignedStore(other, np.where(is_missing, 0, rows)), np.asarray(wanted[is_missing])


def get_source_sizes(store: TokenStore, source: ConcatSource) -> tuple[int, ...]:
    """Return the records of each source, from the store's report; a source is opened only where it lacks them."""
    return tuple(store.report.sizes) or source.sizes


def split_examples(
    store: TokenStore, source_sizes: tuple[int, ...], weights: tuple[float, ...], eval_fraction: float, seed: int
) -> tuple[TokenizedDataset, TokenizedDataset | None]:
    """Return (training, held-out) examples; the seed chooses `eval_fraction` of each source's records."""
    sizes = store.count_per_source(source_sizes)
    dataset = TokenizedDataset(store, np.arange(len(store)), sizes, weights)
    if not eval_fraction:
        return dataset, None
    return split_dataset(dataset, choose_held_out(store.record_indices, store.groups, sizes, eval_fraction, seed))


def load_into_memory(source: ConcatSource, policy: PreparePolicy) -> SequenceDataset:
    """Return the records of a source as they are. Raises DataError for too many bad ones."""
    report = BuildReport(read=len(source) + len(source.bad_rows), bad=[*source.bad_rows])
    records, sizes, start = list[Any](), list[int](), 0
    for size in source.sizes:
        before = len(records)
        for index in range(start, start + size):
            record = try_parse(source.__getitem__, index)
            if isinstance(record, BadRecord):
                report.bad.append(BadRow(source.location(index), record.reason))
            else:
                records.append(dict(record))
        sizes.append(len(records) - before)
        start += size
    report.kept = len(records)
    check_bad_records(report, policy)
    return SequenceDataset(records, tuple(sizes), report=describe_report(report))


DatasetT = TypeVar("DatasetT", TokenizedDataset, SequenceDataset)


def split_dataset(dataset: DatasetT, is_held_out: np.ndarray) -> tuple[DatasetT, DatasetT]:
    """Return the samples where `is_held_out`, (N,) bool, is false, and those where it is true."""
    held_out = dataset.select(is_held_out)
    return dataset.select(~is_held_out), replace(held_out, weights=(1.0,) * len(held_out.sizes))


def choose_held_out(
    records: np.ndarray, groups: np.ndarray | None, sizes: Sequence[int], fraction: float, seed: int
) -> np.ndarray:
    """Return which rows are held out, (N,) bool: a fraction of each source's records, in an order that the seed chooses.

    `records`: (N,) the record of each row, ascending; `groups`: (N,) the group of each row's record. All rows of a
    record, and all records of a group, in whatever sources, are on one side. A group that would exceed the fraction is
    left to training, except that each source has a record held out. Raises DataError where a source would have none left.
    """
    names, first, record_of_row = np.unique(records, return_index=True, return_inverse=True)
    group_names, group_of = np.unique(names if groups is None else groups[first], return_inverse=True)
    # Of each group: held out, left to training, or not decided by an earlier source.
    side = np.full(len(group_names), -1)
    for source, (start, stop) in enumerate(itertools.pairwise(np.cumsum((0, *sizes)))):
        own = group_of[np.unique(record_of_row[start:stop])]  # of each record of the source
        order = own[np.random.RandomState([seed, HOLD_OUT_STREAM, source]).permutation(len(own))]
        count, num_records = max(1, round(fraction * len(own))), np.bincount(own, minlength=len(side))
        held_out = int(num_records[side == 1].sum())
        for group in order.tolist():
            if held_out >= count:
                break
            if side[group] < 0 and held_out + num_records[group] <= count:
                side[group], held_out = 1, held_out + num_records[group]
        undecided = [group for group in dict.fromkeys(order.tolist()) if side[group] < 0]
        if not held_out and undecided:
            side[min(undecided, key=lambda group: int(num_records[group]))] = 1
        side[own] = np.where(side[own] < 0, 0, side[own])
        if len(own) and (side[own] == 1).all():
            same = "" if len(set(own.tolist())) > 1 or len(own) == 1 else ", which belong together (equal prompts)"
            problem = f"holds out all {len(own)} records of source {source + 1} of data.train{same}, and none is left to train on"
            raise DataError(Fault(f"data.eval_fraction {fraction:g}", problem, "lower it, or give data.eval a file"))
    return np.asarray(side[group_of[record_of_row]] == 1)

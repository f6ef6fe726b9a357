"""Splits: what is held out is never trained on, and mixtures keep their weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dstrain.data.loading.loader import StepSampler
from dstrain.data.prepare import align_store, split_examples
from dstrain.data.token_store import GROUP, BuildReport, TokenizedDataset, TokenStore, load_or_build_store
from dstrain.errors import DataError


def store(folder: Path, count: int, bad: tuple[int, ...] = ()) -> TokenStore:
    def build(report: BuildReport):  # type: ignore[no-untyped-def]
        yield [{"ids": [index] * (index % 3 + 1), "sample": index} for index in range(count) if index not in bad]

    return load_or_build_store(folder, {"count": count, "bad": list(bad)}, build)


def test_held_out_samples_are_never_trained_on(tmp_path: Path) -> None:
    train, test = split_examples(store(tmp_path, 50, bad=(3, 30)), (20, 30), (1.0, 1.0), 0.2, seed=1)
    assert test is not None
    of_train, of_test = ({examples[i]["sample"] for i in range(len(examples))} for examples in (train, test))
    assert not of_train & of_test
    assert of_train | of_test == set(range(50)) - {3, 30}
    assert test.sizes == (4, 6), "a share of each source"
    assert sum(train.sizes) == len(train) == 38


def test_the_split_depends_on_the_seed_alone(tmp_path: Path) -> None:
    splits = [split_examples(store(tmp_path, 40), (40,), (1.0,), 0.25, seed)[1] for seed in (1, 1, 2)]
    samples = [{examples[i]["sample"] for i in range(len(examples))} for examples in splits if examples is not None]
    assert samples[0] == samples[1] != samples[2]


def test_an_epoch_shows_each_source_by_its_weight(tmp_path: Path) -> None:
    train, _ = split_examples(store(tmp_path, 30), (10, 20), (2.0, 0.5), 0.0, seed=0)
    plan = StepSampler(
        sizes=train.sizes, weights=train.weights, seed=0, samples_per_step=30, world_size=1, accumulate=1
    )
    assert plan.samples_per_epoch == 30
    shown = Counter(train[int(index)]["sample"] for index in plan.step_ids(0))
    assert all(shown[sample] == 2 for sample in range(10))
    assert sum(shown[sample] for sample in range(10, 30)) == 10


@pytest.mark.parametrize(("sizes", "held_out"), [((4,), 0.9999), ((4,), 0.9), ((9, 1), 0.1)])
def test_a_source_of_which_nothing_is_left_to_learn_from_is_refused(
    tmp_path: Path, sizes: tuple[int, ...], held_out: float
) -> None:
    with pytest.raises(DataError, match=r"^data\.eval_fraction .* holds out all \d records of source \d .*; lower it"):
        split_examples(store(tmp_path, sum(sizes)), sizes, (1.0,) * len(sizes), held_out, 0)


def test_lengths_are_those_of_the_longest_sequence_of_each_example(tmp_path) -> None:
    chunk = [
        {"chosen": [1] * (i + 1), "rejected": [2] * (5 - i), "images": list(range(9)), "margin": 0.0, "sample": i}
        for i in range(5)
    ]
    store = load_or_build_store(
        tmp_path, {"what": "lengths", "token_columns": {"names": ["chosen", "rejected"]}}, lambda report: [chunk]
    )
    examples = TokenizedDataset(store, np.array([4, 0, 3, 2]), (4,), (1.0,))
    assert examples.lengths is not None
    assert examples.lengths(np.array([0, 1, 2, 3])).tolist() == [5, 5, 4, 3]
    assert examples.lengths(np.array([1, 3])).tolist() == [5, 3]
    assert examples.lengths(np.zeros(0, dtype=np.int64)).tolist() == []


def test_the_rows_of_another_encoding_are_those_of_the_same_records(tmp_path: Path) -> None:
    first, other = store(tmp_path, 12, bad=(0, 5)), store(tmp_path, 12, bad=(2, 3, 11))
    aligned, missing = align_store(first, other)
    assert missing.tolist() == [2, 3, 11]
    known = [row for row in range(len(first)) if first[row]["sample"] not in missing]
    assert [other[int(aligned.rows[row])]["sample"] for row in known] == [first[row]["sample"] for row in known]
    assert len(aligned.rows) == len(first)


def test_an_example_has_the_outputs_of_its_row(tmp_path: Path) -> None:
    kept = store(tmp_path, 5)
    examples = TokenizedDataset(kept, np.array([4, 0]), (2,), (1.0,), output_columns={"score": np.arange(5) / 2})
    assert [examples[index]["score"] for index in range(2)] == [2.0, 0.0]
    assert examples.column("score").tolist() == [2.0, 0.0]


def grouped(folder: Path, groups: dict[int, list[int]], answers: int = 1) -> TokenStore:
    """Return a store of records 0, 1, ..., each with so many examples; `groups`: group -> its records."""
    of = {record: group for group, records in groups.items() for record in records}
    rows = [{"ids": [record], "sample": record, GROUP: of[record]} for record in sorted(of) for _ in range(answers)]
    return load_or_build_store(folder, {"groups": sorted(of.items()), "answers": answers}, lambda report: [rows])


def records(examples: TokenizedDataset | None) -> set[int]:
    assert examples is not None
    return {examples[index]["sample"] for index in range(len(examples))}


def test_the_examples_of_a_record_are_on_one_side(tmp_path: Path) -> None:
    rows = [{"ids": [at], "sample": at // 3} for at in range(90)]
    store = load_or_build_store(tmp_path, {"what": "answers"}, lambda report: [rows])
    train, test = split_examples(store, (30,), (1.0,), 0.2, seed=4)
    assert not records(train) & records(test)
    assert (len(records(test)), len(test or ()), train.sizes) == (6, 18, (72,))


def test_records_of_one_group_are_on_one_side_in_all_sources(tmp_path: Path) -> None:
    groups = {group: [group, 40 + group, 80 + group] for group in range(40)}
    train, test = split_examples(grouped(tmp_path, groups), (40, 80), (1.0, 1.0), 0.25, seed=1)
    assert not {at % 40 for at in records(train)} & {at % 40 for at in records(test)}
    assert test is not None
    assert test.sizes == (10, 20)


def test_records_that_stand_alone_are_held_out_as_without_groups(tmp_path: Path) -> None:
    alone = {-1 - record: [record] for record in range(50)}
    with_groups = split_examples(grouped(tmp_path, alone), (20, 30), (1.0, 1.0), 0.2, seed=1)
    without = split_examples(store(tmp_path, 50), (20, 30), (1.0, 1.0), 0.2, seed=1)
    assert [records(split) for split in with_groups] == [records(split) for split in without]


def test_a_group_above_the_fraction_is_trained_on_and_the_smallest_is_held_out_where_all_are(tmp_path: Path) -> None:
    train, test = split_examples(grouped(tmp_path, {1: [*range(30)], 2: [*range(30, 40)]}), (40,), (1.0,), 0.1, seed=0)
    assert (records(test), len(train)) == (set(range(30, 40)), 30)
    with pytest.raises(
        DataError, match=r"all 40 records of source 1 of data.train, which belong together \(equal prompts\)"
    ):
        split_examples(grouped(tmp_path, {1: [*range(40)]}), (40,), (1.0,), 0.1, seed=0)


@pytest.mark.parametrize("seed", range(4))
def test_half_of_three_records_leaves_one_to_train_on(tmp_path: Path, seed: int) -> None:
    train, test = split_examples(store(tmp_path, 3), (3,), (1.0,), 0.5, seed)
    assert (len(train), len(records(test))) == (1, 2)

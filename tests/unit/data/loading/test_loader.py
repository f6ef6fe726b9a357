from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dstrain.batch import PADDED, Batch
from dstrain.data.dataset import of_one_sequence
from dstrain.data.loading.loader import Loader, StepSampler, eval_micro_batches, iter_batches, make_batch
from dstrain.data.loading.micro_batches import CostFunction, MicroBatchLimits, SampleCosts, costs_of
from dstrain.data.loading.rows import pad
from dstrain.errors import BadRecord, DataError, RunError
from dstrain.tasks.common.task import as_dataset

EXAMPLES = [{"sample": 100 + i, "ids": [i] * (i % 3 + 1)} for i in range(10)]


def collate(examples: list[dict]) -> Batch:
    ids = tuple(example["sample"] for example in examples)
    return Batch(tensors={"ids": pad([e["ids"] for e in examples], 0)}, weight=len(ids), samples=ids, tokens=len(ids))


def loader(*, collate=collate, rank=0, workers=0, prefetch=2, **settings) -> Loader:
    given = {"sizes": (10,), "seed": 0, "samples_per_step": 4, "world_size": 1, "accumulate": 2, "total_samples": 30}
    plan = StepSampler(**(given | settings))
    return Loader(examples=EXAMPLES, collate=collate, sampler=plan, rank=rank, workers=workers, prefetch=prefetch)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("dstrain-loader")]


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_steps_come_in_the_plans_order_with_any_number_of_threads(workers):
    def slow(examples):
        time.sleep(0.002 * (examples[0]["sample"] % 3))
        return collate(examples)

    reader = loader(workers=workers, collate=slow)
    got = [[batch.samples for batch in step.batches] for step in reader.iter_steps(0)]
    order = reader.sampler
    shares = [
        [ids for ids, _ in order.micro_batches(order.step_ids(samples), samples, 0)] for samples in range(0, 30, 4)
    ]
    assert got == [[tuple(100 + i for i in chunk) for chunk in share] for share in shares]
    assert threads() == []


def test_steps_are_divided_in_a_thread_of_the_loader():
    names = []

    def costs(ids: np.ndarray) -> SampleCosts:
        names.append(threading.current_thread().name)
        return SampleCosts(ids + 1)

    steps = list(loader(workers=2, costs=costs).iter_steps(0))
    assert len(names) == len(steps) == 8, "each once"
    assert all(name.startswith("dstrain-loader-sampler") for name in names)


def test_a_fault_in_dividing_a_step_is_raised_where_the_step_is_taken():
    def costs(ids: np.ndarray) -> SampleCosts:
        raise ValueError("no lengths")

    with pytest.raises(ValueError, match="no lengths"):
        next(loader(workers=2, costs=costs).iter_steps(0))
    assert threads() == []


def test_a_steps_weight_is_known_once_its_batches_are_made():
    may_go_on = threading.Event()
    may_go_on.set()

    def wait(examples):
        assert may_go_on.wait(30)
        return collate(examples)

    steps = loader(workers=1, prefetch=1, total_samples=10, collate=wait).iter_steps(0)
    first = next(steps)
    while (weight := first.next_weight()) is None:
        time.sleep(0.001)
    assert weight == 4
    may_go_on.clear()
    second = next(steps)
    assert second.next_weight() is None, "not made"
    may_go_on.set()
    while (weight := second.next_weight()) is None:
        time.sleep(0.001)
    assert weight == 2, "the last step is cut"
    assert next(steps).next_weight() is None, "there is no other"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_weight_of_batches_that_cannot_be_made_is_not_known(workers):
    def fail_later(examples):
        return collate(examples if examples[0]["sample"] in of_first else 1 / 0)

    order = loader().sampler
    of_first = {100 + i for i in order.step_ids(0).tolist()}
    steps = loader(workers=workers, collate=fail_later).iter_steps(0)
    step = next(steps)
    time.sleep(0.05)
    assert step.next_weight() is None
    with pytest.raises(RunError, match="ZeroDivisionError"):
        next(steps)


def test_a_run_goes_on_where_it_stopped():
    whole = [batch.samples for step in loader().iter_steps(0) for batch in step.batches]
    assert [batch.samples for step in loader(workers=2).iter_steps(8) for batch in step.batches] == whole[4:]


def test_a_rank_without_samples_gets_a_filler():
    plan = {"samples_per_step": 3, "world_size": 2, "total_samples": 3}
    taken = next(loader(rank=1, **plan).iter_steps(0))
    step = taken.batches
    assert taken.num_samples == 3, "of all ranks"
    assert [batch.is_filler for batch in step] == [False, True]
    assert (step[1].weight, step[1].samples, step[1].tokens) == (0.0, (), 0)
    assert len(step[1].tensors["ids"]) == 1
    assert sum(batch.weight for rank in (0, 1) for batch in next(loader(rank=rank, **plan).iter_steps(0)).batches) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_with_positions_gets_those_of_the_samples_in_the_run(workers):
    def seen_by(start: int = 0, **plan) -> dict[int, int]:
        seen: dict[int, int] = {}

        def note(examples, positions=None):
            seen.update(zip(positions or (), [example["sample"] for example in examples], strict=bool(positions)))
            return collate(examples)

        for rank in range(plan.get("world_size", 1)):
            list(loader(collate=note, workers=workers, rank=rank, **plan).iter_steps(start))
        return seen

    alone = seen_by()
    assert sorted(alone) == list(range(30))
    assert seen_by(world_size=3, accumulate=2) == alone
    assert seen_by(8) == {place: sample for place, sample in alone.items() if place >= 8}


def test_neither_a_filler_nor_an_evaluation_has_a_place():
    def none_placed(examples, positions=None):
        assert positions is None
        return collate(examples)

    step = next(
        loader(rank=1, samples_per_step=1, world_size=2, accumulate=1, collate=none_placed).iter_steps(0)
    ).batches
    assert [batch.is_filler for batch in step] == [True]
    assert list(iter_batches(EXAMPLES, none_placed, eval_micro_batches(10, MicroBatchLimits(samples=2), 1, 0)))


def test_a_collate_without_positions_gets_the_samples_as_they_are():
    examples, seen = [{"sample": at, "ids": [at], "place": 7 + at} for at in range(4)], []
    make_batch(examples, lambda chosen: seen.extend(chosen) or collate(chosen), [0, 1], 0, [100, 101])
    assert seen == examples[:2]


def test_a_fault_of_the_tasks_own_code_names_its_line_and_advises_to_remove_nothing():
    def read_label(example):
        return example["label"]

    with pytest.raises(RunError) as caught:
        make_batch([{"sample": 4}], lambda examples: [read_label(example) for example in examples], [0], 0)
    line = read_label.__code__.co_firstlineno + 1
    told = "samples 4 could not be made into a batch: KeyError: 'label' "
    assert str(caught.value) == f"{told}(in read_label, tests/unit/data/loading/test_loader.py:{line})"


@pytest.mark.parametrize("fault", [OSError("cut short"), BadRecord("no image")])
def test_a_fault_of_the_data_advises_to_mend_the_samples(fault):
    def broken(examples):
        raise fault

    with pytest.raises(RunError, match=r"samples 4 could not be made into a batch: .*; fix or remove them$"):
        make_batch([{"sample": 4}], broken, [0], 0)


def test_what_is_no_batch_is_named():
    with pytest.raises(RunError, match=r"TypeError: collate returned dict, not a Batch$"):
        make_batch([{"sample": 4}], lambda examples: {}, [0], 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_fault_in_collating_names_the_samples(workers):
    def broken(examples):
        raise KeyError("image")

    with pytest.raises(RunError, match=r"samples 1\d\d, 1\d\d could not be made into a batch: KeyError"):
        next(loader(workers=workers, collate=broken).iter_steps(0))
    assert threads() == []


def test_closing_stops_the_threads():
    steps = loader(workers=3, total_samples=None).iter_steps(0)
    next(steps)
    assert threads()
    steps.close()
    assert threads() == []


def test_reading_stays_within_the_prefetch():
    made = []
    steps = loader(
        workers=1, prefetch=2, total_samples=None, collate=lambda e: made.append(1) or collate(e)
    ).iter_steps(0)
    next(steps)
    time.sleep(0.1)
    assert len(made) <= 2 * (1 + 2)
    steps.close()


def test_the_time_spent_waiting_is_told_once():
    reader = loader(workers=1, collate=lambda examples: time.sleep(0.2) or collate(examples))
    next(reader.iter_steps(0))
    assert reader.pop_wait_seconds() >= 0.02
    assert reader.pop_wait_seconds() == 0.0


def test_an_evaluation_sees_every_sample_once():
    batches = [
        b
        for rank in range(4)
        for b in iter_batches(EXAMPLES, collate, eval_micro_batches(10, MicroBatchLimits(samples=2), 4, rank))
    ]
    assert sorted(i for batch in batches for i in batch.samples) == list(range(100, 110))
    assert len(batches) == 8
    assert sum(batch.weight for batch in batches) == 10


def test_an_iterator_left_open_does_not_keep_the_process():
    code = """
from dstrain.batch import Batch
from dstrain.data.loading.loader import Loader, StepSampler
sampler = StepSampler(sizes=(9,), seed=0, samples_per_step=2, world_size=1, accumulate=1)
steps = Loader(examples=range(9), collate=lambda e: Batch(tensors={}, weight=1, samples=()), sampler=sampler, workers=2)
steps = steps.iter_steps(0)
print(len(next(steps).batches))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout.strip(), done.stderr) == ("1", "")


def plan(sizes=(10,), **settings) -> StepSampler:
    given = {"seed": 0, "samples_per_step": 4, "world_size": 1, "accumulate": 1} | settings
    return StepSampler(sizes=tuple(sizes), **given)


def ids_of(order: StepSampler, samples: int, rank: int) -> list[list[int]]:
    return [ids for ids, _ in order.micro_batches(order.step_ids(samples), samples, rank)]


def positions_of(order: StepSampler, samples: int, rank: int) -> list[list[int]]:
    return [positions for _, positions in order.micro_batches(order.step_ids(samples), samples, rank)]


def stream(order: StepSampler, count: int, start: int = 0) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        ids.extend(order.step_ids(start + len(ids)).tolist())
    return ids[:count]


def in_order(shares: list[list[list[int]]]) -> list[int]:
    """The ids of all ranks' micro-batches: the first of each rank, then the second of each."""
    return [i for chunks in zip(*shares, strict=True) for chunk in chunks for i in chunk]


SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=3)
SMALL = st.integers(1, 9)


@given(SIZES, SMALL, st.integers(0, 2**63))
def test_an_epoch_shows_each_sample_once(sizes, samples_per_step, seed):
    order, total = plan(sizes, samples_per_step=samples_per_step, seed=seed), sum(sizes)
    ids = stream(order, 3 * total)
    for epoch in range(3):
        assert sorted(ids[epoch * total : (epoch + 1) * total]) == list(range(total))


@given(SIZES, SMALL, st.integers(1, 5), st.integers(1, 4), st.integers(0, 100))
def test_the_ids_of_a_step_are_the_same_for_any_split(sizes, samples_per_step, world_size, accumulate, samples):
    alone = plan(sizes, samples_per_step=samples_per_step)
    split = plan(sizes, samples_per_step=samples_per_step, world_size=world_size, accumulate=accumulate)
    shares = [ids_of(split, samples, rank) for rank in range(world_size)]
    assert all(len(share) == accumulate for share in shares)
    lengths = [len(chunk) for share in shares for chunk in share]
    assert max(lengths) - min(lengths) <= 1
    assert in_order(shares) == ids_of(alone, samples, 0)[0]


@given(SIZES, SMALL, st.integers(1, 5), st.integers(1, 4), st.integers(0, 100))
def test_a_samples_place_does_not_depend_on_the_split(sizes, samples_per_step, world_size, accumulate, samples):
    split = plan(sizes, samples_per_step=samples_per_step, world_size=world_size, accumulate=accumulate)
    shares = [ids_of(split, samples, rank) for rank in range(world_size)]
    places = [positions_of(split, samples, rank) for rank in range(world_size)]
    assert [[len(chunk) for chunk in share] for share in places] == [[len(chunk) for chunk in s] for s in shares]
    placed = in_order(places)
    assert placed == list(range(samples, samples + samples_per_step))
    order = stream(plan(sizes), samples + samples_per_step)
    assert in_order(shares) == [order[place] for place in placed]


LENGTHS = np.random.RandomState(0).randint(1, 500, 90)
COSTS = costs_of(of_one_sequence(LENGTHS.__getitem__), PADDED)


@given(SIZES, SMALL, st.integers(1, 5), st.integers(1, 4), st.integers(0, 100))
def test_a_step_sorted_by_length_has_the_same_samples_at_the_same_places(sizes, total, world_size, accumulate, samples):
    split = plan(sizes, samples_per_step=total, world_size=world_size, accumulate=accumulate, costs=COSTS)
    alone = plan(sizes, samples_per_step=total)
    shares = [ids_of(split, samples, rank) for rank in range(world_size)]
    ids = in_order(shares)
    assert sorted(ids) == sorted(alone.step_ids(samples).tolist())
    assert LENGTHS[ids].tolist() == sorted(LENGTHS[ids].tolist(), reverse=True), "neighbours over ranks, too"
    order = stream(alone, samples + total)
    assert ids == [
        order[place] for place in in_order([positions_of(split, samples, rank) for rank in range(world_size)])
    ]


def test_only_a_method_tells_lengths():
    class WithColumn:
        lengths = (3, 1)

        def __len__(self):
            return 2

    assert as_dataset([1, 2]).sequence_lengths is None
    assert as_dataset(WithColumn()).sequence_lengths is None, "a column of that name, as data sets have"


def test_sorting_leaves_little_padding():
    def share_of_real_tokens(costs):
        split = plan((90,), samples_per_step=30, world_size=2, accumulate=5, costs=costs)
        chunks = [chunk for samples in (0, 30, 60) for rank in (0, 1) for chunk in ids_of(split, samples, rank)]
        return LENGTHS.sum() / sum(len(chunk) * LENGTHS[chunk].max() for chunk in chunks)

    assert share_of_real_tokens(None) < 0.7
    assert share_of_real_tokens(COSTS) > 0.9


@pytest.mark.slow
@given(SIZES, SMALL, st.integers(0, 200))
def test_a_run_resumed_anywhere_goes_on_in_the_same_order(sizes, samples_per_step, start):
    unbroken = stream(plan(sizes, samples_per_step=samples_per_step), start + 50)
    assert stream(plan(sizes, samples_per_step=samples_per_step), 50, start) == unbroken[start:]
    assert stream(plan(sizes, samples_per_step=samples_per_step + 3), 50, start) == unbroken[start:]


def test_going_back_gives_the_same_order_again():
    order = plan((50,))
    first = order.step_ids(0).tolist()
    stream(order, 400)
    assert order.step_ids(0).tolist() == first


def test_epochs_and_seeds_differ_in_order():
    ids = stream(plan((100,)), 200)
    assert ids[:100] != ids[100:]
    assert ids[:100] != stream(plan((100,), seed=1), 100)
    assert ids[:100] != stream(plan((100,), seed=2**32), 100)


def test_the_order_is_frozen():
    assert stream(plan((10,)), 20) == FROZEN


FROZEN = [5, 6, 4, 3, 9, 8, 7, 1, 2, 0, 6, 9, 4, 0, 3, 7, 1, 8, 5, 2]


@settings(max_examples=50)
@given(st.integers(4, 40), st.sampled_from([0.25, 0.5, 1.0, 1.5, 2.0, 3.0]))
def test_a_weight_is_kept_over_epochs_and_no_record_falls_behind(size, weight):
    order = plan((size, 5), weights=(weight, 1.0))
    epochs = 4
    ids = stream(order, epochs * order.samples_per_epoch)
    counts = Counter(i for i in ids if i < size)
    assert sum(counts.values()) == epochs * round(weight * size)
    assert max(counts.values()) - min(counts.get(i, 0) for i in range(size)) <= 1


def test_half_a_source_is_followed_by_its_other_half():
    ids = stream(plan((20,), weights=(0.5,)), 20)
    assert sorted(ids) == list(range(20))


def test_the_last_step_is_cut_at_the_total():
    order = plan((10,), total_samples=6)
    assert [len(order.step_ids(samples)) for samples in (0, 4, 6, 8)] == [4, 2, 0, 0]


def test_a_step_crosses_into_the_next_epoch():
    assert len(plan((10,)).step_ids(8)) == 4
    assert len(plan((3,), samples_per_step=10).step_ids(0)) == 10
    assert plan((10,)).epoch_at(25) == 2.5


def test_more_chunks_than_samples_leave_empty_ones():
    order = plan((10,), samples_per_step=3, world_size=2, accumulate=2)
    assert [[len(chunk) for chunk in ids_of(order, 0, rank)] for rank in (0, 1)] == [[1, 1], [1, 0]]


def test_a_source_that_would_never_be_shown_is_refused():
    with pytest.raises(DataError, match=r"source 1 with 10 records and weight 0\.01"):
        plan((10, 10), weights=(1.0, 0.01))
    with pytest.raises(DataError):
        plan((0,))
    with pytest.raises(DataError):
        plan(())


@given(st.integers(0, 60), SMALL, SMALL)
def test_an_evaluation_takes_each_sample_once_in_as_many_batches_on_every_rank(size, micro, world_size):
    limits = MicroBatchLimits(samples=micro)
    shares = [eval_micro_batches(size, limits, world_size, rank) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    assert all(len(chunk) <= micro for share in shares for chunk in share)
    assert sorted(i for share in shares for chunk in share for i in chunk) == list(range(size))
    by_length = [eval_micro_batches(size, limits, world_size, rank, COSTS) for rank in range(world_size)]
    assert [[len(chunk) for chunk in share] for share in by_length] == [[len(chunk) for chunk in s] for s in shares]
    assert sorted(in_order(by_length)) == list(range(size))
    assert in_order(by_length) == sorted(range(size), key=lambda i: -LENGTHS[i])


def test_ids_are_plain_numbers():
    order = plan((10,))
    assert order.step_ids(0).dtype == np.int64
    assert type(ids_of(order, 0, 0)[0][0]) is int


def by_tokens(world_size: int, costs: CostFunction, limit: int, total: int = 30) -> StepSampler:
    limits = MicroBatchLimits(tokens=limit)
    return plan((90,), samples_per_step=total, world_size=world_size, accumulate=None, limits=limits, costs=costs)


def packed(ids: np.ndarray) -> SampleCosts:
    return SampleCosts(LENGTHS[ids], is_packed=True)


@pytest.mark.parametrize("costs", [COSTS, packed])
@given(st.integers(1, 5), st.integers(1, 3000), st.integers(1, 40), st.integers(0, 100))
def test_a_limit_of_tokens_changes_the_split_of_a_step_and_nothing_else(costs, world_size, limit, total, samples):
    split, alone = by_tokens(world_size, costs, limit, total), plan((90,), samples_per_step=total)
    assert split.step_ids(samples).tolist() == alone.step_ids(samples).tolist()
    shares = [ids_of(split, samples, rank) for rank in range(world_size)]
    assert len({len(share) for share in shares}) == 1, "as many passes on every rank"
    assert sorted(in_order(shares)) == sorted(alone.step_ids(samples).tolist())
    for chunk in (chunk for share in shares for chunk in share):
        assert len(chunk) <= 1 or costs(np.array(chunk)).of(np.arange(len(chunk))) <= limit
    order = stream(alone, samples + total)
    assert in_order(shares) == [
        order[place] for place in in_order([positions_of(split, samples, r) for r in range(world_size)])
    ]


def test_an_evaluation_keeps_the_limit_of_tokens():
    limits = MicroBatchLimits(tokens=1000)
    shares = [eval_micro_batches(90, limits, 3, rank, COSTS) for rank in range(3)]
    assert sorted(in_order(shares)) == list(range(90))
    assert all(len(chunk) * LENGTHS[chunk].max() <= 1000 for share in shares for chunk in share)

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from dstrain.batch import Batch
from dstrain.data.loading.collate import pad
from dstrain.data.loading.loader import Loader, StepSampler, eval_micro_batches, iter_batches, make_batch
from dstrain.data.loading.micro_batches import MicroBatchLimits
from dstrain.data.records import BadRecord
from dstrain.errors import RunError

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
    shares = [[ids for ids, _ in reader.sampler.micro_batches(samples, 0)] for samples in range(0, 30, 4)]
    assert got == [[tuple(100 + i for i in chunk) for chunk in share] for share in shares]
    assert threads() == []


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
        for b in iter_batches(EXAMPLES, collate, eval_micro_batches(10, MicroBatchLimits(samples=2), (4, rank)))
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert (done.stdout.strip(), done.stderr) == ("1", "")

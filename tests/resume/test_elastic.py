"""A run goes on with any number of processes and at any ZeRO stage.

Each pair of the grid trains three steps, writes a checkpoint and goes on unbroken; an engine with another number of
processes, another stage or another place for the optimizer loads it. What both hold is read with DeepSpeed's own
functions, not with those that write and load checkpoints here, and must be equal to the bit; the next losses follow.
"""

from __future__ import annotations

import ctypes.util
import subprocess
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

from tests.cells import SLOW
from tests.resume.elastic_cases import KINDS, NVME, SHAPE, save_model
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, metric_rows, read_events, write_recipe
from tests.workers import ROOT, WorkerError, Workers

CASES = "tests.resume.elastic_cases:"
EXAMPLES = ROOT / "docs" / "examples"
SOURCES = tuple(product(("zero0", "zero1", "zero2", "zero3"), (1, 2, 3), KINDS, ("bf16", "fp32")))
TARGETS = tuple(
    product(("zero0", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload"), (1, 2, 3))
)
Pair = tuple[str, int, str, str, str, int]
"""(preset, processes, kind of model, precision) that wrote, (preset, processes) that goes on."""
Told = Sequence[dict[str, Any]]
"""What each rank told."""
TOLERANCE = {"fp32": 1e-5, "bf16": 2e-4}
"""Of the losses after new steps. Ranks sum gradients in bf16 to 2^-9 of their size, which moved these by up to 4e-5."""


def grid() -> list[Pair]:
    """A target for each source, so that any two values of two factors meet in at least one pair.

    Source by source the target that adds most new pairs of values is taken, then most new triples; of equals the one
    that comes next in a list that each source begins at another place. Never the source's own stage and processes.
    """
    chosen: list[Pair] = []
    met: list[set[Any]] = [set(), set()]
    for index, source in enumerate(SOURCES):
        turned = TARGETS[5 * index % len(TARGETS) :] + TARGETS[: 5 * index % len(TARGETS)]
        others = [(*source, *target) for target in turned if target != source[:2]]
        best = max(
            others, key=lambda pair: [len(meetings(pair, n) - seen) for n, seen in zip((2, 3), met, strict=True)]
        )
        for n, seen in zip((2, 3), met, strict=True):
            seen |= meetings(best, n)
        chosen.append(best)
    return chosen


def meetings(pair: Pair, values: int) -> set[Any]:
    """Which values of so many factors meet in a pair."""
    return set(combinations(enumerate(pair), values))


QUICK: tuple[Pair, ...] = (
    ("zero0", 1, "full", "fp32", "zero3", 3),
    ("zero3", 3, "full", "bf16", "zero2", 1),
    ("zero2", 1, "lora", "fp32", "zero3", 2),
)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny reward model without dropout, 64 pairs, 6 samples per step."""
    folder = tmp_path_factory.mktemp("recipe")
    values = tiny_recipe("rm", folder)
    values |= {"steps": 9, "batch": {"total": 6, "micro": 2}, "save": {"every": 3, "keep": 9}, "precision": "fp32"}
    return str(write_recipe(folder, values))


@pytest.fixture(scope="module")
def whole(recipe: str, tmp_path_factory: pytest.TempPathFactory, two: Workers) -> list[dict[str, Any]]:
    """The metrics of a run with two processes that nothing broke off."""
    folder = tmp_path_factory.mktemp("whole")
    two(RUN, recipe=recipe, run_dir=str(folder))
    return metric_rows(folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    save_model(folder)
    return folder


@pytest.fixture
def workers(one: Workers, two: Workers, three: Workers) -> Mapping[int, Workers]:
    return {1: one, 2: two, 3: three}


def close(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    """Rows of metrics.jsonl: equal but for rounding, which Adam makes larger where a gradient is nearly zero."""
    assert [(row["step"], row["samples"], row["split"]) for row in ours] == [
        (row["step"], row["samples"], row["split"]) for row in theirs
    ]
    for mine, other in zip(ours, theirs, strict=True):
        for name in ("loss", "margin", "lr", "grad_norm"):
            if name in mine:
                assert mine[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), (mine["step"], name)


def same(ours: Told, theirs: Told) -> None:
    """What the ranks of two runs hold: equal to the bit, and something."""
    mine, other = ours[0]["state"], theirs[0]["state"]
    assert other, "there is something"
    names = [name for name, told in other.items() if told != mine.get(name)]
    assert not names, f"{len(names)} of {len(other)} differ: {names[:6]}"
    assert mine.keys() == other.keys(), "nothing more either"
    assert all(told["state"] == mine for told in ours), "the same on every rank"


def test_in_the_grid_any_two_values_meet() -> None:
    found = set().union(*(meetings(pair, 2) for pair in grid()))
    factors = [sorted({source[i] for source in SOURCES}, key=str) for i in range(4)]
    factors += [sorted({target[i] for target in TARGETS}, key=str) for i in range(2)]
    for (i, ours), (j, theirs) in combinations(enumerate(factors), 2):
        assert {((i, a), (j, b)) for a, b in product(ours, theirs)} <= found, (i, j)
    assert len(grid()) == 72


def quick(all_of: Iterable[Any], few: Container[Any]) -> list[Any]:
    """The parameters of a test, those not among the few for `make test-all`."""
    return [one if one in few else pytest.param(one, marks=pytest.mark.slow) for one in all_of]


PAIRS = quick({**dict.fromkeys(QUICK), **dict.fromkeys(grid())}, QUICK)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
def test_all_state_goes_over_to_the_bit(pair: Pair, model: str, tmp_path: Path, workers: Mapping[int, Workers]) -> None:
    preset, processes, kind, precision, next_preset, next_processes = pair
    made = {"model": model, "kind": kind, "precision": precision}
    wrote = workers[processes](f"{CASES}source", folder=str(tmp_path), preset=preset, **made)
    went_on = workers[next_processes](f"{CASES}target", checkpoint=wrote[0]["checkpoint"], preset=next_preset, **made)
    same(went_on, wrote)
    ours, theirs = went_on[0]["losses"], wrote[0]["losses"]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-6), "before any new step"
    assert ours == pytest.approx(theirs, rel=TOLERANCE[precision])
    moments = [told for name, told in wrote[0]["state"].items() if name.endswith("exp_avg_sq")]
    assert moments
    assert all(told.endswith("True") for told in moments), "no moment is all zero"


@pytest.mark.parametrize("counts", [(1, 2), SLOW((2, 1))])  # the first has both classes
def test_micro_batches_may_become_several_in_bf16(
    counts: tuple[int, int], model: str, tmp_path: Path, two: Workers
) -> None:
    """With several, their gradients are summed in fp32, and at stage 1 another class of DeepSpeed holds the state."""
    before, after = ({"model": model, "kind": "full", "precision": "bf16", "accumulate": count} for count in counts)
    wrote = two(f"{CASES}source", folder=str(tmp_path), preset="zero1", **before)
    went_on = two(f"{CASES}target", checkpoint=wrote[0]["checkpoint"], preset="zero1", **after)
    same(went_on, wrote)
    assert went_on[0]["losses"] == pytest.approx(wrote[0]["losses"], rel=TOLERANCE["bf16"])


def test_a_run_goes_on_with_two_processes_one_and_three(
    recipe: str, whole: list[dict[str, Any]], tmp_path: Path, one: Workers, two: Workers, three: Workers
) -> None:
    for workers, preset, crash in ((two, "zero3", 5), (one, "zero2_offload", 8), (three, "zero1", None)):
        workers(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=[f"ds_config={preset}"], crash_at=crash)
    close(metric_rows(tmp_path / "run"), whole)
    told = read_events(tmp_path / "run", "resharded")
    assert [event["step"] for event in told] == [3, 6]
    assert "zero3 (ZeRO stage 3) on 2 processes and continues with zero2_offload (ZeRO stage 2) on 1" in told[0]["how"]


@pytest.mark.slow
def test_a_run_goes_on_where_processes_share_tokens_or_not(
    recipe: str, whole: list[dict[str, Any]], tmp_path: Path, one: Workers, two: Workers
) -> None:
    places = ((two, "zero3", 2, 5), (one, "zero2", 1, 8), (two, "zero1", 2, None))
    for workers, preset, sequence, crash in places:
        sets = [f"ds_config={preset}", f"parallel.sequence={sequence}"]
        workers(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets, crash_at=crash)
    rows = metric_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [row["step"] for row in whole]
    close(rows, whole)


CHAINS = {
    "offload on, off, on": ({}, ("zero2_offload", 2), ("zero3", 1), ("zero3_offload", 3)),
    "lion": ({"optim": {"name": "lion", "lr": 1e-3}}, ("zero1", 2), ("zero3", 3), ("zero0", 1)),
    "sgd": ({"optim": {"name": "sgd", "lr": 0.1}}, ("zero3", 3), ("zero2_offload", 1), ("zero1", 2)),
}


@pytest.mark.slow  # pairs of places: test_all_state_goes_over_to_the_bit; a run: the one above
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_of_places_is_one_run(name: str, model: str, tmp_path: Path, workers: Mapping[int, Workers]) -> None:
    more, *places = CHAINS[name]
    pairs, losses, unbroken = follow(places, tmp_path, workers, {"model": model, "kind": "full", **more})
    for ours, theirs in pairs:
        same(ours, theirs)
    assert losses == pytest.approx(unbroken, rel=1e-5)


@pytest.mark.slow
def test_weights_and_state_on_a_disk_go_over_and_back(tmp_path: Path, workers: Mapping[int, Workers]) -> None:
    if not ctypes.util.find_library("aio"):
        pytest.skip("offloading to NVMe needs Debian's libaio-dev")
    save_model(str(tmp_path / "model"), {**SHAPE, "vocab_size": 24_000})
    made = {"model": str(tmp_path / "model"), "kind": "full", "zero": NVME}
    places = [("zero3_nvme", 2), ("zero2", 1), ("zero3_nvme", 3), ("zero0", 2)]
    try:
        pairs, losses, unbroken = follow(places, tmp_path, workers, made)
    finally:
        workers[2].close()  # DeepSpeed keeps pinned buffers
        workers[3].close()
    for ours, theirs in pairs:
        same(ours, theirs)
    assert losses == pytest.approx(unbroken, rel=1e-5)


def follow(
    places: Sequence[tuple[str, int]], folder: Path, workers: Mapping[int, Workers], made: dict[str, Any]
) -> tuple[list[tuple[Told, Told]], list[float], list[float]]:
    """Three steps at each place, beside as many unbroken at the first.

    Returns (what a place took over, what the one before it left) for each place but the first, the losses of these
    places, and those of the unbroken run.
    """
    (preset, processes), *others = places
    source = {"folder": str(folder / "0"), "after": 3 * len(others), "preset": preset}
    wrote = workers[processes](f"{CASES}source", **source, **made)
    losses, last, pairs = [], wrote, []
    for number, (preset, processes) in enumerate(others, start=1):
        place = {"checkpoint": last[0]["checkpoint"], "first": 3 * number, "to": str(folder / str(number))}
        told = workers[processes](f"{CASES}target", **place, preset=preset, **made)
        pairs.append((told, last))
        losses, last = losses + told[0]["losses"], [rank | {"state": rank["left"]} for rank in told]
    return pairs, losses, wrote[0]["losses"]


def test_accumulation_may_change_with_the_processes(model: str, tmp_path: Path, workers: Mapping[int, Workers]) -> None:
    made = {"model": model, "kind": "full"}
    wrote = workers[3](f"{CASES}source", folder=str(tmp_path), preset="zero2", accumulate=1, **made)
    went_on = workers[1](f"{CASES}target", checkpoint=wrote[0]["checkpoint"], preset="zero1", accumulate=5, **made)
    same(went_on, wrote)
    assert went_on[0]["losses"] == pytest.approx(wrote[0]["losses"], rel=1e-5)


LEARNING = {
    "a rate that is scaled goes by the samples of a step": ["optim.scale_lr=linear"],
    "a recipe without a total keeps the one it began with": ["batch={micro: 2, accumulate: 2}"],
    "micro-batches of so many tokens, with as many passes as each step needs": [
        "batch={total: 7, tokens_per_micro: 250}"
    ],
    "an end in mid-epoch, of a step with fewer samples than processes": ["steps=null", "epochs=0.86"],
    "a total that three processes do not share evenly": ["batch={total: 7, micro: 2}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("claim", quick(LEARNING, tuple(LEARNING)[2:3]))
def test_what_is_learnt_stays(claim: str, recipe: str, tmp_path: Path, workers: Mapping[int, Workers]) -> None:
    sets = ["steps=6", *LEARNING[claim]]
    whole = workers[2](RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=sets)
    workers[2](RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets, crash_at=5)
    again = workers[3](RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=[*sets, "ds_config=zero3"])
    close(metric_rows(tmp_path / "run"), metric_rows(tmp_path / "whole"))
    assert by_step(again) == by_step(whole)[3:], "the same samples in each step"


def by_step(told: list[dict[str, Any]]) -> list[list[int]]:
    """The ids of each step, over all ranks."""
    return [
        sorted(sample for ids in step for sample in ids)
        for step in zip(*(rank["samples"] for rank in told), strict=True)
    ]


@pytest.mark.parametrize(
    ("before", "after"), [("false", "true"), pytest.param("true", "false", marks=pytest.mark.slow)]
)
def test_packing_may_be_switched_between(
    before: str, after: str, recipe: str, whole: list[dict[str, Any]], tmp_path: Path, workers: Mapping[int, Workers]
) -> None:
    run = {"recipe": recipe, "run_dir": str(tmp_path / "run")}
    workers[2](RUN, **run, sets=[f"batch.packing={before}"], crash_at=5)
    workers[2](RUN, **run, sets=[f"batch.packing={after}", "batch.prefix_sharing=false"])
    rows = metric_rows(tmp_path / "run")
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in whole], rel=1e-5)
    close(rows, whole)  # steps, samples, learning rates and gradient norms too


@pytest.mark.slow
def test_another_optimizer_begins_anew_and_says_so(
    recipe: str, whole: list[dict[str, Any]], tmp_path: Path, workers: Mapping[int, Workers]
) -> None:
    workers[2](RUN, recipe=recipe, run_dir=str(tmp_path / "run"), crash_at=5)
    other = {"recipe": recipe, "run_dir": str(tmp_path / "run"), "sets": ["optim.name=lion", "ds_config=zero3"]}
    with pytest.raises(WorkerError, match=r"optim\.name: is 'lion', but the run was started with 'adamw'"):
        workers[1](RUN, **other)
    workers[1](RUN, **other, allowed=["optim.name", "optim.betas"])
    ours, theirs = metric_rows(tmp_path / "run"), whole
    assert ours[3]["loss"] == pytest.approx(theirs[3]["loss"], rel=1e-6), "the weights go on"
    assert ours[5]["loss"] != pytest.approx(theirs[5]["loss"], rel=1e-6), "and learn in another way"
    (told,) = read_events(tmp_path / "run", "optimizer_state_reset")
    assert "was adamw and is lion" in told["what"]
    assert told["step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [(("zero2", 2), ("zero3", 1)), pytest.param(("zero3", 2), ("zero1", 3), marks=pytest.mark.slow)],
)
def test_frozen_weights_may_thaw(
    before: tuple[str, int], after: tuple[str, int], recipe: str, tmp_path: Path, workers: Mapping[int, Workers]
) -> None:
    frozen, short = ["model.freeze=[model.layers.0]"], ["steps=6"]
    run = {"recipe": recipe, "run_dir": str(tmp_path / "run")}
    workers[before[1]](
        RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=[f"ds_config={before[0]}", *frozen, *short]
    )
    workers[before[1]](RUN, **run, sets=[f"ds_config={before[0]}", *frozen, *short], crash_at=5)
    workers[after[1]](RUN, **run, sets=[f"ds_config={after[0]}", *short], allowed=["model.freeze"])
    ours, theirs = metric_rows(tmp_path / "run"), metric_rows(tmp_path / "whole")
    assert ours[3]["loss"] == pytest.approx(theirs[3]["loss"], rel=1e-6), "the weights go on"
    assert ours[3]["grad_norm"] > theirs[3]["grad_norm"] * 1.0001, "more of them learn"
    (told,) = read_events(tmp_path / "run", "optimizer_state_reset")
    assert "model.layers.0" in told["what"]


LARGE = {"model_type": "llama", "vocab_size": 20_000, "hidden_size": 768, "intermediate_size": 3072,
         "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True}  # fmt: skip
"""202 MiB in fp32, 607 MiB with Adam's moments; the embedding has 58 MiB."""


@pytest.mark.slow
def test_a_load_holds_no_full_copy_in_memory(tmp_path: Path, workers: Mapping[int, Workers]) -> None:
    save_model(str(tmp_path / "model"), LARGE)
    made = {"model": str(tmp_path / "model"), "kind": "full", "zero": {}}
    wrote = workers[2](f"{CASES}source", folder=str(tmp_path), preset="zero3", after=0, **made)
    workers[2].close()
    for processes, preset in ((1, "zero2"), (1, "zero2_offload"), (1, "zero3"), (3, "zero3"), (3, "zero2")):
        told = workers[processes](f"{CASES}footprint", checkpoint=wrote[0]["checkpoint"], preset=preset, **made)
        workers[processes].close()
        for found in told:
            moments = found["held"] - found["weights"]  # there are none before
            grown = found["peak"] - found["before"]
            print(processes, preset, {name: value >> 20 for name, value in found.items()}, "MiB, grown", grown >> 20)
            if (processes, preset) == (3, "zero2"):  # its last act is the gathering of weights that ends each step
                assert found["peak"] <= found["step"] * 1.02
            else:
                assert grown - moments < 1.2 * (found["largest"] + found["weights"])


@pytest.mark.slow
def test_the_run_of_the_docs_goes_on_as_they_say(data: Path, tmp_path: Path, workers: Mapping[int, Workers]) -> None:
    """By its script through the command line, and its sample ids in worker processes."""
    done = subprocess.run(
        ["sh", str(EXAMPLES / "elastic-hh.sh"), str(data / "hh"), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=560,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = tmp_path / "out/elastic"
    assert [event["step"] for event in read_events(run, "resumed")] == [20, 40]
    assert [event["world_size"] for event in read_events(run, "started")] == [2, 1, 3]
    assert len(metric_rows(run)) == 60
    close(metric_rows(run), metric_rows(tmp_path / "out/unbroken"))


@pytest.mark.slow
def test_the_run_of_the_docs_takes_the_same_samples(data: Path, tmp_path: Path, workers: Mapping[int, Workers]) -> None:
    recipe = {"recipe": str(EXAMPLES / "elastic-hh.yaml")}
    train = f"data.train={data / 'hh/helpful-train.jsonl'}"
    whole = by_step(workers[2](RUN, **recipe, run_dir=str(tmp_path / "whole"), sets=[train, "ds_config=zero3"]))
    taken: list[list[int]] = []
    for processes, preset, crash in ((2, "zero3", 21), (1, "zero2_offload", 41), (3, "zero1", None)):
        sets = [train, f"ds_config={preset}"]
        told = workers[processes](RUN, **recipe, run_dir=str(tmp_path / "run"), sets=sets, crash_at=crash)
        taken += by_step(told)[: 20 if crash else None]
    assert taken == whole
    close(metric_rows(tmp_path / "run"), metric_rows(tmp_path / "whole"))

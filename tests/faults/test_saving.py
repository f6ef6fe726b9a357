"""A checkpoint is whole or absent, whatever happens to whoever writes it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from tests.faults.all_faults import FEW, damages, full_disks, kills, passing_errors, replacing, some_kills
from tests.faults.faults import WARM, Faults, Outcome, small_disk
from tests.faults.fork_server import ForkServer


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    made = ForkServer(*WARM)
    yield made
    made.close()


@pytest.fixture(scope="module")
def faults(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(fork_server, tmp_path_factory.mktemp("faults"))


def outcomes(rows: Iterable[object]) -> list[Outcome]:
    """All of them; every one has been judged."""
    found: list[Outcome] = [row() for row in rows]  # type: ignore[operator]
    assert all(outcome.lost <= 1 for outcome in found), "more than a save interval"
    return found


@pytest.mark.slow
def test_a_kill_at_a_point_that_stands_for_others_loses_one_step_at_most(faults: Faults) -> None:
    assert {outcome.found for outcome in outcomes(some_kills(faults, FEW))} == {3, 4}


@pytest.mark.slow
def test_a_damaged_file_of_any_kind_is_passed_over(faults: Faults) -> None:
    few = [row for number, row in enumerate(damages(faults)) if number % 7 == 0]
    assert len(outcomes(few)) >= 5


def test_a_disk_that_is_full_for_one_rank_stops_both(faults: Faults, tmp_path: Path) -> None:
    outcome = faults.full_disk(tmp_path / "run", "limit 1000", 1, None)
    assert "writing step-00000004 failed on 1 of 2 ranks (rank 1: OSError" in outcome.said


def test_an_error_that_passes_on_one_rank_ends_neither(faults: Faults) -> None:
    assert {outcome.lost for outcome in outcomes(islice(passing_errors(faults), 1))} == {0}


@pytest.mark.slow  # kills at points that stand for others: above
def test_a_kill_at_a_random_moment_loses_what_was_not_yet_whole(faults: Faults) -> None:
    draw, reach = random.Random(0), 0.08  # seconds in which a machine that does nothing else saves several times
    while len({faults.kill_both(draw.random() * reach).found for _ in range(20)}) == 1:
        reach *= 3
        assert reach < 3


@pytest.mark.slow
def test_a_kill_at_any_point_loses_one_step_at_most(faults: Faults) -> None:
    assert len(outcomes(kills(faults))) >= 30


@pytest.mark.slow
def test_a_kill_at_any_point_of_replacing_a_checkpoint_loses_nothing(faults: Faults) -> None:
    assert {outcome.lost for outcome in outcomes(replacing(faults))} == {0}


@pytest.mark.slow
def test_a_kill_at_any_point_behind_training_loses_one_step_at_most(faults: Faults) -> None:
    assert len(outcomes(kills(faults, background=True))) >= 30


@pytest.mark.slow
def test_each_kind_of_damage_is_passed_over_with_its_reason(faults: Faults) -> None:
    assert len(outcomes(damages(faults))) >= 40


@pytest.mark.slow
def test_a_full_disk_at_any_point_leaves_the_older_ones(faults: Faults, tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path / "probe"):
            pass
    except PermissionError as error:
        pytest.skip(str(error))
    assert len(outcomes(full_disks(faults, tmp_path))) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_deepspeeds_engines_lose_as_little(preset: str, tmp_path: Path) -> None:
    fork_server = ForkServer(*WARM, "deepspeed")
    try:
        assert len(outcomes(some_kills(Faults(fork_server, tmp_path, engine=preset), FEW))) == len(FEW)
    finally:
        fork_server.close()

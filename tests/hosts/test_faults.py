"""Faults of a launch on two hosts: exit code, named cause, no process left, resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts import leased, starts, stopped
from tests.hosts.faults import FAULTS, SMOKE, Fault, Outcome, name, suffer
from tests.hosts.lab import Lab
from tests.hosts.running import Run

pytestmark = pytest.mark.hosts


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=name(fault)) for fault in FAULTS if name(fault) in SMOKE]
)  # fmt: skip
def test_the_launch_ends_with_the_truth(fault: Fault, lab: Lab, tmp_path: Path, unbroken: Run) -> None:
    assert suffer(fault, lab, tmp_path / "job", unbroken.losses()).wrong == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=name(fault)) for fault in FAULTS if name(fault) not in SMOKE]
)  # fmt: skip
def test_the_launch_ends_with_the_truth_whatever_happens(fault: Fault, lab: Lab, tmp_path: Path, unbroken: Run) -> None:
    assert suffer(fault, lab, tmp_path / "job", unbroken.losses()).wrong == ()


@pytest.mark.parametrize("refusal", [pytest.param(one, id=one.what) for one in starts.REFUSALS])
def test_a_launch_that_cannot_be_is_refused_before_it_starts(refusal: starts.Refusal, lab: Lab, tmp_path: Path) -> None:
    assert starts.refuse(refusal, lab, tmp_path / "job").wrong == ()


@pytest.mark.slow
def test_hosts_whose_own_name_is_loopback_just_work(
    make_lab: Callable[..., Lab], tmp_path: Path, unbroken: Run
) -> None:
    assert starts.own_name_is_loopback(make_lab(style="debian"), tmp_path / "job", unbroken.losses()).wrong == ()


@pytest.mark.slow
def test_a_host_may_start_what_runs_on_another(lab: Lab, tmp_path: Path, unbroken: Run) -> None:
    assert starts.only_another_host(lab, tmp_path / "job", unbroken.losses()).wrong == ()


@pytest.mark.slow
def test_stopping_a_job_leaves_the_other_one_alone(lab: Lab, tmp_path: Path, unbroken: Run) -> None:
    assert starts.one_of_two_jobs(lab, tmp_path / "jobs", unbroken.losses()).wrong == ()


@pytest.mark.slow
def test_a_signal_while_it_starts_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    assert starts.asked_before_it_began(lab, tmp_path / "job").wrong == ()


@pytest.mark.slow
def test_a_killed_rank_ends_the_commands_of_all_hosts(lab: Lab, tmp_path: Path) -> None:
    assert starts.rank_killed_without_ssh(lab, tmp_path / "job").wrong == ()


@pytest.mark.slow
def test_stopping_the_command_of_one_host_stops_all(lab: Lab, tmp_path: Path) -> None:
    assert starts.stopped_without_ssh(lab, tmp_path / "job").wrong == ()


def test_a_host_whose_worker_is_stopped_ends_its_ranks(lab: Lab, tmp_path: Path) -> None:
    assert stopped.host_worker_stopped(lab, tmp_path / "job", (), again=False).wrong == ()


@pytest.mark.slow
@pytest.mark.parametrize("row", stopped.STOPPED)
def test_nothing_goes_on_without_its_head(
    row: Callable[..., starts.Outcome], lab: Lab, tmp_path: Path, unbroken: Run
) -> None:
    assert row(lab, tmp_path / "job", unbroken.losses()).wrong == ()


@pytest.mark.slow
def test_login_shells_may_print_what_they_like(lab: Lab, tmp_path: Path, unbroken: Run) -> None:
    assert starts.noisy_login_shells(lab, tmp_path / "job", unbroken.losses()).wrong == ()


@pytest.mark.slow
@pytest.mark.parametrize("make", [leased.started_twice, leased.taken_over])
def test_one_launch_at_a_time_holds_a_run_folder(
    make: Callable[..., Outcome], lab: Lab, tmp_path: Path, unbroken: Run
) -> None:
    assert make(lab, tmp_path / "job", unbroken.losses()).wrong == ()

"""Diagnosis of missing and late ranks from what the ranks reported."""

from __future__ import annotations

from typing import Any

import pytest

from dstrain.training.health.diagnosis import (
    Failure,
    RankStatus,
    StatusReport,
    diagnose,
    format_ranks_by_host,
    format_status_table,
)

HOSTS = {0: "host1", 1: "host2", 2: "host2", 3: "host3"}


def line(entered: int, left: int | None = None, *names: str, seconds: float = 20.0, ranks: int = 4) -> dict[str, Any]:
    known = names or ("all_reduce",) * min(entered, 8)
    left = entered if left is None else left
    return {"entered": entered, "left": left, "seconds": seconds, "names": list(known), "ranks": list(range(ranks))}


def make_status(rank: int, state: Any = "alive", idle_seconds: float = 20.0, **collectives: Any) -> RankStatus:
    return RankStatus(
        rank=rank,
        host=HOSTS[rank],
        state=state,
        phase="step 13",
        idle_seconds=idle_seconds,
        collectives=collectives,
    )


def judged(statuses: list[RankStatus], missing: tuple[int, ...] = (), why: str = "") -> Failure:
    by_rank = {status.rank: status for status in statuses}
    return diagnose(StatusReport(statuses=by_rank, answered_ranks=frozenset(by_rank) - {*missing}, reason=why), 0)


WAITS = line(45, 44)


@pytest.mark.parametrize(
    ("missing", "why", "says"),
    [
        ((1,), "Timed out waiting 20000ms for recv", "rank 1 on host2 went silent: 3 of 4 ranks waited 20 s in all_reduce no. 45; see logs/rank-00001.log there"),
        ((1,), "Connection closed by peer", "rank 1 on host2 has ended, or lost the network while 3 of 4 ranks waited 20 s in all_reduce no. 45; see"),
        ((1, 2), "Timed out", "ranks 1, 2 on host2 went silent: 2 of 4 ranks waited"),
        ((0, 3), "Timed out", "rank 0 on host1 and rank 3 on host3 went silent: 2 of 4 ranks waited"),
    ],
)  # fmt: skip
def test_who_does_not_answer_is_named(missing: tuple[int, ...], why: str, says: str) -> None:
    statuses = [make_status(rank, world=WAITS) if rank not in missing else make_status(rank) for rank in range(4)]
    verdict = judged(statuses, missing, why)
    assert verdict.error.startswith(says)
    assert verdict.ranks == missing
    assert f"logs/rank-{min(missing):05d}.log" in verdict.error


def test_the_rank_that_did_not_enter_is_named_with_what_it_did_not_enter() -> None:
    behind = make_status(2, world=line(44, 44, "barrier"), idle_seconds=21.0)
    verdict = judged(
        [make_status(0, "lost", world=WAITS), make_status(1, world=WAITS), behind, make_status(3, world=WAITS)]
    )
    assert verdict.ranks == (2,)
    assert verdict.error == (
        "rank 2 on host2 did not enter all_reduce no. 45 that 3 of 4 ranks waited in for 20 s: it is in step 13, where "
        "nothing moved for 21 s; see logs/stacks/rank-00002.txt"
    )
    assert verdict.table.splitlines() == [
        "rank  host   state  doing    last collective             idle seconds",
        "2     host2  alive  step 13  barrier no. 44              21",
        "0     host1  lost   step 13  all_reduce no. 45 (inside)  20",
        "1     host2  alive  step 13  all_reduce no. 45 (inside)  20",
        "3     host3  alive  step 13  all_reduce no. 45 (inside)  20",
    ]


def test_on_a_gpu_nobody_stays_in_a_collective_and_the_others_are_far_ahead() -> None:
    ahead = line(47, 47, "all_reduce", "barrier", "reduce", "all_gather")
    verdict = judged(
        [
            make_status(0, world=ahead),
            make_status(1, world=line(44)),
            make_status(2, world=ahead),
            make_status(3, world=ahead),
        ]
    )
    assert verdict.error.startswith("rank 1 on host2 did not enter barrier no. 45 that 3 of 4 ranks waited in")


def test_a_rank_that_never_entered_anything_in_a_group_is_behind() -> None:
    verdict = judged(
        [
            make_status(0, world=line(1, 0)),
            make_status(1),
            make_status(2, world=line(1, 0)),
            make_status(3, world=line(1, 0)),
        ]
    )
    assert verdict.error.startswith("rank 1 on host2 did not enter all_reduce no. 1 that 3 of 4")


def test_only_members_of_a_group_are_compared() -> None:
    both = line(9, 8, ranks=2)
    verdict = judged(
        [
            make_status(0, world=WAITS, pair=both),
            make_status(1, world=WAITS, pair=both),
            make_status(2, world=WAITS),
            make_status(3, world=WAITS),
        ]
    )
    assert verdict.ranks == ()


def test_the_longest_wait_counts_not_the_busiest_group() -> None:
    """The background save runs ahead and behind in a group of its own."""
    saving = [line(number, seconds=0.1) for number in (7, 8, 8, 7)]
    main = [line(45, 44), line(45, 44), line(45, 44), line(44)]
    verdict = judged([make_status(rank, main=main[rank], saving=saving[rank]) for rank in range(4)])
    assert verdict.ranks == (3,)


def test_ranks_that_go_different_ways_are_told_apart() -> None:
    other = line(45, 44, "barrier")
    verdict = judged(
        [
            make_status(0, world=WAITS),
            make_status(1, world=other),
            make_status(2, world=WAITS),
            make_status(3, world=WAITS),
        ]
    )
    assert verdict.ranks == (1,)
    assert verdict.error == (
        "rank 1 on host2 entered barrier as collective no. 45, where others entered all_reduce; see logs/stacks"
    )


def test_of_two_names_equally_frequent_all_ranks_blame_the_same_one() -> None:
    pair = [make_status(rank, world=line(45, 45, name, ranks=2)) for rank, name in enumerate(("zeta", "alpha"))]
    assert judged(pair).ranks == (0,)
    assert judged(pair[::-1]).ranks == (0,), "each rank has its own status first"


def test_a_rank_that_is_behind_in_one_group_comes_before_names_that_differ_in_another() -> None:
    names, counts = ("all_reduce", "barrier"), (8, 7)
    verdict = judged(
        [make_status(rank, a=line(5, 5, names[rank], ranks=2), b=line(counts[rank], ranks=2)) for rank in range(2)]
    )
    assert verdict.error.startswith("rank 1 on host2 did not enter all_reduce no. 8 that 1 of 2 ranks waited in")


def test_where_all_are_alike_the_network_is_to_blame() -> None:
    verdict = judged([make_status(rank, "lost", world=WAITS) for rank in range(4)], why="Connection timed out")
    assert verdict.error.startswith(
        "all ranks answer, but cannot reach each other (Connection timed out): 4 of 4 ranks waited 20 s in all_reduce"
    )
    assert verdict.error.endswith("look at the network between the hosts")


def test_where_nothing_is_known_the_sentence_says_so() -> None:
    assert judged([make_status(0)]).error == "no rank moved for 20 s, and none is behind; see logs/stacks"


def test_many_ranks_are_named_in_short() -> None:
    statuses = {rank: RankStatus(rank=rank, host="big") for rank in range(40)}
    assert format_ranks_by_host([1, 4, 5], statuses) == "ranks 1, 4, 5 on big"
    assert format_ranks_by_host(range(3, 40), statuses) == "ranks 3, 4, 5, 6, 7, 8, 9, 10 and 29 more on big"
    report = StatusReport(statuses=statuses, answered_ranks=frozenset(statuses))
    table = format_status_table(report, [39]).splitlines()
    assert table[1].startswith("39    big")
    assert table[-1] == "and 8 more"

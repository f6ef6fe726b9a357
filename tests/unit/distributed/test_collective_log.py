"""Counting collectives, and telling a lost process from other errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from dstrain.distributed.collective_log import HISTORY_SIZE, CollectiveLog, GroupLog
from dstrain.distributed.patches import log_calls
from dstrain.distributed.store import find_connection_error, unknown_peer_message
from dstrain.errors import PeerFailureError


@pytest.fixture
def log() -> CollectiveLog:
    log = CollectiveLog()
    log._group_logs.update({None: GroupLog((0, 1)), "pair": GroupLog((0, 1))})
    return log


def test_a_collective_is_counted_in_its_group_however_it_is_given(log: CollectiveLog) -> None:
    def reduce(tensor: Any, op: Any = None, group: Any = None) -> Any:
        return tensor, log.group_log(group).snapshot()

    counted = log_calls("reduce", reduce, log)
    assert counted(3)[0] == 3
    assert counted(3, None, "pair")[1]["entered"] == 1
    within = counted(3, group="pair")[1]
    assert (within["entered"], within["left"], within["names"]) == (2, 1, ["reduce", "reduce"])
    assert [log.group_log(group).last_returned for group in (None, "pair")] == [1, 2]


def test_a_collective_that_fails_stays_entered(log: CollectiveLog) -> None:
    def broken(tensor: Any, group: Any = None) -> Any:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        log_calls("broken", broken, log)(3)
    line = log.group_log(None).snapshot()
    assert (line["entered"], line["left"]) == (1, 0)


def test_the_newest_names_are_kept_in_order() -> None:
    line = GroupLog((0,))
    for number in range(1, 1001):
        line.last_started = number
        line.recent_names[number % HISTORY_SIZE] = f"no. {number}"
    names = line.snapshot()["names"]
    assert names[-1] == "no. 1000"
    assert names == [f"no. {number}" for number in range(1001 - len(names), 1001)]


def test_idle_time_counts_from_the_last_movement(log: CollectiveLog) -> None:
    log._last_activity -= 100
    for line in log._group_logs.values():
        line.last_activity -= 50
    assert 49 < log.idle_seconds() < 52
    log.record_progress("save", 7)
    assert log.idle_seconds() < 1
    assert (log.phase, log.step) == ("save", 7)


def test_a_group_that_this_rank_is_not_in_is_not_logged(log: CollectiveLog) -> None:
    other = log.group_log(dist.GroupMember.NON_GROUP_MEMBER)
    assert other.ranks == ()
    assert dist.GroupMember.NON_GROUP_MEMBER not in log._group_logs


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] "


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (RuntimeError(GLOO + "Connection closed by peer [10.0.0.2]:1"), "Connection closed by peer [10.0.0.2]:1"),
        (RuntimeError(GLOO + "Read error [::1]:1: reset. This is typically"), "Read error [::1]:1: reset"),
        (dist.DistStoreError("wait timeout after 3000ms, keys: /1"), "wait timeout after 3000ms, keys: /1"),
        (dist.DistBackendError("NCCL error in: x.cpp:1\nncclRemoteError"), "NCCL error in: x.cpp:1"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError(GLOO), None),
    ],
)
def test_a_lost_process_is_told_from_other_errors(error: Exception, why: str | None) -> None:
    assert find_connection_error(error) == why
    wrapped = PeerFailureError("saving", "gone", "start again")
    wrapped.__cause__ = error
    assert find_connection_error(wrapped) == why


def test_a_lost_process_without_a_rank_is_described() -> None:
    assert unknown_peer_message("reset") == "another process has ended or does not answer (reset); see its log"

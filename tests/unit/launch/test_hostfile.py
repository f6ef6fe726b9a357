"""Hostfiles, and the options that select hosts."""

from __future__ import annotations

import pytest

from dstrain.errors import UsageError
from dstrain.launch.hostfile import Host, parse_hostfile, read_hostfile, select_hosts

TEXT = "# ours\nhost2 slots=4\n\nhost1\tslots=8  # the old one\nhost3 slots=2 max_slots=2\n"
HOSTS = parse_hostfile(TEXT, "F")


def test_a_hostfile_keeps_its_order_and_forgives_comments():
    assert [(host.name, len(host.slots), host.location) for host in HOSTS] == [
        ("host2", 4, "F:2"), ("host1", 8, "F:4"), ("host3", 2, "F:5"),
    ]  # fmt: skip


def test_all_faults_of_a_hostfile_come_at_once_with_their_lines():
    with pytest.raises(UsageError) as caught:
        parse_hostfile(
            "host1 slots=2\nhost1 slots=4\nhost2\nhost3 slots=0\n-oProxyCommand=x slots=1\na;b slots=1\n", "F"
        )
    assert [fault.where for fault in caught.value.faults] == ["F:2", "F:3", "F:4", "F:5", "F:6"]
    assert "host1 is named twice (F:1); give it one line" in str(caught.value)
    assert "'-oProxyCommand=x' is not a host name" in str(caught.value)
    with pytest.raises(UsageError, match="names no host; write one line per host"):
        parse_hostfile("# nothing\n", "F")


def test_a_hostfile_that_is_not_there_is_no_launch_on_this_machine(tmp_path):
    with pytest.raises(UsageError, match=r"hosts: cannot be read \(No such file"):
        read_hostfile(str(tmp_path / "hosts"))
    with pytest.raises(UsageError, match=r"cannot be read \(Is a directory"):
        read_hostfile(str(tmp_path))


def test_a_hostfile_that_was_written_on_windows_is_read(tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfhost1 slots=2\r\n\r\nhost2 slots=2\r\n")
    assert [host.name for host in read_hostfile(str(tmp_path / "hosts"))] == ["host1", "host2"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, {"host2": (0, 1, 2, 3), "host1": tuple(range(8)), "host3": (0, 1)}),
        ({"include": "host1:0,2@host2"}, {"host2": (0, 1, 2, 3), "host1": (0, 2)}),
        ({"include": "host3"}, {"host3": (0, 1)}),
        ({"exclude": "host1@host2:0,3"}, {"host2": (1, 2), "host3": (0, 1)}),
        ({"num_nodes": 1}, {"host2": (0, 1, 2, 3)}),
        ({"num_gpus": 2}, {"host2": (0, 1), "host1": (0, 1), "host3": (0, 1)}),
    ],
)
def test_options_choose_from_the_hosts_in_the_files_order(options, left):
    assert {host.name: host.slots for host in choose(**options)} == left
    assert list(left) == [host.name for host in choose(**options)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"include": "host4"}, "host4 is not in the hostfile; did you mean"),
        ({"include": "host1:9"}, "host1 has no slot 9; F:4 gives it 0 to 7"),
        ({"include": "host1:a"}, "'a' is not a list of slots; write"),
        ({"exclude": "host1@host2@host3"}, "leaves no slot to run on; leave"),
        ({"include": "host1", "exclude": "host2"}, "are both set; give only one"),
        ({"include": "host1", "num_nodes": 1}, "cannot be combined with"),
        ({"num_nodes": 4}, "the hostfile names 3 hosts; give 1 to 3"),
        ({"num_gpus": 3}, r"host3 has 2 slots \(F:5\)"),
        ({"num_gpus": 0}, "ask for 1 to 4"),
    ],
)
def test_what_cannot_be_chosen_is_refused(options, said):
    with pytest.raises(UsageError, match=said):
        choose(**options)


def choose(
    include: str = "", exclude: str = "", num_nodes: int | None = None, num_gpus: int | None = None
) -> list[Host]:
    return select_hosts(HOSTS, include, exclude, num_nodes, num_gpus)

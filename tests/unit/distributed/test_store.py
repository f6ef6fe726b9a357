"""What other users of the network can do to a run: nothing that they send is unpickled or run by a terminal."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import psutil
import pytest

from dstrain.distributed import world
from dstrain.distributed.store import RANK_KEY_ENV, _listen_on_master_address, connect_store
from dstrain.errors import RunError
from dstrain.launch.command import LocalLaunch
from dstrain.launch.spawn import make_local_group


def listening_addresses(port: int) -> set[str]:
    """Return the addresses on which this process listens at a port."""
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


@pytest.mark.parametrize(
    ("master", "address", "with_port_file"),
    [("localhost", "127.0.0.1", True), ("localhost", "127.0.0.1", False), ("::1", "::1", False)],
)
def test_the_store_listens_on_one_address_alone(
    master: str, address: str, with_port_file: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as free:
            free.bind((address, 0))
            port = free.getsockname()[1]
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": master, "MASTER_PORT": str(port)}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    place = tmp_path / "port" if with_port_file else None
    store = connect_store(timedelta(seconds=20), place)
    assert listening_addresses(store.port) == {address}


def test_a_master_address_that_leads_to_the_loopback_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's own name is 127.0.1.1 on Debian, where no other host could connect."""
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", ("127.0.1.1", 0))])
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    assert _listen_on_master_address(timedelta(seconds=5)) is None


class Payload:
    """A pickle that makes a folder where it is loaded."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


def test_a_value_that_no_rank_signed_is_not_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RANK_KEY_ENV, "of this run")
    assert world._verify(bytes(world._sign({"a": [1.5]}))) == {"a": [1.5]}
    monkeypatch.setenv(RANK_KEY_ENV, "of another run")
    foreign = bytes(world._sign(Payload(tmp_path / "made")))
    monkeypatch.setenv(RANK_KEY_ENV, "of this run")
    for content in (foreign, pickle.dumps(Payload(tmp_path / "made")), b"", foreign[:20]):
        with pytest.raises(RunError, match=f"is not signed with this run's {RANK_KEY_ENV}"):
            world._verify(content)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("address", "port"), [("localhost", "99999"), ("a" * 64 + ".example", "29500")])
def test_an_impossible_master_address_is_left_to_torch(
    address: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)
    assert _listen_on_master_address(timedelta(seconds=5)) is None


@pytest.mark.parametrize(("local_ranks", "own_key"), [(None, True), (range(2), False)])
def test_ranks_of_one_command_get_a_key_whatever_the_port(
    local_ranks: range | None, own_key: bool, tmp_path: Path
) -> None:
    launch = LocalLaunch((), {RANK_KEY_ENV: "the user's"}, 4, 29500, local_ranks=local_ranks)
    key = make_local_group(launch, tmp_path)._spec.environment[RANK_KEY_ENV]
    assert (key != "the user's", len(key) == 32) == (own_key, own_key)

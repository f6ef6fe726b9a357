"""What other users of the network can do to a run: nothing that they send is unpickled or run by a terminal."""

from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest

from dstrain.config.schema import LaunchConfig
from dstrain.distributed import world
from dstrain.distributed.store import LISTENER_ENV, RANK_KEY_ENV, connect_store, listen_at
from dstrain.errors import RunError
from dstrain.launch.plan import LaunchOptions, plan_launch


def listening_addresses(port: int) -> set[str]:
    """Return the addresses on which this process listens at a port."""
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN and one.laddr.port == port}


@pytest.mark.parametrize(
    ("master", "address", "is_inherited"),
    [("localhost", "127.0.0.1", True), ("localhost", "127.0.0.1", False), ("::1", "::1", False)],
)
def test_the_store_listens_on_one_address_alone(
    master: str, address: str, is_inherited: bool, monkeypatch: pytest.MonkeyPatch
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
    if is_inherited:
        monkeypatch.setenv(LISTENER_ENV, str(listen_at(master, port).detach()))
    store = connect_store(timedelta(seconds=20))
    assert listening_addresses(store.port) == {address}
    assert LISTENER_ENV not in os.environ


@pytest.mark.parametrize(
    "found",
    [
        pytest.param("127.0.1.1", id="a host's own name on Debian, where no other host could connect"),
        pytest.param("192.0.2.1", id="an address of a router"),
        pytest.param(None, id="no address"),
    ],
)
def test_a_master_address_that_others_do_not_reach_here_opens_all_interfaces(
    found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def resolve(*_: object) -> list[Any]:
        if found is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (found, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with listen_at("node1", 0) as listener:
        assert listening_addresses(listener.getsockname()[1]) <= {"::", "0.0.0.0"}


def test_a_name_that_no_host_can_have_opens_all_interfaces() -> None:
    with listen_at("a" * 64 + ".example", 0) as listener:
        assert listening_addresses(listener.getsockname()[1]) <= {"::", "0.0.0.0"}


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


@pytest.mark.parametrize(
    ("options", "own_key"), [({}, True), ({"master_port": 29511}, True), ({"no_ssh": True, "node_rank": 1}, False)]
)
def test_ranks_of_one_command_get_a_key_whatever_the_port(
    options: dict[str, Any], own_key: bool, tmp_path: Path
) -> None:
    (tmp_path / "hosts").write_text("host1 slots=2\nhost2 slots=2\n")
    hostfile = str(tmp_path / "hosts") if options.get("no_ssh") else None
    env = {RANK_KEY_ENV: "the user's", "DS_ACCELERATOR": "cpu"}
    launch = plan_launch(LaunchOptions(num_gpus=2, hostfile=hostfile, **options), [], env, LaunchConfig())
    key = launch.environment[RANK_KEY_ENV]
    assert (key != "the user's", len(key) == 32) == (own_key, own_key)

"""The TCP store of a run and the errors of its connections."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from dstrain.errors import PeerFailureError, RunError
from dstrain.files import atomic_write


def find_connection_error(error: BaseException | None) -> str | None:
    """Return a short reason if the error, or one of its causes, is a lost connection between processes; else None.

    Gloo raises plain RuntimeErrors that begin with a position in its source; NCCL and the store have error classes of their own.
    """
    while error is not None:
        # By name, since this module does not import torch.
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "DistError" in kinds or ("RuntimeError" in kinds and re.match(r"\[\S*gloo/\S+\] ", str(error))):
            return re.sub(r"^\[\S+\] ", "", re.split(r"\. |\n", str(error))[0])
        # Another error, such as a PeerFailureError, may have been raised from torch's.
        error = error.__cause__
    return None


def unknown_peer_message(reason: str) -> str:
    """Return the message for a lost process whose rank is not known."""
    return f"another process has ended or does not answer ({reason}); see its log"


_RANK_0_KEY = "dstrain/rank-0"
"""Key in the store of torchrun's agent: address and port of rank 0's store."""
RANK_KEY_ENV = "DSTRAIN_RANK_KEY"
"""Environment variable with a secret of the ranks of a run; dstrain's launcher sets it."""
_HOST_ERROR_FIXES = {
    "Unable to find interface": "bring its network interface up (`ip link set lo up` for loopback), or set "
    "GLOO_SOCKET_IFNAME to another one",
    "Unable to find address": "bring its network interface up, or set GLOO_SOCKET_IFNAME to one with an address "
    "(`ip address`)",
    "File name too long": "gloo takes host names of up to 63 characters: shorten it, or set GLOO_SOCKET_IFNAME to a "
    "network interface",
    "Resource temporarily unavailable": "raise `ulimit -u`, or the container's limit of process IDs: no more threads "
    "can be started",
}
"""Text in an error of gloo that is caused by this host and not by another process -> what to do."""


def connect_store(timeout: timedelta, port_file: Path | None = None) -> Any:
    """Return the store of all ranks, which rank 0 serves.

    With `port_file`, where all ranks are on one host, rank 0 listens on a free port and writes it to that file: a port
    chosen before the ranks started may be taken by then. Without it, MASTER_ADDR and MASTER_PORT say where to meet, or
    where torchrun's agent has a store: it lives on when ranks are started again, with the keys of the earlier ones, so
    that rank 0 opens its own and writes its address there.

    Reads RANK, WORLD_SIZE and MASTER_*. Raises PeerFailureError where rank 0 does not answer, and RunError for an error
    of this host's network.
    """
    from torch.distributed import rendezvous

    with rendezvous_errors(timeout):
        if port_file:
            store = _open_local_store(port_file, timeout)
        elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _open_store_by_agent(timeout)
        elif (own := _listen_on_master_address(timeout)) is not None:
            store = own
        else:
            store, _, _ = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        return store


def sign(content: bytes) -> bytes:
    """Return the content after its HMAC-SHA256 with the key that the launcher gave the ranks."""
    return hmac.digest(os.fsencode(os.environ.get(RANK_KEY_ENV, "")), content, "sha256") + content


def verify(signed: bytes) -> bytes:
    """Return the content of `sign`. Raises RunError for one that a process without the key wrote."""
    content = signed[hashlib.sha256().digest_size :]
    if not hmac.compare_digest(sign(content), signed):
        raise RunError(
            f"a value of another process is not signed with this run's {RANK_KEY_ENV}; start all ranks with one command, "
            f"or set the same {RANK_KEY_ENV} for all"
        )
    return content


def _open_local_store(port_file: Path, timeout: timedelta) -> Any:
    """Return the store; set MASTER_PORT to its port."""
    from torch.distributed import DistStoreError, TCPStore

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        # Without waiting: the others learn the port from the file that is written next.
        store = _listen_on("127.0.0.1", 0, size, timeout)
        port_file.parent.mkdir(parents=True, exist_ok=True)
        # The others read the file as soon as it exists, so it must exist with its whole content.
        atomic_write(port_file, str(store.port))
    else:
        deadline = time.monotonic() + timeout.total_seconds()
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise DistStoreError("rank 0 did not listen")
            time.sleep(0.02)
        store = TCPStore("127.0.0.1", int(port_file.read_text()), size, is_master=False, timeout=timeout)
    os.environ["MASTER_PORT"] = str(store.port)
    return store


def _open_store_by_agent(timeout: timedelta) -> Any:
    """Return rank 0's store, whose address is in the store of torchrun's agent; set MASTER_ADDR and MASTER_PORT to it.

    The address of an earlier rank 0 may still be there: nobody listens on it any more.
    """
    from torch.distributed import DistStoreError, TCPStore

    host, port, size = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["WORLD_SIZE"])
    agent = TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    if os.environ["RANK"] == "0":
        address = _own_address(host)
        store = _listen_on(address, 0, size, timeout)
        agent.set(_RANK_0_KEY, f"{address} {store.port}")
    else:
        deadline, store = time.monotonic() + timeout.total_seconds(), None
        while store is None:
            if time.monotonic() > deadline:
                raise DistStoreError("rank 0 did not listen")
            if agent.check([_RANK_0_KEY]):
                address, _, text = agent.get(_RANK_0_KEY).decode().partition(" ")
                with contextlib.suppress(OSError):
                    socket.create_connection((address, int(text)), timeout=2).close()
                    store = TCPStore(address, int(text), size, is_master=False, timeout=timeout)
            time.sleep(0.1)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = store.host, str(store.port)
    return store


def _own_address(peer: str) -> str:
    """Return this host's address on the way to another; that of GLOO_SOCKET_IFNAME if this host's name is loopback."""
    family, _, _, _, place = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)  # sends nothing
        address = str(probe.getsockname()[0])
    if address.startswith("127.") and (interface := os.environ.get("GLOO_SOCKET_IFNAME")):
        import psutil

        found = [item.address for item in psutil.net_if_addrs().get(interface, []) if item.family == socket.AF_INET]
        address = found[0] if found else address
    return address


def _listen_on_master_address(timeout: timedelta) -> Any:
    """Return rank 0's store, on the interface of MASTER_ADDR alone.

    torch's own store listens on all interfaces, and has no authentication. None where torch has to open it: on the other
    ranks, and where MASTER_ADDR is no address of this host that the others can reach, as behind NAT.
    """
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if os.environ.get("RANK") != "0" or not port.isdecimal():
        return None
    try:
        # A name's IPv4 address, since other hosts may know no other.
        found = socket.getaddrinfo(address, None, _family_of(address), socket.SOCK_STREAM)[0][4][0]
        # A host's own name often leads to 127.0.1.1, which other hosts cannot reach.
        if str(found).startswith("127.") and address not in ("127.0.0.1", "localhost"):
            return None
        return _listen_on(str(found), int(port), int(os.environ["WORLD_SIZE"]), timeout)
    except (OSError, OverflowError, UnicodeError):  # a port above 65535; a name that IDNA does not allow
        return None


def _listen_on(address: str, port: int, size: int, timeout: timedelta) -> Any:
    """Return a store that listens on one address. `port` 0: any free one. Raises OSError."""
    from torch.distributed import TCPStore

    with socket.socket(_family_of(address), socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        port = listener.getsockname()[1]
        # Without waiting: torch waits for all when the process group starts.
        return TCPStore(
            address,
            port,
            size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def _family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


@contextlib.contextmanager
def rendezvous_errors(timeout: timedelta) -> Iterator[None]:
    """Raise PeerFailureError for a rank that does not come, and RunError for an error of this host's network."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        reason = find_connection_error(error)
        if fix := next((fix for text, fix in _HOST_ERROR_FIXES.items() if text in str(error)), ""):
            raise RunError(
                f"the process group cannot start on {socket.gethostname()} ({reason or error}); {fix}"
            ) from error
        if reason is None:
            raise
        address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        problem = f"not all came within {timeout.total_seconds():g} s ({reason})"
        if time.monotonic() - start < timeout.total_seconds() / 2:  # the time was not the cause
            problem = f"it failed ({reason})"
        fix = f"see the logs of the others, and whether every host reaches {address}"
        raise PeerFailureError("meeting the other processes", problem, fix) from error

"""The TCP store of a run and the errors of its connections."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import re
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from dstrain.errors import PeerFailureError, RunError, UsageError


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
LISTENER_ENV = "DSTRAIN_LISTENER"
"""Environment variable of rank 0 with the descriptor of a socket that listens for the ranks."""
MAX_WAITING_RANKS = 4096
"""Connections that the kernel keeps until rank 0, which starts later than the socket is opened, accepts them."""
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


def connect_store(timeout: timedelta) -> Any:
    """Return the store of all ranks, which rank 0 serves.

    Ranks meet at MASTER_ADDR and MASTER_PORT: dstrain's launcher listens there before it starts rank 0, which inherits
    the socket, so that no other process can take the port. Under torchrun its agent has a store there, which lives on
    when ranks are started again, with the keys of the earlier ones: rank 0 opens its own and writes its address there.

    Reads RANK, WORLD_SIZE and MASTER_*. Raises PeerFailureError where rank 0 does not answer, RunError for an error of
    this host's network, and OSError where rank 0 cannot listen.
    """
    from torch.distributed import TCPStore

    if missing := [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]:
        raise UsageError(
            f"{' and '.join(missing)} of rank 0 must be in the environment; start all ranks with one launcher"
        )
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    inherited = os.environ.pop(LISTENER_ENV, "")
    with rendezvous_errors(timeout):
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = _open_store_by_agent(address, port, timeout)
        elif os.environ["RANK"] == "0":
            store = _serve(socket.socket(fileno=int(inherited)) if inherited else listen_at(address, port), timeout)
        else:
            store = TCPStore(address, port, int(os.environ["WORLD_SIZE"]), is_master=False, timeout=timeout)
        store.set_timeout(timeout)
        return store


def listen_at(address: str, port: int) -> socket.socket:
    """Return a socket that listens for the ranks on the interface of an address alone; `port` 0: any free one.

    The store has no authentication. On all interfaces only where this host cannot listen at the address, as behind NAT,
    or where others cannot reach it: a host's own name often leads to 127.0.1.1. Raises OSError.
    """
    with contextlib.suppress(socket.gaierror, UnicodeError):  # the second: a name that IDNA does not allow
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # A name's IPv4 address, since other hosts may know no other.
        found = str(socket.getaddrinfo(address, None, family, socket.SOCK_STREAM)[0][4][0])
        if not found.startswith("127.") or address in (found, "localhost"):
            try:
                return socket.create_server((found, port), family=family, backlog=MAX_WAITING_RANKS)
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=MAX_WAITING_RANKS, dualstack_ipv6=both)


def _serve(listener: socket.socket, timeout: timedelta) -> Any:
    """Return the store that this process, rank 0, serves at a listening socket."""
    from torch.distributed import TCPStore

    host, port = listener.getsockname()[:2]
    # Without waiting for the others: torch waits for all when the process group starts.
    return TCPStore(
        host if host not in ("::", "0.0.0.0") else "localhost", port, int(os.environ["WORLD_SIZE"]), is_master=True,
        timeout=timeout, wait_for_workers=False, master_listen_fd=listener.detach(),
    )  # fmt: skip


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


def _open_store_by_agent(host: str, port: int, timeout: timedelta) -> Any:
    """Return rank 0's store, whose address is in the store of torchrun's agent; set MASTER_ADDR and MASTER_PORT to it.

    The address of an earlier rank 0 may still be there: nobody listens on it any more.
    """
    from torch.distributed import DistStoreError, TCPStore

    agent = TCPStore(host, port, None, is_master=False, timeout=timeout, wait_for_workers=False)
    if os.environ["RANK"] == "0":
        store = _serve(listen_at(_listening_address(host), 0), timeout)
        agent.set(_RANK_0_KEY, f"{store.host} {store.port}")
    else:
        deadline, store = time.monotonic() + timeout.total_seconds(), None
        while store is None:
            if time.monotonic() > deadline:
                raise DistStoreError("rank 0 did not listen")
            if agent.check([_RANK_0_KEY]):
                address, _, text = agent.get(_RANK_0_KEY).decode().partition(" ")
                with contextlib.suppress(OSError):
                    socket.create_connection((address, int(text)), timeout=2).close()
                    store = TCPStore(
                        address, int(text), int(os.environ["WORLD_SIZE"]), is_master=False, timeout=timeout
                    )
            time.sleep(0.1)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = store.host, str(store.port)
    return store


def find_own_address(peer: str) -> str:
    """Return this host's address on the way to another. Raises OSError."""
    family, kind, _, _, place = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)  # sends nothing
        return str(probe.getsockname()[0])


def _listening_address(peer: str) -> str:
    """Return this host's address on the way to another; that of GLOO_SOCKET_IFNAME if it is loopback."""
    address = find_own_address(peer)
    if address.startswith("127.") and (interface := os.environ.get("GLOO_SOCKET_IFNAME")):
        import psutil

        found = [item.address for item in psutil.net_if_addrs().get(interface, []) if item.family == socket.AF_INET]
        address = found[0] if found else address
    return address


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

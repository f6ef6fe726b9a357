"""What a host says of itself before a launch, and whether it reaches the host where the ranks meet."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import psutil

from dstrain.launch.command import find_port_fault
from dstrain.launch.multihost.versions import hash_source_files, read_package_versions
from dstrain.launch.processes import get_host_id
from dstrain.launch.threads import count_available_cores
from dstrain.launch.topology import Worker, count_gpus, gpus_support_bf16

CONNECT_TIMEOUT_SECONDS = 10.0
_EXTERNAL_ADDRESS = "192.0.2.1"
"""An address kept for documentation (RFC 5737), which is no host's: a route to it is the default one."""


def collect_host_info(token: str, cwd: str, cpu: bool) -> dict[str, Any]:
    """Of this host. `token`: a file in the run folder; `cwd`: where relative paths begin; `cpu`: no GPU is asked for."""
    return {
        "hostname": socket.gethostname(),
        "machine": get_host_id(),
        "pid": os.getpid(),
        "versions": read_package_versions(),
        "digests": hash_source_files(),
        "sees": Path(token).exists(),
        "has_cwd": Path(cwd).is_dir(),
        "cores": count_available_cores(),
        "gpus": 0 if cpu else count_gpus(),
        "bf16": None if cpu else gpus_support_bf16(),
        "reached_at": _ssh_server_address(),
        "addresses": get_interfaces_by_address(),
    }


def get_interfaces_by_address() -> dict[str, str]:
    """Interface by address, without loopback."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        found.address.split("%")[0]: name
        for name, many in psutil.net_if_addrs().items()
        for found in sorted(many, key=lambda one: one.family != socket.AF_INET)
        if found.family in kinds and not found.address.startswith(("127.", "::1", "fe80"))
    }


def _ssh_server_address() -> str:
    """The address that ssh reached this host at; empty where that was loopback, or no ssh."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    address = words[2] if len(words) == 4 else ""
    return "" if address.startswith(("127.", "::1")) else address


class ReservedPort:
    """A port of this host, held while the others try whether they reach it."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None

    def bind(self, address: str, port: int) -> dict[str, Any]:
        """Listen on the port, a free one for 0. Says which, and the interface that has the address."""
        if port and (fault := find_port_fault(port)):
            return {"fault": fault}
        try:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            self._server = socket.create_server(("", port), family=family, dualstack_ipv6=both)
        except OSError as error:
            return {"fault": f"port {port}: {error.strerror}"}
        return {"port": self._server.getsockname()[1], "interface": find_route_interface(address)}

    def reserve(self) -> None:
        """Stop listening, so that rank 0 can, and stay bound: until it does, the kernel gives the port to nobody else."""
        if self._server is None:
            return
        place, family = self._server.getsockname(), self._server.family
        self._server.close()
        self._server = socket.socket(family, socket.SOCK_STREAM)
        self._server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            self._server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        with contextlib.suppress(OSError):  # taken in between: rank 0 says by whom
            self._server.bind(place)


def try_connect(address: str, port: int) -> dict[str, Any]:
    """Whether this host reaches the address, and over which interface."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        return {"fault": str(error.strerror or error) if not isinstance(error, TimeoutError) else "no answer"}
    return {"interface": find_route_interface(address)}


def find_route_interface(address: str) -> str:
    """The interface over which this host sends to an address or name; the only one there is where that is this host.

    Gloo asks what this host's own name resolves to, and on Debian that is 127.0.1.1, where no other host finds it.
    """
    have = get_interfaces_by_address()
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            if found := have.get(probe.getsockname()[0]):
                return found
    names = set(have.values())
    return names.pop() if len(names) == 1 else ""


def find_gloo_interface(worker: Worker, master_addr: str) -> str:
    """The interface for gloo in a worker that any launcher started; empty where gloo's own choice is right.

    `master`: MASTER_ADDR, empty where nobody set it. On one host that meets over loopback gloo needs none. On several, rank 0's host may know its
    own name as loopback: there the interface of the default route is taken. NCCL looks at interfaces itself, prefers
    InfiniBand and never goes by the host's name (NCCL_SOCKET_IFNAME in its manual), so it is told nothing.
    """
    several = worker.local_world_size < worker.world_size
    if worker.world_size == 1 or not master_addr or not (several or _is_external_address(master_addr)):
        return ""
    return find_route_interface(master_addr) or (find_route_interface(_EXTERNAL_ADDRESS) if several else "")


def _is_external_address(address: str) -> bool:
    """Whether an address or a name is another than loopback, as seen from here."""
    try:
        found = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0][4][0]
    except OSError:
        return False
    return not str(found).startswith("127.") and found != "::1"

"""What each host offers: devices, versions, addresses, ports, shared folders."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import psutil

import dstrain
from dstrain.distributed.store import find_own_address, listen_at
from dstrain.errors import UsageError
from dstrain.files import get_host_id
from dstrain.host_limits import count_available_cores
from dstrain.launch.topology import Worker, count_gpus, gpus_support_bf16
from dstrain.patching import installed_versions
from dstrain.resources import find_resource_dir

# Versions are read from the packages' metadata, since importing torch takes seconds.


CHECKED_PACKAGES = ("torch", "deepspeed", "transformers", "peft")
_HASH_LENGTH = 12
_SOURCE_SUFFIXES = (".py", ".json", ".yaml")
"""Presets and recipes too: each rank reads them from the package on its own host."""
_PRESETS_DIR, _EXCLUDED_PREFIX = "ds_configs", "launchers/"


def read_package_versions() -> dict[str, str]:
    """Return versions by name, '' for a package that is not installed; of Python major and minor version only."""
    versions = {"Python": ".".join(platform.python_version_tuple()[:2]), "dstrain": dstrain.__version__}
    return versions | dict.fromkeys(CHECKED_PACKAGES, "") | installed_versions(CHECKED_PACKAGES)


@cache
def hash_source_tree() -> str:
    """Return one hash of all source files of dstrain."""
    package = Path(dstrain.__file__).parent
    presets = find_resource_dir(_PRESETS_DIR)  # next to the package in a checkout
    paths = {}
    for base, parent in ((package, package), (presets, presets.parent)):
        for path in base.rglob("*"):
            name = path.relative_to(parent).as_posix()
            if path.suffix in _SOURCE_SUFFIXES and not name.startswith(_EXCLUDED_PREFIX) and path.is_file():
                paths[name] = path
    digest = hashlib.sha256()
    for name, path in sorted(paths.items()):
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:_HASH_LENGTH]


def iter_version_diffs(expected: Mapping[str, str], actual: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, expected version, actual version) for each difference."""
    for name in expected:
        if expected[name] != actual.get(name, ""):
            yield name, expected[name] or "none", actual.get(name, "") or "none"


CONNECT_TIMEOUT_SECONDS = 10.0
_EXTERNAL_ADDRESS = "192.0.2.1"
"""Address reserved for documentation (RFC 5737), which no host has: its route is the default route."""


def collect_host_info(token: str, cwd: str, cpu: bool) -> dict[str, Any]:
    """Return this host's software, GPUs and addresses. `token` is a file in the run folder, `cwd` the base of relative
    paths.

    With `cpu`, GPUs are not counted.
    """
    return {
        "hostname": socket.gethostname(),
        "machine": get_host_id(),
        "versions": read_package_versions(),
        "code": hash_source_tree(),
        "sees": Path(token).exists(),
        "has_cwd": Path(cwd).is_dir(),
        "cores": count_available_cores(),
        "gpus": 0 if cpu else count_gpus(),
        "bf16": None if cpu else gpus_support_bf16(),
        "reached_at": _ssh_server_address(),
        "addresses": get_interfaces_by_address(),
    }


def get_interfaces_by_address() -> dict[str, str]:
    """Return the network interface of each of this host's addresses, without loopback and link-local ones."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    interfaces: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for entry in sorted(addresses, key=lambda entry: entry.family != socket.AF_INET):
            if entry.family in kinds and not entry.address.startswith(("127.", "::1", "fe80")):
                interfaces[entry.address.split("%")[0]] = name
    return interfaces


def _ssh_server_address() -> str:
    """Return the address at which ssh reached this host; '' for loopback, or without ssh."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    address = words[2] if len(words) == 4 else ""
    return "" if address.startswith(("127.", "::1")) else address


def free_port() -> int:
    """Return a port on which no process listens now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def check_loopback() -> None:
    """Raise UsageError if loopback does not work: the processes would try to connect for timeout_minutes."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        problem = f"several processes meet on 127.0.0.1, which does not answer ({error.strerror or error})"
        raise UsageError(
            f"{problem}; bring loopback up (`ip link set lo up`), or start one with --num-gpus 1"
        ) from None


def check_port(port: int) -> None:
    """Raise UsageError, with the process that holds it, if no process can listen on the port."""
    if not 0 < port < 65536:
        raise UsageError(f"--master-port {port} is not a port; give one from 1024 to 65535, or leave it out")
    with socket.socket() as probe:
        # Without it, a port whose connection has just ended (TIME_WAIT) would count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except PermissionError:
            fix = "give one from 1024 to 65535"
            raise UsageError(f"--master-port {port} may not be used by this user; {fix}") from None
        except OSError:
            problem = f"is taken{describe_port_owner(port)}"
            fix = "leave the option out for a free port, or end that process"
            raise UsageError(f"--master-port {port} {problem}; {fix}") from None


def describe_port_owner(port: int) -> str:
    """Return ` by python (pid 4711)`; '' if this user may not see the process."""
    try:
        pids = {c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port and c.pid}
    except psutil.Error:
        return ""
    for pid in sorted(pids):
        try:
            return f" by {psutil.Process(pid).name()} (pid {pid})"
        except psutil.Error:
            continue
    return ""


def open_listener(address: str, port: int) -> socket.socket:
    """Return a socket that listens for the ranks. Raises UsageError, with the process that holds the port."""
    if port:
        check_port(port)
    try:
        return listen_at(address, port)
    except OSError as error:
        raise UsageError(f"port {port} of {address} cannot be opened ({error.strerror}); see `ip address`") from None


def open_port(address: str, port: int) -> dict[str, Any]:
    """Listen for the ranks. Returns the port and the descriptor of the socket, which stays open, or a fault."""
    try:
        listener = open_listener(address, port)
    except UsageError as error:
        return {"fault": str(error)}
    port = listener.getsockname()[1]
    return {"port": port, "listener": listener.detach()}


def try_connect(address: str, port: int) -> dict[str, Any]:
    """Connect to the address. Returns the interface over which it is reached, or a fault."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        return {"fault": str(error.strerror or error) if not isinstance(error, TimeoutError) else "no answer"}
    return {"interface": find_route_interface(address)}


def find_route_interface(address: str) -> str:
    """Return the interface over which this host sends to an address or name; '' if unknown.

    For this host itself, return its only interface. Gloo would use the address of this host's name, which on Debian is
    127.0.1.1, where no other host reaches it.
    """
    interfaces = get_interfaces_by_address()
    with contextlib.suppress(OSError):
        if interface := interfaces.get(find_own_address(address)):
            return interface
    names = set(interfaces.values())
    return names.pop() if len(names) == 1 else ""


def find_gloo_interface(worker: Worker, master_addr: str) -> str:
    """Return the interface for gloo in a worker of any launcher; '' if gloo's own choice is right.

    `master_addr` is MASTER_ADDR or ''. On one host, over loopback, gloo needs none. On several, the name of rank 0's
    host may resolve to loopback on that host: then the interface of the default route is used. NCCL is not configured:
    it looks at the interfaces, prefers InfiniBand, and never uses the host name (NCCL_SOCKET_IFNAME in its manual).
    """
    several = worker.local_world_size < worker.world_size
    if worker.world_size == 1 or not master_addr or not (several or _is_external_address(master_addr)):
        return ""
    return find_route_interface(master_addr) or (find_route_interface(_EXTERNAL_ADDRESS) if several else "")


def _is_external_address(address: str) -> bool:
    """Return True if an address or name resolves to something else than loopback on this host."""
    try:
        resolved = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0][4][0]
    except OSError:
        return False
    return not str(resolved).startswith("127.") and resolved != "::1"

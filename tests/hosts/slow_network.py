"""The network between two hosts, with latency and loss: packets pass a process, since not every kernel has netem.

python slow_network.py SECONDS LOSS PID1 ADDRESS1 PID2 ADDRESS2       # PID: a process of the host
"""

# Each host gets a TUN device in place of its cable. What the kernel of one host writes into it is given to the other one
# after so many seconds, or dropped.

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
DEVICE = "slow0"
MAX_PACKET_BYTES = 1 << 16


def open_device(pid: int, address: str) -> int:
    """Create the device in the network namespace of a process; return its descriptor."""
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    if ctypes.CDLL(None, use_errno=True).setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    for words in (
        ["addr", "flush", "dev", "eth0"],
        ["addr", "add", f"{address}/24", "dev", DEVICE],
        ["link", "set", DEVICE, "up"],
    ):
        subprocess.run(["ip", *words], check=True)
    return device


def relay(devices: list[int], seconds: float, loss: float) -> None:
    """Hand on packets between the two devices until this process is killed."""
    draw = random.Random(0)
    waiting: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for device in select.select(devices, [], [], pause)[0]:
            packet = os.read(device, MAX_PACKET_BYTES)
            count += 1
            if draw.random() >= loss:
                other = devices[1 - devices.index(device)]
                heapq.heappush(waiting, (time.monotonic() + seconds, count, other, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, device, packet = heapq.heappop(waiting)
            os.write(device, packet)


def main() -> None:
    seconds, loss, *hosts = sys.argv[1:]
    devices = [open_device(int(hosts[0]), hosts[1]), open_device(int(hosts[2]), hosts[3])]
    print("ready", flush=True)
    relay(devices, float(seconds), float(loss))


if __name__ == "__main__":
    main()

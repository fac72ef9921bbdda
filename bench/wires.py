"""Links with a rate and a delay between network namespaces, for kernels without netem.

    python bench/wires.py --rate 1gbit --delay-ms 0.5 NAMESPACE=ADDRESS NAMESPACE=ADDRESS …

Each namespace gets a TUN device with that address; this program carries packets from one to the other. What a host
sends leaves it at the rate, one packet after the other, and arrives after the delay. Packets are large: carrying
them shall cost little of the cores that are to be measured. Ends, and takes the devices with it, on SIGTERM.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import heapq
import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Sequence

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DEVICE, MTU = "wire0", 60_000
UNITS = {"gbit": 1e9, "mbit": 1e6, "kbit": 1e3}


def bits_per_second(rate: str) -> float:
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"a rate is a number and one of {', '.join(UNITS)}, not {rate!r}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", required=True, type=bits_per_second, help="of what each host sends: 1gbit, 100mbit")
    parser.add_argument("--delay-ms", required=True, type=float, help="one way")
    parser.add_argument("hosts", nargs="+", metavar="NAMESPACE=ADDRESS")
    args = parser.parse_args(argv)
    hosts = [host.split("=") for host in args.hosts]
    ends = {socket.inet_aton(address): _open(namespace, address) for namespace, address in hosts}
    print("ready", flush=True)
    carry(ends, args.rate, args.delay_ms / 1000)


def carry(ends: dict[bytes, int], rate: float, delay: float) -> None:
    """For ever."""
    under_way: list[tuple[float, int, int, bytes]] = []  # (when it arrives, number, where, what)
    free_at = dict.fromkeys(ends.values(), 0.0)
    number = 0
    while True:
        now = time.monotonic()
        while under_way and under_way[0][0] <= now:
            _, _, end, packet = heapq.heappop(under_way)
            os.write(end, packet)
        until_next = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(list(free_at), [], [], until_next)[0]:
            packet = os.read(end, MTU + 100)
            target = ends.get(packet[16:20])
            if target is None or packet[0] >> 4 != 4:
                continue  # IPv6 chatter, broadcasts
            free_at[end] = max(free_at[end], time.monotonic()) + 8 * len(packet) / rate
            number += 1
            heapq.heappush(under_way, (free_at[end] + delay, number, target, packet))


def _open(namespace: str, address: str) -> int:
    """A TUN device there, whose packets this process reads and writes."""
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter(there)
        tun = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
        for words in (["addr", "add", f"{address}/24", "dev", DEVICE], ["link", "set", DEVICE, "mtu", str(MTU), "up"]):
            subprocess.run(["ip", *words], check=True)
    finally:
        _enter(home)
        os.close(home)
        os.close(there)
    return tun


def _enter(namespace: int) -> None:
    """os.setns, which Python has from 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns failed")


if __name__ == "__main__":
    main()

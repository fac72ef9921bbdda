"""Several hosts on one machine: network namespaces joined by a bridge, each with a name and an address of its own.

Needs root and iproute2. Nothing that happens in them leaves the machine. Used by cluster_network.py and cluster_tests/.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

NET = "10.77.0"
WIRES = Path(__file__).with_name("wires.py")
SHORTEST_ROUND_TRIP = 0.5  # ms, that wires.py can make
ENTER = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'


def missing() -> str | None:
    """Why there can be no hosts here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = f"rlcbprobe{os.getpid()}"
    made = subprocess.run(["sh", "-c", f"ip netns add {probe} && ip netns del {probe}"], capture_output=True, text=True)
    return None if made.returncode == 0 else f"ip netns does not work here (apt-get install iproute2): {made.stderr}"


class Hosts:
    def __init__(self, count: int) -> None:
        self.count = count
        self._tag = f"rlcb{os.getpid() % 100_000}"
        self._made: list[str] = []
        self._wires: subprocess.Popen[str] | None = None
        descriptor, self._names = tempfile.mkstemp(prefix="rlcb-hosts-")
        with os.fdopen(descriptor, "w") as file:
            file.write("127.0.0.1 localhost\n")
            file.writelines(f"{self.address(i)} {self.name(i)}\n" for i in range(count))
        self._build()

    def name(self, index: int) -> str:
        return f"h{index}"

    def address(self, index: int) -> str:
        return f"{NET}.{index + 1}"

    def call(self, index: int, command: Sequence[object]) -> list[str]:
        """The command as that host would run it."""
        enter = ["nsenter", f"--net=/run/netns/{self._namespace(index)}", "unshare", "-m", "-u", "bash", "-c", ENTER]
        return [*enter, "in", self.name(index), self._names, *map(str, command)]

    def cut(self, index: int) -> None:
        self._on_bridge("link", "set", f"p{index}", "down")

    def mend(self, index: int) -> None:
        self._on_bridge("link", "set", f"p{index}", "up")

    def slow_down(self, *, round_trip_ms: float, rate: str) -> None:
        """What a host sends leaves at this rate and is half the round trip under way."""
        self.full_speed()
        try:
            for index in range(self.count):
                self._tc(index, "replace", "netem", "delay", f"{round_trip_ms / 2}ms", "rate", rate, "limit", "100000")
            return
        except subprocess.CalledProcessError as error:
            if "kind is unknown" not in error.stderr:
                raise
        if round_trip_ms < SHORTEST_ROUND_TRIP:  # a program in between would be slower than that
            for index in range(self.count):
                self._tc(index, "replace", "tbf", "rate", rate, "burst", "256kb", "latency", "1s")
        else:
            self._lay_wires(round_trip_ms, rate)

    def full_speed(self) -> None:
        if self._wires is not None:
            self._wires.terminate()
            self._wires.communicate()
            self._wires = None
        for index in range(self.count):
            with contextlib.suppress(subprocess.CalledProcessError):
                self._tc(index, "del")
            _run("ip", "-n", self._namespace(index), "link", "set", "eth0", "up")

    def _lay_wires(self, round_trip_ms: float, rate: str) -> None:
        """A kernel without netem: a program carries the packets."""
        for index in range(self.count):
            _run("ip", "-n", self._namespace(index), "link", "set", "eth0", "down")
        ends = [f"{self._namespace(index)}={self.address(index)}" for index in range(self.count)]
        call = [sys.executable, str(WIRES), "--rate", rate, "--delay-ms", str(round_trip_ms / 2), *ends]
        self._wires = subprocess.Popen(call, stdout=subprocess.PIPE, text=True)
        assert self._wires.stdout is not None
        if self._wires.stdout.readline() != "ready\n":
            raise RuntimeError("bench/wires.py did not start; is there a /dev/net/tun?")

    def close(self) -> None:
        self.full_speed()
        for namespace in self._made:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        Path(self._names).unlink(missing_ok=True)

    def _namespace(self, index: int) -> str:
        return f"{self._tag}h{index}"

    def _build(self) -> None:
        bridge = f"{self._tag}br"
        self._add(bridge)
        self._on_bridge("link", "add", "br0", "type", "bridge")
        self._on_bridge("link", "set", "br0", "up")
        for index in range(self.count):
            space = self._namespace(index)
            self._add(space)
            _run("ip", "-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", f"p{index}", "netns", bridge)
            _run("ip", "-n", space, "link", "set", "lo", "up")
            _run("ip", "-n", space, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            _run("ip", "-n", space, "link", "set", "eth0", "up")
            self._on_bridge("link", "set", f"p{index}", "master", "br0")
            self._on_bridge("link", "set", f"p{index}", "up")

    def _add(self, namespace: str) -> None:
        _run("ip", "netns", "add", namespace)
        self._made.append(namespace)

    def _on_bridge(self, *words: str) -> None:
        _run("ip", "-n", f"{self._tag}br", *words)

    def _tc(self, index: int, *words: str) -> None:
        action, *rest = words
        _run("tc", "-n", self._namespace(index), "qdisc", action, "dev", "eth0", "root", *rest)


def _run(*call: str) -> None:
    subprocess.run(call, check=True, capture_output=True, text=True)

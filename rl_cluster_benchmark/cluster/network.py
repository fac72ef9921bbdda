"""Finds the address and interface at which other machines can reach this one: those on the route to the head."""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import socket
from dataclasses import dataclass

import psutil

from rl_cluster_benchmark.core.errors import TrainingFailedError, UserError

PORTS = range(12_000, 32_000)  # below those that Linux gives to outgoing connections, from 32,768 on
PORTS_TRIED = 100


@dataclass(frozen=True)
class Endpoint:
    """An address of this machine and the network interface that has it."""

    address: str
    interface: str

    @property
    def is_loopback(self) -> bool:
        return ipaddress.ip_address(self.address.partition("%")[0]).is_loopback


def endpoint(master_addr: str, master_port: int, interface: str | None) -> Endpoint:
    """Return where other machines reach this one: at `interface` if it is set, else on the route to the head."""
    if interface is not None:
        return _endpoint_of(interface)
    address = _address_towards(resolve(master_addr, master_port))
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address.partition("%")[0] for entry in addresses):
            return Endpoint(address, name)
    if ipaddress.ip_address(address).is_loopback:  # all of 127.0.0.0/8 is the loopback interface
        return Endpoint(address, "lo")
    raise UserError(f"No network interface has the address {address}; set cluster.interface.")


def resolve(host: str, port: int) -> str:
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"The head's name {host} cannot be resolved here ({reason}); give an address that all machines know with "
            "--master-addr."
        ) from None


def is_own_address(host: str, port: int) -> bool:
    """Return whether the host's address is one of this machine's."""
    address = resolve(host, port)
    if ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return True
    own = {entry.address.partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    return address.partition("%")[0] in own


def free_port(address: str = "127.0.0.1") -> int:
    """Return a free port outside the range from which the kernel chooses ports of outgoing connections.

    A port of that range could be taken by a connection before a server listens at it.
    """
    for _ in range(PORTS_TRIED):
        port = secrets.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise TrainingFailedError(f"No free port from {PORTS.start} to {PORTS.stop - 1} was found at {address}.")


def _endpoint_of(interface: str) -> Endpoint:
    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise UserError(f"cluster.interface = {interface} does not exist here; there are {', '.join(interfaces)}.")
    for family in (socket.AF_INET, socket.AF_INET6):
        for entry in interfaces[interface]:
            if entry.family == family:
                return Endpoint(entry.address, interface)
    raise UserError(f"cluster.interface = {interface} has no address.")


def _address_towards(address: str) -> str:
    """Return this machine's own address in packets to `address`; to find it, nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise UserError(
                f"There is no route to the head at {address} ({error.strerror}); check the network, or give another "
                "address with --master-addr."
            ) from None
        return str(probe.getsockname()[0])

"""Network interfaces of this machine, by which libraries are told where they may listen (Linux)."""

from __future__ import annotations

import contextlib
import fcntl
import socket
import struct
from ipaddress import ip_address
from pathlib import Path

_SIOCGIFADDR = 0x8915
_RDMA = Path("/sys/class/infiniband")


def interface_of(address: str) -> str:
    """The network interface of this machine that has ``address``, a name or IPv4; empty where none has."""
    wanted = ip_address(socket.gethostbyname(address))
    if wanted.is_loopback:
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):  # an interface without an address of this kind
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, request)
                if ip_address(answer[20:24]) == wanted:
                    return name
    return ""


def collectives_at(address: str) -> dict[str, str]:
    """The environment in which gloo and NCCL listen at the interface of ``address`` alone.

    Left to themselves they take the address of the machine's name, and the first interface that works.
    """
    if not (interface := interface_of(address)):
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def rdma_ports(devices: Path = _RDMA) -> list[str]:
    """This machine's RDMA ports, which no stranger's TCP reaches, as UCX names them: ``mlx5_0:1``."""
    return sorted(f"{port.parents[1].name}:{port.name}" for port in devices.glob("*/ports/*"))

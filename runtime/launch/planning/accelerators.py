"""What GPUs offer, under SkyPilot's names for them.

Memory is what the driver reports (nvidia-smi, rocm-smi), which is less than the number in a product's name.
Compute is dense bfloat16 with float32 sums. Bandwidths are bytes per second in one direction; of the network,
what the makers' own systems of eight give each GPU, and 25 Gb/s per machine for cards without such a system.
Sources: docs/planning.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

GIB = 1 << 30
TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Accelerator:
    """One GPU."""

    name: str
    """SkyPilot's."""
    memory: int
    """Bytes."""
    flops: float
    """Dense bfloat16 operations per second."""
    memory_bandwidth: float
    """Bytes per second."""
    peer_bandwidth: float
    """To another GPU of the machine, bytes per second in one direction."""
    network_bandwidth: float
    """Of each GPU, to other machines, bytes per second in one direction."""
    other_names: tuple[str, ...] = ()
    """Further names that SkyPilot or clusters have for it."""


def _gpu(
    name: str, mebibytes: int, teraflops: float, gigabytes: float, peer: float, network: float, *others: str
) -> Accelerator:
    """``gigabytes``, ``peer``, ``network``: 10⁹ bytes per second."""
    bandwidths = (gigabytes * GIGA, peer * GIGA, network * GIGA)
    return Accelerator(name, mebibytes << 20, teraflops * TERA, *bandwidths, others)


ACCELERATORS = (
    _gpu("RTX3090", 24576, 71.0, 936, 32, 3.1),
    _gpu("RTX4090", 24564, 165.2, 1008, 32, 3.1),
    _gpu("RTX5090", 32607, 209.5, 1792, 64, 3.1),
    _gpu("T4", 15360, 65.0, 320, 16, 3.1),
    _gpu("A10G", 23028, 70.0, 600, 32, 3.1, "A10"),
    _gpu("L4", 23034, 121.0, 300, 32, 3.1),
    _gpu("A40", 46068, 149.7, 696, 32, 3.1),
    _gpu("RTXA6000", 49140, 154.8, 768, 32, 3.1, "A6000"),
    _gpu("RTX6000-Ada", 49140, 364.2, 960, 32, 3.1),
    _gpu("L40S", 46068, 362.0, 864, 32, 6.25, "L40"),
    _gpu("A100", 40960, 312.0, 1555, 300, 25),
    _gpu("A100-80GB", 81920, 312.0, 2039, 300, 25, "A100-80GB-SXM"),
    _gpu("H100", 81559, 989.4, 3350, 450, 50, "H100-SXM", "H100-80GB", "H100-MEGA"),
    _gpu("H200", 143771, 989.4, 4800, 450, 50, "H200-SXM"),
    _gpu("GH200", 97871, 989.4, 4000, 450, 50),
    _gpu("B200", 183359, 2250.0, 8000, 900, 50),
    _gpu("GB200", 189471, 2500.0, 8000, 900, 50),
    _gpu("B300", 275040, 2250.0, 8000, 900, 100),
    _gpu("MI300X", 196592, 1307.4, 5300, 448, 50),
)
_BY_NAME = {
    name.lower(): accelerator
    for accelerator in ACCELERATORS
    for name in (accelerator.name, *accelerator.other_names)
}


def accelerator_of(name: str) -> Accelerator | None:
    """The GPU that SkyPilot calls ``name``, in whatever case; None where it is not in the table."""
    return _BY_NAME.get(name.lower())


def similar(name: str) -> str | None:
    """The name in the table that somebody may have meant by ``name``."""
    found = get_close_matches(name.lower().replace("o", "0"), _BY_NAME, 1, cutoff=0.75)
    return _BY_NAME[found[0]].name if found else None

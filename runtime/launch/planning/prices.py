"""What machines cost, from SkyPilot's catalogs on this disk: nothing is fetched.

SkyPilot keeps one CSV file for each cloud in ~/.sky/catalogs/<version>/<cloud>/vms.csv and takes the cheapest
machine that has what was asked for. So does this module. Where there is no catalog the price is unknown.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path

from stackrl.runtime.launch.planning.candidates import Candidate, Kind

UNBILLED = frozenset({"slurm", "ssh"})
"""Infrastructures whose machines are there already; SkyPilot gives them no price either."""
UNPRICED = frozenset({"k8s", "kubernetes"})
"""Infrastructures that cost what nobody here knows."""
_DEFAULT_CPUS, _DEFAULT_MEMORY = "8+", "4x"
"""What SkyPilot asks for where a stack names neither GPUs nor sizes (catalog/*_catalog.py)."""
_GCP_HOSTS = {
    "a100": "a2-highgpu-{}g",
    "a100-80gb": "a2-ultragpu-{}g",
    "h100": "a3-highgpu-{}g",
    "h100-mega": "a3-megagpu-{}g",
    "h200": "a3-ultragpu-{}g",
    "b200": "a4-highgpu-{}g",
}
"""Machines of Google's cloud by GPU and count (catalog/gcp_catalog.py): its catalog prices a GPU and the
machine around it in two rows."""
_GCP_L4_HOSTS = {1: "g2-standard-4", 2: "g2-standard-24", 4: "g2-standard-48", 8: "g2-standard-96"}


@dataclass(frozen=True)
class Offer:
    """A machine that can be rented."""

    dollars: float
    """Per hour."""
    cloud: str
    region: str
    instance_type: str

    def __str__(self) -> str:
        return f"{self.cloud} {self.instance_type} in {self.region}"


@dataclass(frozen=True)
class Price:
    """The cheapest offers for one machine of a kind; None: there is none in the catalogs."""

    on_demand: Offer | None
    spot: Offer | None

    def asked(self, kind: Kind) -> Offer | None:
        """Spot where the kind is, else on demand."""
        return self.spot if kind.spot else self.on_demand


def catalogs() -> Path:
    """The folder of SkyPilot's newest catalogs; it need not exist."""
    home = Path.home() / ".sky" / "catalogs"
    versions = [folder for folder in home.glob("v*") if folder.name[1:].isdecimal()]
    return max(versions, key=lambda folder: int(folder.name[1:]), default=home / "v8")


def is_billed(kind: Kind) -> bool:
    return kind.cloud not in UNBILLED


def price_of(kind: Kind, folder: Path | None = None) -> Price:
    """Of one machine; without a cloud in `infra`, of the cheapest cloud that has a catalog."""
    folder = folder or catalogs()
    files = [folder / kind.cloud / "vms.csv"] if kind.cloud else sorted(folder.glob("*/vms.csv"))
    rows = [row for file in files if file.is_file() for row in _fitting(file, kind)]
    return Price(_cheapest(rows, "Price"), _cheapest(rows, "SpotPrice"))


def hourly(candidate: Candidate, folder: Path | None = None) -> float | None:
    """Dollars per hour of all machines, spot where it is asked for; 0 where they are not billed, None where
    the price of one is unknown."""
    return total(candidate, [price_of(group.kind, folder) for group in candidate.groups])


def total(candidate: Candidate, prices: Sequence[Price]) -> float | None:
    """As hourly, with the prices of one machine of each group."""
    added = 0.0
    for group, price in zip(candidate.groups, prices, strict=True):
        if not is_billed(group.kind):
            continue
        if (offer := price.asked(group.kind)) is None:
            return None
        added += offer.dollars * group.nodes
    return added


@dataclass(frozen=True)
class _Row:
    """A line of a catalog that fits."""

    cloud: str
    region: str
    instance_type: str
    values: dict[str, str]

    def dollars(self, column: str) -> float | None:
        return _number(self.values.get(column))


def _cheapest(rows: Iterable[_Row], column: str) -> Offer | None:
    offers = [
        Offer(dollars, row.cloud, row.region, row.instance_type)
        for row in rows
        if (dollars := row.dollars(column)) is not None
    ]
    return min(offers, key=lambda offer: offer.dollars, default=None)


def _fitting(file: Path, kind: Kind) -> Iterator[_Row]:
    """Lines of one cloud's catalog that are machines of ``kind``."""
    cloud, text = file.parent.name, file.read_text(errors="replace")
    if cloud == "gcp" and kind.gpus and not kind.instance_type:
        yield from _google(text, kind)
        return
    for values in _read(text, kind.instance_type or kind.accelerator):
        if _is_there(values, kind) and _is_so_large(values, kind):
            yield _Row(cloud, values.get("Region", ""), values.get("InstanceType", ""), values)


def _google(text: str, kind: Kind) -> Iterator[_Row]:
    """The price of GPUs and that of their machine, added up region by region."""
    name, count = kind.accelerator.lower(), kind.gpus
    host = _GCP_L4_HOSTS.get(count) if name == "l4" else _GCP_HOSTS.get(name, "").format(count)
    if not host:
        return
    machines = {
        (values.get("Region", ""), values.get("AvailabilityZone")): values
        for values in _read(text, host)
        if values.get("InstanceType", "") == host
    }
    for values in _read(text, kind.accelerator):
        place = (values.get("Region", ""), values.get("AvailabilityZone"))
        if values.get("InstanceType", "") or place not in machines or not _is_there(values, kind):
            continue
        both = {
            column: str(sum(prices))
            for column in ("Price", "SpotPrice")
            if None not in (prices := [_number(part.get(column)) for part in (values, machines[place])])
        }
        yield _Row("gcp", values.get("Region", ""), host, both)


def _read(text: str, word: str) -> Iterator[dict[str, str]]:
    """Rows that have ``word`` in them. A large catalog has 10 MB: to parse all of it takes too long."""
    header, _, body = text.partition("\n")
    lines = _lines_with(body, word) if word else body.splitlines()
    yield from csv.DictReader(lines, fieldnames=next(csv.reader([header])), restval="")


def _lines_with(text: str, word: str) -> Iterator[str]:
    searched, word, place = text.lower(), word.lower(), 0
    while (found := searched.find(word, place)) >= 0:
        start, end = searched.rfind("\n", 0, found) + 1, searched.find("\n", found)
        place = end if end >= 0 else len(text)
        yield text[start:place]


def _is_there(values: dict[str, str], kind: Kind) -> bool:
    """In the region and zone that `infra` names, and with the GPUs."""
    places = [part.lower() for part in kind.infra.split("/")[1:]]
    for place, column in zip(places, ("Region", "AvailabilityZone"), strict=False):
        if place not in ("*", values.get(column, "").lower()):
            return False
    if kind.instance_type and values.get("InstanceType", "") != kind.instance_type:
        return False
    if not kind.gpus:
        return bool(kind.instance_type) or not values.get("AcceleratorName", "")
    same = values.get("AcceleratorName", "").lower() == kind.accelerator.lower()
    return same and isclose(_number(values.get("AcceleratorCount")) or 0, kind.gpus, abs_tol=0.01)


def _is_so_large(values: dict[str, str], kind: Kind) -> bool:
    cpus, memory = kind.cpus, kind.memory
    if not (kind.gpus or kind.instance_type):
        cpus, memory = cpus or ("" if memory else _DEFAULT_CPUS), memory or _DEFAULT_MEMORY
        if values.get("Arch", "") not in ("", "x86_64"):
            return False
    has_cpus, has_memory = _number(values.get("vCPUs")), _number(values.get("MemoryGiB"))
    return _meets(has_cpus, cpus) and _meets(has_memory, memory, has_cpus)


def _meets(has: float | None, asked: str, cpus: float | None = None) -> bool:
    """``asked`` is `8`, `8+`, or, of memory, `4x`: so many GiB for each CPU."""
    if not asked:
        return True
    wanted = _number(asked.rstrip("+xGBgb"))
    if has is None or wanted is None:
        return False
    if asked.endswith("x"):
        return cpus is not None and has >= wanted * cpus
    return has >= wanted if asked.endswith("+") else isclose(has, wanted)


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def dollars(amount: float) -> str:
    """``$1,234.50``."""
    return f"${amount:,.2f}"

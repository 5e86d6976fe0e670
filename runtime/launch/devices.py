"""The GPUs and cores of this machine: found, and dealt to runs so that no two take the same one unseen.

Whoever has a device holds a lock on its file in FOLDER. `launch` takes the locks and the node program
inherits them, so the kernel gives them back when that program ends, however it ends. GPUs that are taken are
refused; cores are shared where there are too few, and that is said.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from stackrl.runtime.launch.planning.plan import ENGINE, ORCHESTRATOR, Process, deal_cores
from stackrl.runtime.run import RunError

FOLDER = Path("/tmp/stackrl-devices")
"""One for all users of the machine."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_BUSY = 0.1
"""Share of a GPU's memory from which on programs that are no runs are taken to be using it."""
_QUERY_LIMIT = 30.0

Plan = dict[str, Any]


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver lists it. Without `nvidia-smi` only its number is known."""

    index: int
    uuid: str = ""
    """GPU- and 32 hexadecimal digits."""
    name: str = ""
    gib: float = 0.0
    used_gib: float = 0.0

    @property
    def busy(self) -> bool:
        return self.used_gib > _BUSY * self.gib


class Claims:
    """Devices that are held: by this process, and by those it hands the descriptors to."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self.notes: list[str] = []
        """What a person should know of the devices that were dealt."""

    def __enter__(self) -> Claims:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    @property
    def descriptors(self) -> list[int]:
        return list(self._held.values())

    def take(self, device: str) -> str | None:
        """Hold ``device``, such as gpu-0; None, or who holds it already. Raises OSError."""
        FOLDER.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user has made it
            FOLDER.chmod(0o1777)
        descriptor = _open(FOLDER / device)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            os.close(descriptor)
            return holder or "another run"
        self._held[device] = descriptor
        os.ftruncate(descriptor, 0)
        return None

    def sign(self, run_id: str) -> None:
        """Say who holds them."""
        for descriptor in self._held.values():
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"run {run_id}\n".encode(), 0)


def deal(plan: Plan, claims: Claims, cpus: int | None, environment: Mapping[str, str]) -> Plan:
    """``plan`` on devices of this machine that are free, which ``claims`` then holds.

    ``cpus``: how many cores the run wants; by default all that are free. Raises RunError where too few GPUs
    are free.
    """
    try:
        if any(process.get("gpus") for process in plan["processes"]):
            return _deal_gpus(plan, claims, environment)
        return _deal_cores(plan, claims, cpus) if plan.get("device") == "cpu" else plan
    except OSError as error:
        claims.notes.append(f"other runs may take the same devices, for they cannot be claimed: {error}")
        return plan


def among_visible(planned: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """``planned``, the environment of a process, on a node whose GPUs were dealt by somebody else, such as
    Slurm: the plan counts from 0 those that this node was given."""
    given = [name for name in environment.get(VISIBLE, "").split(",") if name]
    wanted = [int(index) for index in planned.get(VISIBLE, "").split(",") if index]
    if not given or not wanted or max(wanted) >= len(given):
        return dict(planned)
    return {**planned, VISIBLE: ",".join(given[index] for index in wanted)}


def gpus_here(environment: Mapping[str, str]) -> list[Gpu]:
    """The GPUs that this process may use, by number. Raises RunError where that cannot be told."""
    found = _listed() or [
        Gpu(int(file.name[6:])) for file in Path("/dev").glob("nvidia[0-9]*") if file.name[6:].isdecimal()
    ]
    if VISIBLE in environment:
        visible = set(_visible(environment[VISIBLE], found))
        found = [gpu for gpu in found if gpu.index in visible]
    return sorted(found, key=lambda gpu: gpu.index)


def _visible(said: str, found: Sequence[Gpu]) -> Iterator[int]:
    """The numbers of what CUDA_VISIBLE_DEVICES names, up to the first that is no device, such as -1, as CUDA
    reads it. Raises RunError for names of devices that are not known here."""
    for name in map(str.strip, said.split(",")):
        if name.isdecimal():
            yield int(name)
        elif name.startswith("GPU-"):
            like = [gpu.index for gpu in found if gpu.uuid.startswith(name)]  # a beginning is enough for CUDA
            if len(like) != 1:
                raise RunError(_unknown(name, "which GPU that is" if like else "that GPU"))
            yield like[0]
        elif name.startswith("MIG-"):
            raise RunError(_unknown(name, "parts of GPUs"))
        else:
            return


def _unknown(name: str, what: str) -> str:
    return (
        f"{VISIBLE} names {name}, and the launcher does not know {what}: name whole GPUs by the numbers that "
        "`nvidia-smi -L` lists, such as 0,1"
    )


def _listed() -> list[Gpu]:
    if (command := shutil.which("nvidia-smi")) is None:
        return []
    asked = "--query-gpu=index,uuid,name,memory.total,memory.used"
    query = [command, asked, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=_QUERY_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = []
    for line in result.stdout.splitlines() if result.returncode == 0 else ():
        with contextlib.suppress(ValueError):  # a driver that knows no memory writes [N/A]
            index, uuid, name, total, used = (part.strip() for part in line.split(","))
            found.append(Gpu(int(index), uuid, name, float(total) / 1024, float(used) / 1024))
    return found


def _deal_gpus(plan: Plan, claims: Claims, environment: Mapping[str, str]) -> Plan:
    wanted = sorted({gpu for process in plan["processes"] for gpu in process.get("gpus", ())})
    found, taken, holders = gpus_here(environment), list[Gpu](), dict[str, list[int]]()
    for gpu in sorted(found, key=lambda gpu: (gpu.busy, gpu.index not in wanted)):
        if len(taken) == len(wanted):
            break
        if (holder := claims.take(f"gpu-{gpu.index}")) is None:
            taken.append(gpu)
        else:
            holders.setdefault(holder, []).append(gpu.index)
    if len(taken) < len(wanted):
        raise RunError(_too_few(len(wanted), len(found), holders))
    claims.notes += [
        f"GPU {gpu.index} has {gpu.used_gib:.1f} of its {gpu.gib:.1f} GiB in use by other programs"
        for gpu in taken
        if gpu.busy
    ]
    claims.notes += _other_type(plan.get("accelerator", ""), taken)
    dealt = dict(zip(wanted, sorted(gpu.index for gpu in taken), strict=True))
    if VISIBLE not in environment and all(gpu == place for gpu, place in dealt.items()):
        return plan
    return {**plan, "processes": _moved(plan["processes"], dealt)}


def _too_few(wanted: int, found: int, holders: Mapping[str, Sequence[int]]) -> str:
    if found < wanted:
        return f"the run needs {wanted} GPUs, and this machine has {found}"
    held = "; ".join(f"{holder} has {_numbers(gpus)}" for holder, gpus in holders.items())
    named = next((holder.removeprefix("run ") for holder in holders if holder.startswith("run ")), "")
    end = f", end it (`stackrl down {named}`)" if named else ""
    return (
        f"the run needs {wanted} of this machine's {found} GPUs, and too few are free: {held}; wait for the "
        f"end of that run{end}, or start it elsewhere with --infra"
    )


def _other_type(accelerator: str, taken: Sequence[Gpu]) -> list[str]:
    """A word of warning where the GPUs are not those that the stack was planned for."""
    asked = [name.split("-")[0].lower() for name in accelerator.split(" or ") if name]
    names = dict.fromkeys(gpu.name for gpu in taken if gpu.name)
    others = [name for name in names if not any(_is(asked_for, name) for asked_for in asked)]
    if not asked or not others:
        return []
    return [f"the stack is for {accelerator}, this machine has {', '.join(others)}: memory may not suffice"]


def _is(accelerator: str, name: str) -> bool:
    """Whether the driver's ``name``, such as NVIDIA GeForce RTX 4090, is SkyPilot's ``accelerator``."""
    words = name.lower().replace("-", " ").split()
    return accelerator in words or accelerator in map("".join, pairwise(words))


def _moved(processes: Sequence[dict[str, Any]], dealt: Mapping[int, int]) -> list[dict[str, Any]]:
    """``processes`` on other GPUs. Ranks of the trainer count the GPUs of all of them, engines their own."""
    ranks = sorted({dealt[gpu] for one in processes if one["role"] != ENGINE for gpu in one.get("gpus", ())})
    moved = []
    for process in processes:
        if gpus := [dealt[gpu] for gpu in process.get("gpus", ())]:
            visible = ",".join(map(str, gpus if process["role"] == ENGINE else ranks))
            order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", VISIBLE: visible}
            process = process | {"gpus": gpus, "environment": process.get("environment", {}) | order}
        moved.append(process)
    return moved


def _deal_cores(plan: Plan, claims: Claims, cpus: int | None) -> Plan:
    """Free cores where there is one for each process that computes, else all, shared with other runs."""
    processes = [Process(**process) for process in plan["processes"]]
    computing = sum(process.role != ORCHESTRATOR for process in processes)
    here = sorted(os.sched_getaffinity(0))
    wanted = min(cpus or len(here), len(here))
    free, holders = list[int](), dict[str, list[int]]()
    for core in here:
        if len(free) == wanted:
            break
        if (holder := claims.take(f"core-{core}")) is None:
            free.append(core)
        else:
            holders.setdefault(holder, []).append(core)
    held = "; ".join(f"{holder} has {_numbers(cores)}" for holder, cores in holders.items())
    if cpus is not None and cpus > len(here):
        claims.notes.append(f"the stack asks for {cpus} cores, this machine has {len(here)}")
    if holders and len(free) < min(computing, wanted):
        claims.notes.append(f"cores are shared with other runs, so all are slower: {held}")
        free = here
    elif len(free) < wanted:
        claims.notes.append(f"the run has {len(free)} cores for itself: {held}")
    return {**plan, "processes": [asdict(process) for process in deal_cores(processes, free)]}


def _numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _open(file: Path) -> int:
    """Open for reading and writing, made where it is not there, for every user of the machine."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    for _ in range(3):
        with contextlib.suppress(FileNotFoundError):
            return os.open(file, flags)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(file, flags | os.O_CREAT | os.O_EXCL, 0o666)
            os.fchmod(descriptor, 0o666)
            return descriptor
    raise FileNotFoundError(2, os.strerror(2), str(file))

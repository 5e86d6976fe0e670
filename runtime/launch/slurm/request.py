"""What a stack asks Slurm for: SkyPilot's words for machines as options of sbatch."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from stackrl.runtime.launch.planning.candidates import Candidate, Kind, candidates_of
from stackrl.runtime.launch.slurm import commands as slurm_commands
from stackrl.runtime.launch.slurm.commands import Hardware
from stackrl.runtime.run import RunError
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.problems import Path, Problem, StackError

OPTIONS: Path = ("config", "slurm", "sbatch_options")
"""Where SkyPilot, too, takes options of sbatch."""
OURS = frozenset({
    "job-name", "nodes", "ntasks", "ntasks-per-node", "partition", "gres", "output", "error", "open-mode",
    "requeue", "no-requeue", "signal", "chdir", "export", "array", "wrap", "parsable", "test-only",
    "cluster", "clusters", "M", "wait", "W",
})  # fmt: skip
"""Options that the script says itself, or that would make another job of it."""
_MACHINES = frozenset({
    "exclusive", "mem", "mem-per-cpu", "mem-per-gpu", "cpus-per-gpu", "gpus", "gpus-per-node",
    "gpus-per-socket", "gpus-per-task",
})  # fmt: skip
"""Options that would change what is asked for on each node; a stack may say them."""
_VARIABLES = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE", "array": "ARRAY_INX"}
"""Options whose variable of sbatch has another name."""
_TIME_VARIABLE = "SBATCH_TIMELIMIT"
DOCKER = "docker:"
QUOTED = 'put it in quotes: "24:00:00", or "1440" for minutes'
_TIME = ("time", "t")


@dataclass(frozen=True)
class Part:
    """Equal nodes. A job has one part, or, where roles have hardware of their own, several."""

    partition: str
    nodes: int
    options: tuple[str, ...]
    """What is asked for on each: `--gres=gpu:h100:8`."""


@dataclass(frozen=True)
class Request:
    """A job, before it has a script."""

    parts: tuple[Part, ...]
    options: tuple[str, ...]
    """Of the stack: account, time limit, constraint …"""
    image: str = ""
    """A container in pyxis' words; empty: none."""
    time_limit: int | None = None
    """Seconds; None where there is none."""


def requests_of(loaded: LoadedStack, infra: str) -> list[Request]:
    """What may be asked for, in the order of the stack's `resources`.

    ``infra``: slurm, slurm/CLUSTER or slurm/CLUSTER/PARTITION, as `--infra` has it. Raises StackError, and
    RunError where Slurm cannot be asked or this is another cluster.
    """
    _, name, partition = (*infra.split("/", 2), "", "")[:3]
    here = slurm_commands.cluster()
    if name and name != here:
        raise RunError(
            f"this machine belongs to the cluster {here}, not to {name}: "
            f"type this on a login node of {name}, or `--infra slurm` for {here}"
        )
    options = _options(loaded)
    candidates = [one for one in candidates_of(loaded.stack, loaded.task) if _may_be_here(one, here)]
    if not candidates:
        said = ", ".join(map(str, candidates_of(loaded.stack, loaded.task)))
        what = f"none of these is on the Slurm cluster {here}: {said}"
        mend = "add an entry with infra: slurm to its any_of, or leave infra out"
        raise StackError(loaded.locate([Problem(("resources",), what, mend)]))
    requests = []
    for one in candidates:
        parts = tuple(_parts(loaded, one, partition))
        requests.append(Request(parts, options, _image(loaded, one), _time_limit(loaded, parts)))
    return requests


def overruling(request: Request) -> set[str]:
    """Variables with which a user's shell would overrule the script: sbatch listens to them first.

    Those for what neither the stack nor the launcher says, such as SBATCH_ACCOUNT, are left to the user.
    """
    said = [*request.options, *(option for part in request.parts for option in part.options)]
    names = {option.removeprefix("--").partition("=")[0] for option in said}
    return {
        f"SBATCH_{_VARIABLES.get(name) or name.upper().replace('-', '_')}"
        for name in OURS | _MACHINES | names
    }


def _may_be_here(candidate: Candidate, cluster: str) -> bool:
    """Whether a candidate names this cluster, or leaves open where it is."""
    kinds = [group.kind for group in candidate.groups]
    return all(kind.cloud in ("", "slurm") and _cluster_of(kind) in ("", "*", cluster) for kind in kinds)


def _cluster_of(kind: Kind) -> str:
    return (*kind.infra.split("/"), "", "")[1] if kind.cloud == "slurm" else ""


def _partition_of(kind: Kind) -> str:
    found = (*kind.infra.split("/"), "", "", "")[2] if kind.cloud == "slurm" else ""
    return "" if found == "*" else found


def _parts(loaded: LoadedStack, candidate: Candidate, partition: str) -> Iterator[Part]:
    """Neighbouring roles on equal machines are one part."""
    for kind, groups in groupby(candidate.groups, lambda group: group.kind):
        if kind.spot:
            what = "Slurm has no spot machines"
            mend = "say use_spot beside the clouds in any_of; what may be preempted here is the partition's"
            raise StackError(loaded.locate([Problem(("resources",), what, mend)]))
        chosen = partition or _partition_of(kind)
        yield Part(chosen, sum(group.nodes for group in groups), tuple(_machine(kind, chosen)))


def _machine(kind: Kind, partition: str) -> Iterator[str]:
    """The options for one node.

    A job that takes all GPUs of a node, or none, has the node to itself unless the stack says how many cores
    it wants. One that takes some of them takes its share of cores and memory.
    """
    there = slurm_commands.hardware(partition)
    gpu = _type_of(kind.accelerator, there) if kind.gpus else ""
    if kind.gpus:
        yield f"--gres=gpu:{gpu + ':' if gpu else ''}{kind.gpus}"
    node = next((one for one in there if one.gpus.get(gpu, 0) > kind.gpus), None) if kind.gpus else None
    cores, memory = _least(kind.cpus), _least(kind.memory)
    if cores:
        yield f"--cpus-per-task={cores}"
    elif node:
        yield f"--cpus-per-task={max(node.cpus * kind.gpus // node.gpus[gpu], 1)}"
    else:
        yield "--exclusive"
    if memory:
        yield f"--mem={memory}G"
    elif node:
        yield f"--mem={node.memory * kind.gpus // node.gpus[gpu]}M"
    elif not cores:
        yield "--mem=0"  # all that the node has


def _type_of(accelerator: str, there: list[Hardware]) -> str:
    """What the cluster calls a GPU: `A100-80GB` may be `nvidia_a100-sxm4-80gb`, and nothing where it names no
    types. A name that none has is left for Slurm to refuse."""
    types = dict.fromkeys(kind for node in there for kind in node.gpus)
    if list(types) == [""]:
        return ""
    name = accelerator.lower()
    exact = [kind for kind in types if kind.lower() == name]
    words = re.split(r"[^a-z0-9]+", name)
    like = [kind for kind in types if kind and all(word in kind.lower() for word in words)]
    return next(iter([*exact, *sorted(like, key=len)]), name)


def _least(amount: str) -> int:
    """`32+` and `32` are 32; `4x`, times the cores, is left to Slurm."""
    whole = re.fullmatch(r"(\d+)(?:\.\d+)?(?:gi?b?)?\+?", amount.strip().lower())
    return int(whole[1]) if whole else 0


def _image(loaded: LoadedStack, candidate: Candidate) -> str:
    """`docker:ghcr.io/a/b:1` is `ghcr.io#a/b:1` for pyxis."""
    images = {group.kind.image for group in candidate.groups} - {""}
    for image in images:
        if not image.startswith(DOCKER):
            what = f"{image} is no container"
            raise StackError(loaded.locate([Problem(("resources",), what, "say image_id: docker:NAME:TAG")]))
    if len(images) > 1:
        what, mend = "one job runs in one container", "give all roles the same image_id"
        raise StackError(loaded.locate([Problem(("resources",), what, mend)]))
    if not images:
        return ""
    if not slurm_commands.takes_containers():
        what = "this cluster's Slurm cannot start containers (its srun has no --container-image)"
        mend = "remove image_id, or ask the cluster's administrators for pyxis"
        raise StackError(loaded.locate([Problem(("resources",), what, mend)]))
    name = images.pop().removeprefix(DOCKER)
    host, slash, path = name.partition("/")
    return f"{host}#{path}" if slash and re.search(r"[.:]", host) else name


def _options(loaded: LoadedStack) -> tuple[str, ...]:
    given = _given(loaded.task)
    problems = [
        Problem((*OPTIONS, key), "the launcher says this itself", _instead(key), at_key=True)
        for key in given
        if key.lstrip("-") in OURS
    ]
    problems += [
        Problem((*OPTIONS, key), f"{given[key]} is a number: YAML reads 24:00:00 as seconds", QUOTED)
        for key in _TIME
        if isinstance(given.get(key), int)
    ]
    if problems:
        raise StackError(loaded.locate(problems))
    return tuple(_option(key.lstrip("-"), value) for key, value in given.items() if value is not False)


def _given(task: Mapping[str, Any]) -> Mapping[str, Any]:
    slurm = (task.get("config") or {}).get("slurm") or {}
    return slurm.get("sbatch_options") or {}


def _option(key: str, value: Any) -> str:
    return f"--{key}" if value in (None, True, "") else f"--{key}={value}"


def _instead(key: str) -> str:
    elsewhere = "say resources: {infra: slurm/CLUSTER}, and type this on a login node of that cluster"
    waits = "remove it: launch waits for the run's end, unless you say -d"
    words = {
        "nodes": "say num_nodes",
        "partition": "say resources: {infra: slurm/CLUSTER/PARTITION}",
        "gres": "say resources: {accelerators: …}",
        "job-name": "say name",
        "cluster": elsewhere,
        "clusters": elsewhere,
        "M": elsewhere,
        "wait": waits,
        "W": waits,
    }
    return words.get(key.lstrip("-"), "remove it")


def _time_limit(loaded: LoadedStack, parts: Sequence[Part]) -> int | None:
    """Seconds: as the stack says, or the user's shell, else what the partition gives a job that asks for
    nothing."""
    given = _given(loaded.task)
    said = next((str(given[key]) for key in _TIME if key in given), "")
    said = said or os.environ.get(_TIME_VARIABLE, "")
    return _seconds(said or slurm_commands.default_time(parts[0].partition))


def _seconds(text: str) -> int | None:
    """A time in any of Slurm's forms: minutes, M:S, H:M:S, D-H, D-H:M or D-H:M:S. None for no limit."""
    if not (match := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)):
        return None  # UNLIMITED, infinite, or for sbatch to refuse
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

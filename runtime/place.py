"""Where this node stands among the nodes of a run, as the variables of SkyPilot or Slurm tell it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from stackrl.runtime.run import RunError, plain

ADDRESSES_VARIABLE, RANK_VARIABLE = "STACKRL_NODE_ADDRESSES", "STACKRL_NODE_RANK"
RUN_VARIABLE = "STACKRL_RUN"
"""Names the run that nodes work on, whichever machines they are."""
_SCONTROL_LIMIT = 30.0


@dataclass(frozen=True)
class Place:
    """Rank of this node, and the addresses of all, in order of rank. Without a launcher: the only node."""

    rank: int = 0
    addresses: tuple[str, ...] = ("127.0.0.1",)

    @property
    def nodes(self) -> int:
        return len(self.addresses)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read, where they are set, ADDRESSES_VARIABLE (whoever starts the nodes may list them himself; the
        rank is RANK_VARIABLE, or Slurm's or SkyPilot's), SKYPILOT_NODE_RANK, _NUM_NODES and _NODE_IPS (one a
        line), or SLURM_PROCID and SLURM_STEP_NODELIST, with one task a node.

        Raises RunError where they disagree.
        """
        if environment.get(ADDRESSES_VARIABLE):
            addresses = tuple(environment[ADDRESSES_VARIABLE].replace(",", " ").split())
            ranks = (RANK_VARIABLE, "SLURM_PROCID", "SKYPILOT_NODE_RANK")
            name = next((name for name in ranks if name in environment), RANK_VARIABLE)
            return cls._at(_count(environment, name), addresses, name)
        if "SKYPILOT_NODE_RANK" in environment:
            nodes = _count(environment, "SKYPILOT_NUM_NODES")
            addresses = tuple(environment.get("SKYPILOT_NODE_IPS", "").split())
            if len(addresses) != nodes:
                raise RunError(
                    f"SKYPILOT_NUM_NODES is {nodes}, but SKYPILOT_NODE_IPS lists {len(addresses)} addresses; "
                    "start the task again with `sky launch`"
                )
            return cls._at(_count(environment, "SKYPILOT_NODE_RANK"), addresses, "SKYPILOT_NODE_RANK")
        if environment.get("SLURM_STEP_NODELIST"):
            addresses = _hosts(environment["SLURM_STEP_NODELIST"])
            return cls._at(_count(environment, "SLURM_PROCID"), addresses, "SLURM_PROCID")
        return cls()

    @classmethod
    def _at(cls, rank: int, addresses: tuple[str, ...], name: str) -> Place:
        if rank >= len(addresses):
            raise RunError(f"{name} is {rank}, but the task has {len(addresses)} nodes: start one on each")
        return cls(rank, addresses) if len(addresses) > 1 else cls()  # alone, it opens nothing to a network


def job_run_id(name: str, environment: Mapping[str, str]) -> str | None:
    """The run that a job works on: the same one whenever it is started again.

    From RUN_VARIABLE, which `stackrl launch` sets; else from SKYPILOT_MANAGED_JOB_ID, and in a group of jobs
    SKYPILOT_JOB_RANK; None where this is no such job.
    """
    if run := environment.get(RUN_VARIABLE):
        return plain(run)
    if not (job := environment.get("SKYPILOT_MANAGED_JOB_ID")):
        return None
    rank = environment.get("SKYPILOT_JOB_RANK")
    return plain(f"{name}-job{job}" + (f"-{rank}" if rank else ""))


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise RunError(
            f"{name} is {text!r}, not a number; it is set by whoever starts the nodes: unset "
            f"{name.partition('_')[0]}_* to run on this machine alone"
        )
    return int(text)


def _hosts(compressed: str) -> tuple[str, ...]:
    """Slurm writes lists of nodes as `gpu[1-3,7]`. Raises RunError."""
    try:
        shown = subprocess.run(
            ["scontrol", "show", "hostnames", compressed],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_LIMIT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(
            f"SLURM_STEP_NODELIST is {compressed!r}, and `scontrol show hostnames` does not tell the nodes: "
            f"{error}; list them yourself, comma-separated, in {ADDRESSES_VARIABLE}"
        ) from error
    return tuple(shown.stdout.split())

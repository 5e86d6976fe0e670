"""Where this node stands among the nodes of a SkyPilot task, as SkyPilot's variables tell it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stackrl.runtime.run import RunError, plain


@dataclass(frozen=True)
class Place:
    """Rank of this node, and the addresses of all, in order of rank. Without SkyPilot: the only node."""

    rank: int = 0
    addresses: tuple[str, ...] = ("127.0.0.1",)

    @property
    def nodes(self) -> int:
        return len(self.addresses)

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """Read SKYPILOT_NODE_RANK, _NUM_NODES and _NODE_IPS (one a line).

        Raises RunError where they disagree.
        """
        if "SKYPILOT_NODE_RANK" not in environment:
            return cls()
        rank, nodes = (_count(environment, name) for name in ("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES"))
        addresses = tuple(environment.get("SKYPILOT_NODE_IPS", "").split())
        if len(addresses) != nodes:
            raise RunError(
                f"SKYPILOT_NUM_NODES is {nodes}, but SKYPILOT_NODE_IPS lists {len(addresses)} addresses; "
                "start the task again with `sky launch`"
            )
        if not 0 <= rank < nodes:
            raise RunError(f"SKYPILOT_NODE_RANK is {rank}, but the task has {nodes} nodes")
        return cls(rank, addresses)


def job_run_id(name: str, environment: Mapping[str, str]) -> str | None:
    """The run that a managed job of SkyPilot works on: the same one whenever it is started again.

    From SKYPILOT_MANAGED_JOB_ID, and in a group of jobs SKYPILOT_JOB_RANK; None where this is no such job.
    """
    if not (job := environment.get("SKYPILOT_MANAGED_JOB_ID")):
        return None
    rank = environment.get("SKYPILOT_JOB_RANK")
    return plain(f"{name}-job{job}" + (f"-{rank}" if rank else ""))


def _count(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise RunError(
            f"{name} is {text!r}, not a number; it is set by SkyPilot: unset SKYPILOT_* to run without it"
        )
    return int(text)

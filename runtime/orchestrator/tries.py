"""How often a rollout is begun, and with which seeds."""

from __future__ import annotations

from stackrl.runtime.orchestrator.seeds import Seeds

TRIES = {"retry": 2, "drop": 1}
"""Times that a rollout is begun before its group goes on without it, by its environment's `failures`."""


def seeds_of_try(rollout: Seeds, number: int) -> Seeds:
    """Of try ``number`` (from 0) of a rollout: each one samples anew, for what the model wrote may be what
    the last one failed of."""
    return rollout.branch("try", number) if number else rollout

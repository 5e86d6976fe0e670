"""What each kind of machine that a stack allows would mean for its run: memory, price and time of a step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from stackrl.runtime.launch.planning.balance import Estimate, NotEstimated, estimate
from stackrl.runtime.launch.planning.candidates import Candidate, candidates_of
from stackrl.runtime.launch.planning.memory import RoleMemory, memory_of
from stackrl.runtime.launch.planning.prices import Offer, Price, catalogs, is_billed, price_of, total
from stackrl.schemas import split
from stackrl.schemas.loader import LoadedStack


@dataclass(frozen=True)
class Forecast:
    """Of one candidate."""

    candidate: Candidate
    prices: tuple[Price, ...]
    """One machine of each of its groups."""
    hourly: float | None
    """Dollars per hour of all machines; 0: they are not billed, None: unknown."""
    memory: tuple[RoleMemory, ...]
    """Empty where nothing says what the model is made of."""
    estimate: Estimate | None
    not_estimated: str
    """Why there is no estimate."""

    def as_json(self) -> dict[str, Any]:
        """For `-o json`; sizes in bytes, times in seconds, prices in dollars per hour."""
        groups = [
            {
                **asdict(group),
                "on_demand": _priced(price.on_demand),
                "spot": _priced(price.spot),
                "billed": is_billed(group.kind),
            }
            for group, price in zip(self.candidate.groups, self.prices, strict=True)
        ]
        return {
            "name": str(self.candidate),
            "groups": groups,
            "hourly": self.hourly,
            "memory": [_memory(role) for role in self.memory],
            "step": self._step(),
        }

    def _step(self) -> dict[str, Any]:
        if self.estimate is None:
            return {"unknown": self.not_estimated}
        step, better = self.estimate.step, self.estimate.better
        return {
            "stage": self.estimate.stage,
            "seconds": step.seconds,
            "generation": step.generation,
            "training": step.training,
            "transfer": step.transfer,
            "overlapping": step.overlapping,
            "waiting": dict(step.waiting),
            "tokens": asdict(self.estimate.lengths),
            "better": better and {**better.counts, "unit": better.unit, "seconds": better.seconds},
        }


def forecasts(loaded: LoadedStack, reply: float | None = None) -> list[Forecast]:
    """Of each candidate. ``reply``: the mean tokens that a rollout samples, where they are known."""
    stack, task, folder = loaded.stack, loaded.task, catalogs()
    roles = [name for name, _ in split.roles_of(stack)]
    plain = next((name for name in roles if not getattr(stack.roles, name).resources), "trainer")

    @cache  # candidates often differ in no more than where their machines are
    def computed(*gpus: str) -> tuple[tuple[RoleMemory, ...], Estimate | None, str]:
        accelerators = dict(zip(roles, gpus, strict=True))
        memory = tuple(memory_of(stack, task, accelerators[plain] or None))
        try:
            return memory, estimate(stack, task, accelerators, memory, reply), ""
        except NotEstimated as error:
            return memory, None, str(error)

    def of(candidate: Candidate) -> Forecast:
        memory, estimated, why = computed(*(candidate.kind_of(role).accelerator for role in roles))
        prices = tuple(price_of(group.kind, folder) for group in candidate.groups)
        return Forecast(candidate, prices, total(candidate, prices), memory, estimated, why)

    return [of(candidate) for candidate in candidates_of(stack, task)]


def _priced(offer: Offer | None) -> dict[str, Any] | None:
    return None if offer is None else asdict(offer)


def _memory(role: RoleMemory) -> dict[str, Any]:
    return {**asdict(role), "peak": role.peak.total, "phase": role.peak.name, "lacking": role.lacking}

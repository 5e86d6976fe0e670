"""What a stack's candidates cost, hold and take, as tables for people."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from stackrl.runtime.launch.planning.balance import Estimate
from stackrl.runtime.launch.planning.candidates import Group
from stackrl.runtime.launch.planning.forecast import Forecast
from stackrl.runtime.launch.planning.memory import RoleMemory
from stackrl.runtime.launch.planning.prices import UNPRICED, Offer, Price, dollars, is_billed
from stackrl.runtime.launch.planning.steptime import UTILIZATION

if TYPE_CHECKING:
    from stackrl.runtime.launch.planning.at_work import AtWork

MIB, GIB = 1 << 20, 1 << 30
_TOLD_WAIT = 0.05
"""Shares of a step that are worth a word."""
_TOLD_TIMES = 1.5
"""A side that needs so many times as long as the other is named where no split would end that."""


def forecast_table(forecasts: Sequence[Forecast]) -> str:
    """Prices and times of each candidate, memory of each kind of GPU, and what would be better."""
    blocks = _memories(forecasts)
    if any(_tells(forecast) for forecast in forecasts):
        blocks = [_machines(forecasts), *blocks, _notes(forecasts)]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def told_running(name: str, running: AtWork | None) -> str:
    """What a launch would do differently from the run that is at work."""
    if running is None:
        return f"running   no run called {name} is at work"
    if not running.differs:
        return f"running   {running.run} is at work with this very plan"
    rows = [(f"RUNNING {running.run}", "IT HAS", "THIS PLAN")]
    for entry in running.differs:
        rows.append(
            (entry["key"], *(json.dumps(entry[side]) if side in entry else "-" for side in ("left", "right")))
        )
    return "\n".join(_aligned(rows))


def _machines(forecasts: Sequence[Forecast]) -> list[str]:
    rows = [("MACHINES", "NODE PER HOUR", "SPOT", "ALL PER HOUR", "STEP", "WAITING")]
    for forecast in forecasts:
        rows.append(
            (
                str(forecast.candidate),
                _offers(forecast, lambda price: price.on_demand),
                _offers(forecast, lambda price: price.spot),
                _total(forecast),
                _step(forecast),
                _waiting(forecast),
            )
        )
    return _aligned(rows)


def _tells(forecast: Forecast) -> bool:
    """Whether there is more to say than that nothing is known, of machines of which nothing was asked."""
    kinds = [group.kind for group in forecast.candidate.groups]
    asked = any(kind.infra or kind.gpus for kind in kinds)
    return asked or forecast.estimate is not None or forecast.hourly is not None


def _offers(forecast: Forecast, choose: Callable[[Price], Offer | None]) -> str:
    told = []
    for group, price in zip(forecast.candidate.groups, forecast.prices, strict=True):
        offer = choose(price)
        known = dollars(offer.dollars) if offer else "unknown"
        told.append(known if is_billed(group.kind) else "not billed")
    return " + ".join(told)


def _total(forecast: Forecast) -> str:
    if not any(is_billed(group.kind) for group in forecast.candidate.groups):
        return "not billed"
    return "unknown" if forecast.hourly is None else dollars(forecast.hourly)


def _step(forecast: Forecast) -> str:
    return "unknown" if forecast.estimate is None else f"about {_time(forecast.estimate.step.seconds)}"


def _waiting(forecast: Forecast) -> str:
    if forecast.estimate is None:
        return "-"
    waiting = forecast.estimate.step.waiting
    told = [f"{side} {share:.0%}" for side, share in waiting.items() if share >= _TOLD_WAIT]
    return ", ".join(told) or "nobody"


def _memories(forecasts: Sequence[Forecast]) -> list[list[str]]:
    """A block for each different set of GPUs."""
    found = {tuple(role.accelerator for role in one.memory): one.memory for one in forecasts if one.memory}
    return [_memory(roles) for roles in found.values()]


def _memory(roles: Sequence[RoleMemory]) -> list[str]:
    """What each role takes at its peak, and by what; roles that take the same together."""
    kinds = " and ".join(dict.fromkeys(role.accelerator for role in roles if role.accelerator))
    rows = [(f"GiB OF A GPU, {kinds}" if kinds else "GiB OF A PROCESS", "", "")]
    alike: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for role in roles:
        alike.setdefault(tuple(_told(role)), []).append(role.role)
    for lines, names in alike.items():
        for number, line in enumerate(lines):
            rows.append(("" if number else ", ".join(names), *line))
    return _aligned(rows)


def _told(role: RoleMemory) -> Iterator[tuple[str, str]]:
    peak = role.peak
    total = _size(peak.total) + (f" of {_size(role.capacity)}" if role.capacity is not None else "")
    yield total + " TOO MUCH" * (role.lacking > 0), f"{peak.name}: {_parts(peak.parts)}"
    if others := {phase.name: phase.total for phase in role.phases if phase is not peak}:
        yield "", f"at other times: {_parts(others)}"
    if (cache := role.cache) is not None:
        held = f"{cache.tokens:,} tokens, or {cache.requests:,} requests of the longest"
        yield "", f"cache of an engine: {held}; {cache.bytes_per_token:,} bytes a token"
    if role.host:
        yield "", f"and in the machine's memory: {_parts(role.host)}"


def _parts(parts: Mapping[str, int]) -> str:
    """The largest first; what is hardly there stays untold."""
    most = max(parts.values(), default=0)
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {_size(size)}" for name, size in ordered if size >= most / 100)


def _notes(forecasts: Sequence[Forecast]) -> list[str]:
    lines = [f"step      {line}" for line in _alike(forecasts, _spent)]
    lines += [f"better    {line}" for line in _alike(forecasts, _advice)]
    if any(forecast.estimate for forecast in forecasts):
        lines.append(f"assumed   {_assumed(next(one.estimate for one in forecasts if one.estimate))}")
    unpriced = [group.kind for group, price in _all_groups(forecasts) if price.asked(group.kind) is None]
    if any(kind.infra or kind.gpus for kind in unpriced if is_billed(kind) and kind.cloud not in UNPRICED):
        lines.append(
            "prices    are known where SkyPilot has its catalogs on this disk: `sky gpus list` fetches them"
        )
    return lines


def _alike(forecasts: Sequence[Forecast], tell: Callable[[Forecast], str]) -> list[str]:
    """What there is to tell, each once, with the candidates that it is true of."""
    found: dict[str, list[str]] = {}
    for forecast in forecasts:
        if told := tell(forecast):
            found.setdefault(told, []).append(str(forecast.candidate))
    everywhere = len(forecasts) > 1 and len(found) == 1 and len(*found.values()) == len(forecasts)
    return [told if everywhere else f"{'; '.join(names)}: {told}" for told, names in found.items()]


def _spent(forecast: Forecast) -> str:
    """What a step is spent on."""
    if forecast.estimate is None:
        return f"unknown, {forecast.not_estimated}"
    step = forecast.estimate.step
    sides = f"training {_time(step.training)}"
    if not step.generation:
        return sides
    how = "beside" if step.overlapping else "after"
    return f"{sides} {how} generation {_time(step.generation)} and new weights {_time(step.transfer)}"


def _advice(forecast: Forecast) -> str:
    """What would make a step shorter: another split, or else more of the side that the other waits for."""
    if forecast.estimate is None:
        return ""
    if better := forecast.estimate.better:
        return f"with {better} a step takes about {_time(better.seconds)}"
    step = forecast.estimate.step
    side, times = step.slower
    if times < _TOLD_TIMES:
        return ""
    cure = f"more GPUs for the {side}"
    if side == "engines" and step.transfer > step.generation:
        cure = "a faster weights.transport, or more rollouts in a step"
    need = "needs" if side == "trainer" else "need"
    return f"no other split of these machines; the {side} {need} {times:.1f} times as long: {cure}"


def _assumed(estimate: Estimate) -> str:
    lengths = estimate.lengths
    if not lengths.reply:
        return f"rows of {lengths.prompt:,.0f} tokens, a trainer at {UTILIZATION:.0%} of its GPUs' operations"
    return (
        f"{lengths.prompt:,.0f} tokens read and {lengths.reply:,.0f} sampled in a rollout (`--reply TOKENS` "
        f"says how many are), a trainer at {UTILIZATION:.0%} of its GPUs' operations; docs/planning.md"
    )


def _all_groups(forecasts: Sequence[Forecast]) -> list[tuple[Group, Price]]:
    return [pair for one in forecasts for pair in zip(one.candidate.groups, one.prices, strict=True)]


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _size(size: float) -> str:
    """In GiB, or, where that is little, in MiB with the unit."""
    return f"{size / GIB:.1f}" if size >= GIB / 10 else f"{size / MIB:.1f} MiB"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]).rstrip()
        for row in rows
    ]

"""What a report says besides the rollouts: JSON-able, without secrets, from what a run has written so far.

A run may have been killed at any moment, so that files are missing or end in the middle of a line.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from stackrl.runtime.launch.audit import audit
from stackrl.runtime.launch.runs import last_lines, status_of
from stackrl.runtime.monitor.records import Record, Tail
from stackrl.runtime.run import TOKEN_VARIABLE, RunError, RunFolder

CURVES = (
    *("reward", "reward_std", "reward_min", "reward_max", "solved", "group_signal", "turns", "prefix_breaks"),
    *("staleness_mean", "staleness_max", "dropped", "tokens_generated", "rollouts", "tokens_per_second"),
    *("seconds_step", "seconds_rollouts_wait", "engine_busy"),
    *("trainer/loss", "trainer/validation_loss", "trainer/entropy"),
    *("trainer/gradient_norm", "trainer/learning_rate"),
    *("trainer/mismatch_kl", "trainer/ratio_max", "trainer/capped", "trainer/skipped"),
    "trainer/load_imbalance",
)
"""Metrics that are drawn; besides these, the rewards of each environment."""
MOST_POINTS = 1500
"""Of a curve; longer ones are means of neighbouring steps."""
MOST_EVENTS = 5000
_MOST_EVALUATIONS = 100
_LAST_LINES = 12
_SHORTEST_SECRET = 8
"""Shorter values of the environment (`1`, `cuda`) would be found everywhere."""


def facts(run: RunFolder) -> dict[str, Any]:
    """Everything, as the page reads it."""
    about, stack, plan = (_read(run, name) or {} for name in ("run.json", "stack.json", "plan.json"))
    state = _read(run, "state.json") or {}
    events = Tail(run.events).read()
    steps = surviving(Tail(run.metrics).read(), events)
    told = {
        "run": _run(run, about, state, plan, steps, events),
        "stages": _stages(steps),
        "planned": [
            {"name": s["name"], "kind": s["type"], "steps": s["steps"]} for s in _stack_stages(stack)
        ],
        "curves": _curves(steps),
        "dropped": _dropped(steps),
        "evaluations": _evaluations(events),
        "events": _told_events(events[-MOST_EVENTS:]),
        "events_left_out": max(0, len(events) - MOST_EVENTS),
        "stack": yaml.safe_dump(_without_addresses(stack), sort_keys=False, allow_unicode=True, width=96),
        "plan": _plan(plan),
        "environment": sorted(_environment(run, about)),
        "audit": _audit(run),
    }
    return _clean(told, _values(run, about))


def surviving(steps: Sequence[Record], events: Sequence[Record] = ()) -> list[Record]:
    """The steps in the order of their indices, without those that a return to a checkpoint has undone."""
    kept: list[Record] = []
    undone = [(event["time"], event["index"]) for event in events if event.get("event") == "resumed"]
    for record in steps:
        while kept and kept[-1]["index"] >= record["index"]:
            kept.pop()
        kept.append(record)
    return [r for r in kept if not any(r["time"] <= time and r["index"] >= index for time, index in undone)]


def _run(
    run: RunFolder, about: Record, state: Record, plan: Record, steps: list[Record], events: list[Record]
) -> dict[str, Any]:
    failed = [name for name, how in state.get("roles", {}).items() if how == "failed"]
    logs = run.logs(state.get("attempt", 0))
    newest = [record["time"] for record in (*steps[-1:], *events[-1:]) if record.get("time")]
    return {
        "id": run.id,
        "name": about.get("name", run.id),
        "status": status_of(run) if state else "created",
        "reason": state.get("reason", ""),
        "made": about.get("made"),
        "began": state.get("began") or None,
        "ended": state.get("ended"),
        "newest": max(newest, default=None),
        "written": time.time(),
        "attempt": state.get("attempt", 0),
        "incarnation": state.get("incarnation", 0),
        "roles": list(state.get("roles", {}).items()),
        "devices": _devices(plan),
        "words": [[name, last_lines(logs / f"{name}.log", _LAST_LINES)] for name in failed],
        "done": steps[-1]["index"] + 1 if steps else 0,
        "tokens": sum(record.get("tokens_generated") or 0 for record in steps),
        "trained": sum(record.get("trainer/tokens_trained") or 0 for record in steps),
    }


def _devices(plan: Record) -> str:
    """``8 × H100 on 2 nodes``, ``CPU, 3 processes``."""
    if not plan:
        return ""
    nodes = f" on {plan['nodes']} nodes" if plan.get("nodes", 1) > 1 else ""
    if plan.get("gpus_per_node"):
        return f"{plan['nodes'] * plan['gpus_per_node']} × {plan.get('accelerator') or 'GPU'}{nodes}"
    return f"{str(plan.get('device', '')).upper()}, {len(plan.get('processes', ()))} processes{nodes}"


def _stack_stages(stack: Record) -> list[Record]:
    return stack.get("stages", []) if isinstance(stack, dict) else []


def _stages(steps: Sequence[Record]) -> list[dict[str, Any]]:
    """Where each stage begins, by the index of its first step."""
    found: list[dict[str, Any]] = []
    for record in steps:
        if not found or found[-1]["name"] != record.get("stage"):
            found.append({"name": record.get("stage"), "kind": record.get("kind"), "from": record["index"]})
    return found


def _curves(steps: Sequence[Record]) -> dict[str, Any]:
    """Columns over stretches of steps: one step each, or more where there are many. ``to`` is inclusive."""
    size = max(1, math.ceil(len(steps) / MOST_POINTS))
    stretches = [steps[place : place + size] for place in range(0, len(steps), size)]
    environments = sorted({key for record in steps for key in record if key.startswith("reward/")})
    columns = {name: [_mean(stretch, name) for stretch in stretches] for name in (*CURVES, *environments)}
    return {
        "from": [stretch[0]["index"] for stretch in stretches],
        "to": [stretch[-1]["index"] for stretch in stretches],
        "columns": {
            name: values for name, values in columns.items() if any(value is not None for value in values)
        },
    }


def _mean(stretch: Sequence[Record], name: str) -> float | None:
    values = [value for record in stretch if isinstance(value := record.get(name), int | float)]
    if not values:
        return None
    pick = max if name.endswith("_max") else min if name.endswith("_min") else None
    value = pick(values) if pick else sum(values) / len(values)
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _dropped(steps: Sequence[Record]) -> dict[str, float]:
    """Rollouts dropped, by reason."""
    found: dict[str, float] = {}
    for record in steps:
        for key, value in record.items():
            if key.startswith("dropped/") and value:
                reason = key.removeprefix("dropped/")
                found[reason] = found.get(reason, 0) + value
    return found


def _evaluations(events: Sequence[Record]) -> list[dict[str, Any]]:
    """Stage, moment, optimizer steps before it and numbers; of one that was done again, the newer."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in events:
        if event.get("event") == "evaluated":
            place = {name: event.get(name) for name in ("stage", "when", "index")}
            numbers = {key: v for key, v in event.items() if isinstance(v, float) and key != "time"}
            found[tuple(place.values())] = place | {"numbers": numbers}
    return list(found.values())[-_MOST_EVALUATIONS:]


def _told_events(events: Sequence[Record]) -> list[list[Any]]:
    """Time, name, and the other fields as pairs of text."""
    return [
        [
            event.get("time"),
            str(event.get("event", "")),
            [[key, _field(value)] for key, value in event.items() if key not in ("time", "event")],
        ]
        for event in events
    ]


def _field(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _plan(plan: Record) -> list[dict[str, str]]:
    """A row for each process."""
    return [
        {
            "process": f"{p['role']}-{p['index']}" if p["role"] != "orchestrator" else p["role"],
            "node": str(p["node"]),
            "cores or GPUs": ", ".join(map(str, p.get("gpus") or p.get("cores") or ())) or "any",
            "ports": ", ".join(p.get("ports", ())) or "–",
            "command": " ".join(["python", *p["command"]]),
        }
        for p in plan.get("processes", ())
    ]


def _audit(run: RunFolder) -> dict[str, Any]:
    """The books, checked without reading all of the checkpoints, which a report at the end of a run has no
    time for; ``problem`` says why they could not be."""
    try:
        return audit(run, contents=False).as_json()
    except RunError as error:
        return {"problem": str(error)}
    except Exception as error:  # a report of a damaged run is of use without them
        return {"problem": f"the books cannot be read: {type(error).__name__}: {error}"}


def _without_addresses(stack: Record) -> Record:
    """The stack without what is a secret by itself: the address and the arguments of who is notified."""
    notify = stack.get("guards", {}).get("notify") or {}
    hidden = dict(notify)
    if (webhook := notify.get("webhook")) and not webhook.startswith("${"):
        hidden["webhook"] = "(not shown)"
    if command := notify.get("command"):
        words = command.split() if isinstance(command, str) else command
        hidden["command"] = f"{words[0]} (arguments are not shown)" if len(words) > 1 else words[0]
    return stack if hidden == notify else stack | {"guards": stack["guards"] | {"notify": hidden}}


def _environment(run: RunFolder, about: Record) -> dict[str, str]:
    """Variables that the run was given: `envs` and `secrets` of its file, with such values as are known."""
    found = {str(name): str(value) for name, value in (about.get("environment") or {}).items()}
    try:
        source = yaml.safe_load((run.path / "source.yaml").read_bytes())
    except (OSError, yaml.YAMLError):
        return found
    for key in ("envs", "secrets"):
        given = source.get(key) if isinstance(source, dict) else None
        for name, value in given.items() if isinstance(given, dict) else ():
            found.setdefault(str(name), str(value or ""))
    return found


def _values(run: RunFolder, about: Record) -> dict[str, str]:
    """Value of the environment → how it is shown: by its name."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    given = _environment(run, about) | ({TOKEN_VARIABLE: token} if token else {})
    return {value: f"${{{name}}}" for name, value in given.items() if len(value) >= _SHORTEST_SECRET}


def _clean(told: Any, values: Mapping[str, str]) -> Any:
    """``told`` with every one of ``values`` in its text replaced, and nothing that JSON does not have."""
    if isinstance(told, str):
        for value, shown in values.items():
            told = told.replace(value, shown)
        return told
    if isinstance(told, dict):
        return {key: _clean(value, values) for key, value in told.items()}
    if isinstance(told, list | tuple):
        return [_clean(value, values) for value in told]
    return None if isinstance(told, float) and not math.isfinite(told) else told


def _read(run: RunFolder, name: str) -> Any:
    """A JSON file of the run's folder; None where it is not there or cannot be read."""
    try:
        return run.read(name)
    except (OSError, RunError):
        return None

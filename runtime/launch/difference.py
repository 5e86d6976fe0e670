"""`stackrl diff RUN RUN`: in what two runs differ, from their stacks to their results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from stackrl.runtime.launch.listing import describe
from stackrl.runtime.monitor.records import Reader
from stackrl.runtime.run import RunError, RunFolder, find_run

ABSENT = "—"
"""In the table: this run has no such key."""
_MOST_SHOWN = 60
"""Characters of a value in the table."""

Entry = dict[str, Any]
"""``key``, ``left``, ``right``; a side that has no such key lacks its name."""


def diff(left: str, right: str, output: str) -> int:
    """Print what differs between two runs, as a table or as JSON."""
    found = difference(find_run(left), find_run(right))
    print(json.dumps(found, indent=1, ensure_ascii=False) if output == "json" else table(found))
    return 0


def difference(left: RunFolder, right: RunFolder) -> dict[str, Any]:
    """``stack``, ``versions``, ``results``: the entries that differ; ``lineage``: where each comes from."""
    return {
        "left": left.id,
        "right": right.id,
        "lineage": {"left": lineage(left), "right": lineage(right)},
        "stack": differing_keys(left.read("stack.json"), right.read("stack.json")),
        "versions": _differing(_versions(left), _versions(right)),
        "results": _differing(_results(left), _results(right)),
    }


def differing_keys(left: dict[str, Any], right: dict[str, Any]) -> list[Entry]:
    """Values of two trees that differ, under the keys that `--set` takes."""
    return _differing(dict(_keys(left)), dict(_keys(right)))


def lineage(run: RunFolder) -> list[dict[str, Any]]:
    """The checkpoints that ``run`` was forked from, its parent's first: run and step of each."""
    found: list[dict[str, Any]] = []
    about = run.read("run.json")
    while (parent := about.get("parent")) and parent not in found:
        found.append(parent)
        try:
            about = find_run(parent["run"]).read("run.json")
        except RunError:  # it was deleted
            break
    return found


def table(found: dict[str, Any]) -> str:
    """For people."""
    rows = [("", found["left"], found["right"])]
    origins = [_origin(found["lineage"][side]) for side in ("left", "right")]
    if any(origins):
        rows.append(("forked from", *(origin or ABSENT for origin in origins)))
    for section in ("stack", "versions", "results"):
        rows.append((section.upper(), "", ""))
        rows += [
            (f"  {entry['key']}", *(_shown(entry, side) for side in ("left", "right")))
            for entry in found[section]
        ] or [("  the same", "", "")]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[2]]).rstrip()
        for row in rows
    )


def _keys(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a stack under the key that `--set` takes; entries of a list go by name."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _keys(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        yield f"{path} (order)", [one["name"] for one in value]
        for one in value:
            inside = {key: inner for key, inner in one.items() if key != "name"}
            yield from _keys(inside, f"{path}.{one['name']}")
    else:
        yield path, value


def _differing(left: dict[str, Any], right: dict[str, Any]) -> list[Entry]:
    return [
        {"key": key}
        | ({"left": left[key]} if key in left else {})
        | ({"right": right[key]} if key in right else {})
        for key in left | right
        if key not in left or key not in right or left[key] != right[key]
    ]


def _versions(run: RunFolder) -> dict[str, Any]:
    return run.read("run.json").get("versions", {})


def _results(run: RunFolder) -> dict[str, Any]:
    """How far the run came and what it has learnt: of each RL stage the mean reward of its first and of its
    last steps, and its evaluations."""
    described, reader = describe(run), Reader(run)
    reader.read()
    results = {key: described[key] for key in ("status", "step", "stage", "reward")}
    for stage, first, last in reader.history.gains():
        results |= {f"{stage}: first rewards": first, f"{stage}: last rewards": last}
    for stage, evaluations in reader.history.evaluations.items():
        for when, event in evaluations.items():
            scores = {
                key: value for key, value in event.items() if isinstance(value, float) and key != "time"
            }
            results |= {f"{stage}: {when}: {key}": value for key, value in scores.items()}
    return results


def _origin(lineage: list[dict[str, Any]]) -> str:
    return " ← ".join(f"{parent['run']}@{parent['step']}" for parent in lineage)


def _shown(entry: Entry, side: str) -> str:
    if side not in entry:
        return ABSENT
    value = entry[side]
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 1]}…"

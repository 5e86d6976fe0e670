"""What the processes of a run say they are doing, in words for people."""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_STARTING = "starting"
_NAMED = 3
"""Processes of a role with the same words that are named one by one."""


@dataclass(frozen=True)
class Doing:
    """``since`` is in seconds since the epoch."""

    text: str
    since: float


def read_doings(heartbeats: Path) -> dict[str, Doing]:
    """Process → what it said last. Of several processes under one name, the one that spoke last."""
    found: dict[str, Doing] = {}
    for file in heartbeats.glob("*.*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is being replaced
            said = json.loads(file.read_bytes())
            doing = Doing(str(said["doing"]), float(said["since"]))
            before = found.get(file.stem)
            if before is None or (doing.text != _STARTING, doing.since) > (
                before.text != _STARTING,
                before.since,
            ):
                found[file.stem] = doing
    return dict(sorted(found.items()))


def grouped(states: Mapping[str, str], doings: Mapping[str, Doing]) -> list[str]:
    """A phrase for each process, or for all of a role that say the same: `trainer ×8 waiting for batch 3`."""
    said = {
        name: doings[name].text if state == "running" and name in doings else state
        for name, state in states.items()
    }
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for name, text in said.items():
        alike[name.rpartition("-")[0] or name, text].append(name)
    phrases = []
    for (role, text), names in alike.items():
        who = f"{role} ×{len(names)}" if len(names) > _NAMED else ", ".join(names)
        phrases.append(f"{who} {text}")
    return phrases

"""Which environments have code or data of the user, to be looked at before a run; imports little."""

from __future__ import annotations

from importlib import import_module

from stackrl.schemas.environments import Environment
from stackrl.schemas.rules_of_arguments import MADE_BY_RULES


def needs_a_look(environment: Environment, whole: bool) -> bool:
    """Whether only making it tells that it can be made. ``whole``: and that all is there that it needs."""
    kind, data = environment.type, environment.args.get("dataset")
    if kind == "verifiers" or kind in MADE_BY_RULES:
        return False
    return whole or kind in ("python", "dataset") or not (is_made_up(kind, data) or is_fetched(kind, data))


def is_made_up(kind: str, data: str) -> bool:
    """Whether there is no data set behind the name."""
    if kind != "swe":
        return False
    from stackrl.runtime.environments.swe import MINIATURE

    return data == MINIATURE


def is_fetched(kind: str, data: str) -> bool:
    """Whether ``data`` names a data set that is fetched from the Hub, by its name there or one of ours."""
    from stackrl.runtime.environments.questions import on_the_hub

    known = {"math": "stackrl.runtime.environments.math", "swe": "stackrl.runtime.environments.swe.datasets"}
    return (kind in known and data in import_module(known[kind]).KNOWN) or on_the_hub(data)

"""Rules over `args` of environments that one key's schema cannot tell. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from stackrl.schemas.problems import Path, Problem
from stackrl.schemas.rules_of_workers import environments_of
from stackrl.schemas.stack import Stack

Problems = Iterator[Problem]
MADE_BY_RULES = frozenset(
    {
        "reverse_text",
        "reverse_text_tries",
        "swap_words",
        "sort_words",
        "arithmetic",
        "word_problems",
        "guess_number",
        "wordle",
        "tool_use",
    }
)
"""Types whose tasks are made up: an environment of theirs is made in a moment, from `args` alone."""


def arguments_agree(stack: Stack) -> Problems:
    """What only the environment itself knows of its arguments; it is made for that."""
    from stackrl.runtime.environments import RUNNABLE

    for path, environment in environments_of(stack):
        place, args = (*path, "args"), environment.args
        if environment.type in MADE_BY_RULES and _fits(environment.type, args):
            try:
                RUNNABLE[environment.type].made(args)
            except ValueError as error:
                yield _told(place, args, str(error))


def judges_can_judge(stack: Stack) -> Problems:
    """A prompt has to show the answer, and scores need a range."""
    for path, environment in environments_of(stack):
        if environment.type != "dataset" or not _fits(environment.type, environment.args):
            continue
        rewards = environment.args["reward"]
        for name, reward in rewards.items() if isinstance(rewards, dict) else ():
            if isinstance(reward, dict):
                from stackrl.runtime.environments.judge import Judge

                try:
                    Judge(**reward["judge"])
                except ValueError as error:
                    place = (*path, "args", "reward", name, "judge")
                    yield _told(place, reward["judge"], str(error).removeprefix("judge: "))


def images_have_containers(stack: Stack) -> Problems:
    """Repositories of the known data sets stand in images, where no folder of clones is named."""
    for path, environment in environments_of(stack):
        args = environment.args
        if environment.type != "swe" or not _fits("swe", args) or args.get("repositories"):
            continue
        from stackrl.runtime.environments.swe.datasets import KNOWN

        kind = args.get("sandbox", {}).get("type", "bubblewrap")
        if args["dataset"] in KNOWN and kind != "docker":
            key = ("sandbox", "type") if "sandbox" in args else ()
            yield Problem(
                (*path, "args", *key),
                f"the repositories of {args['dataset']} stand in images, which {kind} does not run",
                "write sandbox: {type: docker}, or name a folder of clones as repositories",
            )


def _fits(kind: str, args: Mapping[str, Any]) -> bool:
    """Whether ``args`` are what the schema says; else that is what is told of them."""
    from stackrl.runtime.environments import schema_of
    from stackrl.schemas.jsonschema_words import problems_by

    return not any(problems_by(schema_of(kind), dict(args), ()))


def _told(path: Path, args: Mapping[str, Any], what: str) -> Problem:
    """At the key that the text begins with, where it does."""
    key, colon, rest = what.partition(": ")
    named = bool(colon) and key in args
    what, _, mend = (rest if named else what).partition("; ")
    if not mend:
        mend = (_turned_round(args[key]) if named else "") or "docs/environments.md tells what it takes"
    return Problem((*path, key) if named else path, what, mend)


def _turned_round(value: Any) -> str:
    """What to write instead of a range that begins with its end."""
    if isinstance(value, list) and len(value) == 2 and value[0] > value[1]:
        return f"write [{value[1]}, {value[0]}]"
    return ""

"""How a task is solved, to learn from: look around, apply the solution, submit."""

from __future__ import annotations

import json
from random import Random
from string import ascii_lowercase

from stackrl.runtime.environments.base import Turn, tool, user
from stackrl.runtime.environments.swe.agent import SHELL, SUBMIT
from stackrl.runtime.environments.swe.instances import Instance


def demonstration(instance: Instance, rng: Random, noise: float, *, blocks: bool) -> list[Turn]:
    """Letters of the last answer alone are replaced: what other wrong commands print is not known here.

    Raises NotImplementedError for a task without a solution.
    """
    if not instance.patch:
        raise NotImplementedError(f"{instance.instance_id} has no solution (`patch`) to learn from")
    say = user if blocks else tool
    turns = []
    if instance.files:
        seen = sorted({path.partition("/")[0] for path, _ in instance.files})
        turns.append(Turn(written("ls", blocks), messages=(say("\n".join(seen) + "\n"),)))
    apply = f"git apply <<'END'\n{instance.patch.rstrip()}\nEND"
    turns.append(Turn(written(apply, blocks), messages=(say(""),)))
    last = "".join(
        rng.choice(ascii_lowercase) if letter in ascii_lowercase and rng.random() < noise else letter
        for letter in written(SUBMIT.name, blocks)
    )
    return [*turns, Turn(last)]


def written(command: str, blocks: bool) -> str:
    """A command as the model gives it; calls are those of ChatML models."""
    if blocks:
        return f"```bash\n{command}\n```"
    call = {"name": SHELL.name, "arguments": {"command": command}}
    if command == SUBMIT.name:
        call = {"name": SUBMIT.name, "arguments": {}}
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

"""The loop of a rollout: the model gives commands, reads what they print, and says when it is done."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from stackrl.runtime.environments.base import Answer, Call, Message, NoRoom, Policy, Tool, tool, user
from stackrl.runtime.environments.sandboxes.base import Sandbox

SHELL = Tool(
    name="shell",
    description="Run a command with bash, in the folder of the repository. Every command starts there anew.",
    parameters={
        "type": "object",
        "properties": {"command": {"type": "string", "description": "What to run."}},
        "required": ["command"],
    },
)
SUBMIT = Tool(
    name="submit",
    description="Say that the problem is solved. The files are then taken as they are.",
    parameters={"type": "object", "properties": {}},
)
TOOLS = (SHELL, SUBMIT)
TOOLS_TEXT = (
    "Use the tool `shell` to look around, to change files and to try things; call `submit` at the end."
)
BLOCKS_TEXT = (
    "In every answer give one command in a block, like this:\n```bash\nls\n```\n"
    "It is run with bash in the folder of the repository, anew each time, and you are told what it prints. "
    "Give the command `submit` alone at the end."
)
MOST_SILENT = 3
"""Answers in a row without a command; then the rollout ends."""
_BLOCK = re.compile(r"```(?:bash|sh|shell)?[ \t]*\n(.*?)\n?```", re.DOTALL)


@dataclass(frozen=True)
class Rules:
    """How far an agent may go."""

    turns: int
    """Answers that the model may give."""
    output: int
    """Characters of a command's output that it is shown."""
    blocks: bool
    """Whether commands come in blocks of the text, not as calls of tools."""
    path: str
    """Folder that is looked for programs first, in the sandbox; empty for none."""


@dataclass
class Work:
    """What an agent did."""

    turns: int = 0
    commands: int = 0
    malformed: int = 0
    """Calls that could not be read, and answers without any."""
    timeouts: int = 0
    submitted: bool = False
    out_of_time: bool = False
    silent: int = 0
    """Answers in a row with nothing to do."""

    @property
    def over(self) -> bool:
        return self.submitted or self.silent >= MOST_SILENT

    def metrics(self) -> Mapping[str, float]:
        names = ("turns", "commands", "malformed", "timeouts", "submitted", "out_of_time")
        return {name: float(getattr(self, name)) for name in names}


async def work(
    policy: Policy, sandbox: Sandbox, folder: str, rules: Rules, until: float | None = None
) -> Work:
    """Let ``policy`` work in ``folder`` until it submits, has no turns or no room left, or does nothing.

    At ``until``, of the event loop's clock, that ends wherever it is; the files stay as they are then.
    """
    done = Work()
    try:
        async with asyncio.timeout_at(until) as limit:
            await _take_turns(policy, sandbox, folder, rules, done)
    except TimeoutError:
        if not limit.expired():
            raise
        done.out_of_time = True
    return done


async def _take_turns(policy: Policy, sandbox: Sandbox, folder: str, rules: Rules, done: Work) -> None:
    messages: tuple[Message, ...] = ()
    while done.turns < rules.turns and not done.over:
        try:
            answer = await policy.answer(*messages)
        except NoRoom:
            break
        done.turns += 1
        messages = await _Turn(done, sandbox, folder, rules).replies(answer)


class _Turn:
    """What is said to one answer."""

    def __init__(self, done: Work, sandbox: Sandbox, folder: str, rules: Rules) -> None:
        self._done, self._sandbox, self._folder, self._rules = done, sandbox, folder, rules

    async def replies(self, answer: Answer) -> tuple[Message, ...]:
        calls = (in_block(answer.said),) if self._rules.blocks else answer.calls
        say = user if self._rules.blocks else tool
        self._done.silent += 1  # until one of them can be read
        if not calls:
            self._done.malformed += 1
            cut = "" if answer.closed else "Your answer was cut off. "
            return (user(f"{cut}Call `shell` with a command, or `submit`."),)
        replies = [say(await self._reply(call)) for call in calls if not self._done.submitted]
        return tuple(replies)

    async def _reply(self, call: Call) -> str:
        done = self._done
        command = call.arguments.get("command")
        known = call.name == SUBMIT.name or (call.name == SHELL.name and isinstance(command, str))
        if call.problem or not known:
            done.malformed += 1
            return call.problem or self._mistake(call)
        done.silent = 0
        if call.name == SUBMIT.name:
            done.submitted = True
            return "submitted"
        done.commands += 1
        return await self._run(command)

    async def _run(self, command: str) -> str:
        path = f"export PATH={shlex.quote(self._rules.path)}:$PATH; " if self._rules.path else ""
        script = f'exec 2>&1; {path}exec bash -c "$1"'
        result = await self._sandbox.run(["sh", "-c", script, "sh", command], folder=self._folder)
        text = shortened(result.text, self._rules.output)
        if result.timed_out:
            self._done.timeouts += 1
            return f"{text}\n[it took too long and was ended]"
        if result.out_of_memory or result.out_of_disk:
            return f"{text}\n[it was ended: it took too much {'memory' if result.out_of_memory else 'room'}]"
        return text if not result.code else f"{text}\n[exit status {result.code}]"

    def _mistake(self, call: Call) -> str:
        if call.name == SHELL.name:
            return "`shell` needs `command`, a text."
        return f"There is no tool {call.name!r}; there are `shell` and `submit`."


def in_block(text: str) -> Call:
    """The command of an answer that gives it in a block."""
    blocks = _BLOCK.findall(text)
    if len(blocks) != 1:
        problem = "There is no block with a command" if not blocks else f"There are {len(blocks)} blocks"
        return Call(SHELL.name, problem=f"{problem}; give one, like this:\n```bash\nls\n```")
    command = blocks[0].strip()
    return Call(SUBMIT.name) if command == SUBMIT.name else Call(SHELL.name, {"command": command})


def shortened(text: str, limit: int) -> str:
    """``text``, or its beginning and end with a note between."""
    if len(text) <= limit:
        return text
    left_out = len(text) - limit
    return (
        f"{text[: limit // 2]}\n[{left_out} characters left out]\n{text[len(text) - (limit - limit // 2) :]}"
    )

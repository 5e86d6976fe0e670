"""Classic environments, on verifiers 0.3.1: a function ``load_environment`` and a data set."""

from __future__ import annotations

import inspect
import math
import sys
from types import ModuleType
from typing import Any

from verifiers.legacy.clients import Client
from verifiers.legacy.errors import OverlongPromptError
from verifiers.legacy.types import Response, ResponseMessage, Tool, ToolCall, Usage

_adapter = sys.modules["stackrl_adapter"]
Refusal, Answers, plain, check_answers = (
    _adapter.Refusal,
    _adapter.Answers,
    _adapter.plain,
    _adapter.check_answers,
)
_MODEL = "policy"


def load(package: Any, module: ModuleType, args: dict[str, Any], agent: dict[str, Any]) -> V0:
    """Raises Refusal where the stack's ``args`` do not fit, or no task can be had."""
    if agent:
        raise Refusal(
            "agent", f"{package.id} is a classic (v0) environment, which has no agents", "remove it"
        )
    signature = inspect.signature(module.load_environment)
    try:
        signature.bind(**args)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values())) or "none"
        raise Refusal("args", f"{package.id}: {error}", f"it takes {takes}") from None
    try:
        environment = module.load_environment(**args)
        tasks = environment.get_dataset()
        tasks[0]
    except Exception as error:
        raise Refusal("args", f"loading {package.id} fails: {type(error).__name__}: {error}") from error
    if environment.requires_group_rollouts:
        raise Refusal("id", f"{package.id} judges whole groups, and a run has each rollout judged by itself")
    return V0(environment, tasks)


class V0:
    """One environment, many rollouts at once."""

    about: dict[str, Any]

    def __init__(self, environment: Any, tasks: Any) -> None:
        self._environment, self.tasks = environment, tasks

    async def rollout(self, number: int, policy: Any) -> dict[str, Any]:
        row = self.tasks[number % len(self.tasks)]
        client = _PolicyClient(policy)
        state = await self._environment._run_rollout_state(row, client, _MODEL, {})
        if state.get("error") is not None:
            error = state["error"].__cause__ or state["error"]
            raise RuntimeError(f"{type(error).__name__}: {error}")
        if state.get("timed_out"):
            raise TimeoutError("the environment's own time limit")
        judged = dict(map(_judged, state["trajectory"]))
        if not judged and client.no_room:
            raise RuntimeError(client.no_room)
        scores = self._scores(state)
        return {
            "scores": scores,
            "metrics": {name: value for name, value in state["metrics"].items() if name not in scores},
            "answers": check_answers(client.answers.texts, judged),
        }

    def _scores(self, state: Any) -> dict[str, tuple[float, float]]:
        """Rewards by name, each with its weight."""
        rubric, values, total = self._environment.rubric, state["metrics"], float(state["reward"])
        weights = dict(zip(rubric._get_reward_func_names(), rubric._get_reward_weights(), strict=True))
        scores = {name: (values[name], weight) for name, weight in weights.items() if name in values}
        told = math.fsum(score * weight for score, weight in scores.values())
        if math.isclose(told, total, rel_tol=1e-6, abs_tol=1e-9):
            return scores
        return {"reward": (total, 1.0)}  # functions of one name: what each of them gave is not told


def _judged(step: Any) -> tuple[int, str]:
    """The answer of a step, as the environment has it."""
    [message] = step["completion"]
    return int(step["response"].id), _adapter.text_of(message.content)


class _PolicyClient(Client):
    """The policy of one rollout, as verifiers asks a model."""

    def __init__(self, policy: Any) -> None:
        super().__init__(None)
        self.answers = Answers(policy)
        self.no_room = ""

    def setup_client(self, config: Any) -> None:
        """There is nothing to connect to."""

    async def to_native_tool(self, tool: Tool) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": function}

    async def to_native_prompt(self, messages: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [_plain(message) for message in messages], {}

    async def get_native_response(
        self, prompt: list[dict[str, Any]], model: str, sampling_args: Any, tools: Any = None, **_: Any
    ) -> Any:
        try:
            return await self.answers.to(prompt, tools or [])
        except Exception as error:
            if type(error).__name__ == "NoRoom":
                self.no_room = str(error)
                raise OverlongPromptError(str(error)) from error
            raise

    async def raise_from_native_response(self, response: Any) -> None:
        """Whatever the policy says is an answer."""

    async def from_native_response(self, response: Any) -> Response:
        number, message, closed = response
        calls = [ToolCall(**call) for call in message.get("calls", ())]
        return Response(
            id=str(number),
            created=0,
            model=_MODEL,
            usage=Usage(prompt_tokens=0, reasoning_tokens=0, completion_tokens=0, total_tokens=0),
            message=ResponseMessage(
                content=message["content"],
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop" if closed else "length",
                is_truncated=not closed,
            ),
        )

    async def close(self) -> None:
        """Nothing is open."""


def _plain(message: Any) -> dict[str, Any]:
    calls = [
        {"id": call.id, "name": call.name, "arguments": call.arguments}
        for call in getattr(message, "tool_calls", None) or ()
    ]
    return plain(message.role, message.content, calls=calls, name=message.get("name"))

"""Environments of verifiers 0.4: a Taskset, and agents that play its tasks."""

from __future__ import annotations

import itertools
import sys
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

import httpx
import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.clients import Client, TrainClientConfig
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.interception import server
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.types import AssistantMessage, Response, ToolCall, Usage
from verifiers.v1.utils import loaders

_adapter = sys.modules["stackrl_adapter"]
Refusal, Shared, Answers, plain, check_answers = (
    _adapter.Refusal,
    _adapter.Shared,
    _adapter.Answers,
    _adapter.plain,
    _adapter.check_answers,
)
CHAT = "stackrl-chat"
"""The harness of this file: a chat with tools, inside the worker."""
_MODEL = "policy"
_POLICY = TrainClientConfig(
    base_url="http://policy.invalid/v1", renderer_model_name=_MODEL, api_key_var="NONE"
)
"""Stands for the policy where verifiers wants an endpoint. Nothing is ever sent there."""
_NO_ROOM = "maximum context length"
"""Words by which programs of verifiers know that their conversation is full."""


def load(package: Any, module: ModuleType, args: dict[str, Any], agent: dict[str, Any]) -> V1:
    """Raises Refusal where the stack's ``args`` or ``agent`` do not fit, or no task can be had."""
    _install_harness()
    try:
        config = vf.resolve_env_config(_config(package, args, agent))
    except ValidationError as error:
        raise _refusal(package, error) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise Refusal("id", f"{package.id}: {error}") from error
    try:
        environment = vf.load_environment(config)
        taskset = environment.taskset
        tasks = list(taskset if taskset.bounded else itertools.islice(taskset, _adapter.INFINITE_TASKS))
    except Exception as error:
        raise Refusal("args", f"loading {package.id} fails: {type(error).__name__}: {error}") from error
    if not tasks:
        raise Refusal("args", f"{package.id} has no task with these args")
    return V1(environment, tasks)


class V1:
    """One environment, many rollouts at once."""

    about: dict[str, Any]

    def __init__(self, environment: Any, tasks: list[Any]) -> None:
        self._environment, self.tasks = environment, tasks
        self._client = _PolicyClient()
        resolve = server.resolve_client
        server.resolve_client = lambda config: self._client if config == _POLICY else resolve(config)
        self._shared = Shared(environment.serving)
        """What the environment's rollouts have in common, its servers of tools for example."""

    async def rollout(self, number: int, policy: Any) -> dict[str, Any]:
        await self._shared.up()
        task = self.tasks[number % len(self.tasks)]
        with self._client.asked(policy) as asked:
            episode = await self._environment.run_slot(
                self._environment.slots(task, 1)[0],
                vf.ModelContext(model=_MODEL, client=_POLICY, sampling=vf.SamplingConfig()),
                on_trace=asked.take,
            )
        _check(episode, asked)
        learners = [trace for trace in episode.traces if trace.agent.trainable]
        if len(learners) != 1:
            raise RuntimeError(f"{len(learners)} agents are to be trained, and a rollout has one reward")
        [trace] = learners
        judged = asked.judged(trace)
        return {
            "scores": {name: (reward.score, reward.weight) for name, reward in trace.rewards.items()},
            "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
            "answers": check_answers(asked.answers.texts, judged),
        }


def _check(episode: Any, asked: _Asked) -> None:
    """What failed has no reward. Raises RuntimeError."""
    errors = [*episode.errors, *(trace.last_error for trace in episode.traces if not trace.ok)]
    if not episode.ok:
        told = (
            "; ".join(f"{error.type}: {error.message}" for error in errors if error) or "it did not say why"
        )
        raise RuntimeError(told)
    if episode.is_timeout or any(trace.is_timeout for trace in episode.traces):
        raise TimeoutError("a time limit of the environment's own")
    if not asked.answers.texts and asked.no_room:
        raise RuntimeError(asked.no_room)


class _Asked:
    """One rollout's questions to the policy, and which agent's they were."""

    def __init__(self, client: _PolicyClient, policy: Any) -> None:
        self._client = client
        self.answers = Answers(policy)
        self.no_room = ""
        self._traces: set[str] = set()
        self._of: dict[int, str] = {}

    def __enter__(self) -> _Asked:
        return self

    def __exit__(self, *error: object) -> None:
        for trace in self._traces:
            del self._client.rollouts[trace]

    def take(self, trace: Any) -> None:
        """From now on, what this agent says belongs to the rollout."""
        self._traces.add(trace.id)
        self._client.rollouts[trace.id] = self

    async def answer(self, trace: str, messages: Any, tools: Any) -> Response:
        try:
            number, message, closed = await self.answers.to(messages, tools)
        except Exception as error:
            if type(error).__name__ != "NoRoom":
                raise
            self.no_room = str(error)
            raise ProviderError(f"{_NO_ROOM}: {error}", status_code=400) from error
        self._of[number] = trace
        return _response(number, message, closed)

    def judged(self, trace: Any) -> dict[int, str]:
        """The answers of ``trace``, as it holds them in the end."""
        numbers = sorted(number for number, of in self._of.items() if of == trace.id)
        texts = [message.content or "" for message in trace.assistant_messages]
        if len(texts) != len(numbers):
            raise RuntimeError(f"the policy gave {len(numbers)} answers, the trace holds {len(texts)}")
        return dict(zip(numbers, texts, strict=True))


class _PolicyClient(Client):
    """The policy, as verifiers asks a model."""

    def __init__(self) -> None:
        self.rollouts: dict[str, _Asked] = {}
        """By the id of an agent's trace."""

    def asked(self, policy: Any) -> _Asked:
        return _Asked(self, policy)

    async def get_response(
        self,
        dialect: Any,
        body: dict,
        sampling: Any,
        session_id: str | None = None,
        turn: Any = None,
        **_: Any,
    ) -> Response:
        if not isinstance(dialect, ChatDialect):
            raise NotImplementedError(
                f"the policy takes chat completions, not those of {type(dialect).__name__}"
            )
        request = turn if turn is not None else dialect.parse_request(body)
        messages = [_plain(message) for message in (turn.prompt if turn is not None else request.messages)]
        tools = [tool_to_wire(tool) for tool in request.tools or ()]
        response = await self.rollouts[session_id].answer(session_id, messages, tools)
        response.raw = serialize_completion(response, _MODEL)
        return response


def _response(number: int, message: dict[str, Any], closed: bool) -> Response:
    calls = [ToolCall(**call) for call in message.get("calls", ())]
    return Response(
        id=f"answer-{number}",
        created=0,
        model=_MODEL,
        message=AssistantMessage(content=message["content"] or None, tool_calls=calls or None),
        finish_reason="tool_calls" if calls else "stop" if closed else "length",
        usage=Usage(prompt_tokens=0, completion_tokens=0),
    )


def _plain(message: Any) -> dict[str, Any]:
    calls = [
        {"id": call.id, "name": call.name, "arguments": call.arguments}
        for call in getattr(message, "tool_calls", None) or ()
    ]
    return plain(message.role, message.content, calls=calls, name=getattr(message, "name", None))


class ChatHarnessConfig(HarnessConfig):
    """The harness of this file has no settings of its own."""


class ChatHarness(Harness[ChatHarnessConfig]):
    """Asks, runs the tools that the model calls, and asks again, until the model calls none."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        async with AsyncExitStack() as stack:
            headers = {"Authorization": f"Bearer {secret}"}
            http = httpx.AsyncClient(headers=headers, timeout=None, trust_env=False)
            await stack.enter_async_context(http)
            servers = {
                name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()
            }
            tools, dispatch, connected = await connect_mcp({"mcpServers": servers}, stack)
            body = {"model": ctx.model, "messages": self._first_messages(data)} | (
                {"tools": tools} if tools else {}
            )
            while True:
                reply = await http.post(f"{endpoint}/chat/completions", json=body)
                if reply.status_code >= 400:
                    full = _NO_ROOM in reply.text or trace.stop_condition is not None
                    return ProgramResult(0 if full else 1, "", reply.text)
                message = reply.json()["choices"][0]["message"]
                body["messages"].append(message)
                if not message.get("tool_calls"):
                    return ProgramResult(0, "", "")
                for call in message["tool_calls"]:
                    body["messages"].append(await _called(call, dispatch, connected))

    def _first_messages(self, data: Any) -> list[dict[str, Any]]:
        system, prompt = self.resolve_prompt(data)
        first = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            return [*first, {"role": "user", "content": prompt}]
        return [*first, *map(message_to_wire, prompt or ())]


async def _called(call: dict[str, Any], dispatch: Any, servers: Any) -> dict[str, Any]:
    """The message of what a tool gave, or of what was wrong with the call."""
    name = call["function"]["name"]
    try:
        arguments = _adapter.json.loads(call["function"]["arguments"])
        if name not in dispatch:
            content = f"error: there is no tool {name!r}"
        elif not isinstance(arguments, dict):
            content = "error: the arguments of a tool are a JSON object"
        else:
            content = await call_mcp(servers, dispatch, name, arguments)
    except ValueError as error:
        content = f"error: the arguments are not JSON: {error}"
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}


def _install_harness() -> None:
    """Verifiers finds a harness by importing a module of its name."""
    module = ModuleType(CHAT.replace("-", "_"))
    module.ChatHarness, module.__all__ = ChatHarness, ["ChatHarness"]
    sys.modules[module.__name__] = module


def _config(package: Any, args: dict[str, Any], agent: dict[str, Any]) -> dict[str, Any]:
    """The settings of all agents: those of the stack, over a chat in this process."""
    usual: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if loaders.default_harness_id(package.module) == "bash":  # the package brings none
        usual["harness"] = {"id": CHAT}
    kind = loaders.env_config_type(package.module)
    roles = [name for name, field in kind.model_fields.items() if isinstance(field.default, AgentConfig)]
    return {"taskset": {"id": package.module, **args}, **{role: {**usual, **agent} for role in roles}}


def _refusal(package: Any, error: ValidationError) -> Refusal:
    """What is wrong, in the words of the stack: fields of the taskset are its args."""
    first, *_ = errors = error.errors()
    key = "args" if first["loc"][:1] == ("taskset",) else "agent"
    lines = [f"{'.'.join(map(str, found['loc'][1:]))}: {found['msg']}" for found in errors]
    config = loaders.taskset_config_type(package.module)
    takes = sorted(config.model_fields.keys() - vf.TasksetConfig.model_fields.keys())
    mend = f"it takes {', '.join(takes) or 'none'}" if key == "args" else ""
    return Refusal(key, f"{package.id}: {'; '.join(lines)}", mend)

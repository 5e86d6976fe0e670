"""The adapter of a worker (see workers/program.py) that runs an environment of the Environments Hub.

It runs where ``verifiers`` is installed and stackrl is not: only the standard library and verifiers are
imported. Packages are of one of two kinds, which exclude each other: *classic* ones (v0) have a function
``load_environment`` and run on verifiers 0.3.1, *v1* ones export a Taskset and run on verifiers 0.4.
Whatever is in the way is a Refusal whose text says what to type.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import json
import shlex
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

V0_NEEDS = "verifiers==0.3.1 renderers==0.1.10 transformers"
"""What a classic environment is run with; newer renderers do not fit that version of verifiers."""
V1_NEEDS = "'verifiers>=0.4,<0.5'"
INFINITE_TASKS = 1000
"""Tasks that are drawn from of a package that makes them without end."""


class Refusal(Exception):
    """The environment cannot be run here: ``what`` is wrong with a ``key`` of the stack, how to mend that."""

    def __init__(self, key: str, what: str, mend: str = "") -> None:
        super().__init__(f"{what}; {mend}")
        self.refusal = {"refused": what, "mend": mend, "key": key}


class Shared:
    """A context that many rollouts share. It is entered with the first of them, by a task of its own, and
    anew where that failed; it is left when the worker ends."""

    def __init__(self, context: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._context = context
        self._entered: asyncio.Future[None] | None = None
        self._holding: asyncio.Task[None] | None = None

    async def up(self) -> None:
        """Wait until it is entered. Raises what entering raises, to all who wait."""
        if self._entered is None:
            self._entered = asyncio.get_running_loop().create_future()
            self._holding = asyncio.create_task(self._hold(self._entered))
        await asyncio.shield(self._entered)

    async def _hold(self, entered: asyncio.Future[None]) -> None:
        try:
            async with self._context():
                entered.set_result(None)
                await asyncio.get_running_loop().create_future()  # for as long as the worker is
        except Exception as error:
            self._entered = None
            if entered.done():
                raise
            entered.set_exception(error)


def load(settings: dict[str, Any]) -> Any:
    """The environment that ``settings`` describe: the stack's ``id``, ``version``, ``args`` and ``agent``."""
    package = Package(settings["id"], settings.get("version"))
    package.check()
    module = package.imported()
    kind = package.kind(module)
    loaded = _beside(kind).load(package, module, settings["args"], settings.get("agent") or {})
    loaded.about = {
        "api": kind,
        "verifiers": metadata.version("verifiers"),
        "version": package.installed_version(),
        "tasks": len(loaded.tasks),
    }
    return loaded


class Package:
    """A package of the Hub: ``owner/name@version``, of which the name is what is imported."""

    def __init__(self, id: str, version: str | None) -> None:
        self.id, _, written = id.partition("@")
        self.name = self.id.rsplit("/", 1)[-1]
        self.module = self.name.replace("-", "_").lower()
        self.version = version or written or None

    def check(self) -> None:
        """Raises Refusal where verifiers or the package is missing, or is another version."""
        if importlib.util.find_spec("verifiers") is None:
            python = f"ENVIRONMENTS/{self.name}/bin/python"
            raise Refusal(
                "python",
                f"verifiers is not installed for {sys.executable}",
                f"give the environment a Python of its own: `uv venv ENVIRONMENTS/{self.name} && uv pip "
                f"install --python {python} {V1_NEEDS}` (for a classic package, which has load_environment: "
                f"{V0_NEEDS}), then `{self._install(f'ENVIRONMENTS/{self.name}')}`, and say python: {python}",
            )
        if importlib.util.find_spec(self.module) is None and not self._comes_with_verifiers():
            raise Refusal(
                "id",
                f"{self.id} is not installed: {sys.executable} has no module {self.module!r}",
                f"type `{self._install()}`; without a network: `uv pip install --python "
                f"{shlex.quote(sys.executable)} --no-deps FOLDER/{self.module}-VERSION-py3-none-any.whl`",
            )
        installed = self.installed_version()
        if self.version and installed != self.version:
            raise Refusal(
                "version",
                f"{self.id} {installed or 'of no version'} is installed, not {self.version}",
                f"type `{self._install()}`" + (f", or say version: {installed!r}" if installed else ""),
            )

    def installed_version(self) -> str | None:
        """As its installation tells; None for a module that lies around."""
        for name in [*metadata.packages_distributions().get(self.module, ()), self.name, self.module]:
            try:
                return metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def imported(self) -> ModuleType:
        """Raises Refusal where that fails."""
        name = f"verifiers.v1.tasksets.{self.module}" if self._comes_with_verifiers() else self.module
        try:
            return importlib.import_module(name)
        except Exception as error:
            if self._looks_classic() and not _runs("api_v0"):
                raise self._other("api_v0") from error
            raise Refusal("id", f"importing {name} fails: {type(error).__name__}: {error}") from error

    def kind(self, module: ModuleType) -> str:
        """``api_v0`` or ``api_v1``. Raises Refusal where the installed verifiers has no such kind."""
        classic = hasattr(module, "load_environment")
        v1 = bool(getattr(module, "__all__", ()))
        if not classic and not v1:
            raise Refusal(
                "id",
                f"{module.__name__} is no environment of verifiers: it has neither a function "
                "load_environment (classic) nor an __all__ with a Taskset (v1)",
            )
        if v1 and _runs("api_v1"):
            return "api_v1"
        if classic and _runs("api_v0"):
            return "api_v0"
        raise self._other("api_v0" if classic else "api_v1")

    def _looks_classic(self) -> bool:
        """By its source, where it cannot be imported."""
        spec = importlib.util.find_spec(self.module)
        origin = Path(spec.origin) if spec and spec.origin else None
        return origin is not None and origin.suffix == ".py" and "def load_environment" in origin.read_text()

    def _other(self, kind: str) -> Refusal:
        """That the installed verifiers does not run packages of this ``kind``."""
        what, needs = {"api_v0": ("a classic (v0)", V0_NEEDS), "api_v1": ("a v1", V1_NEEDS)}[kind]
        version = metadata.version("verifiers")
        return Refusal(
            "python",
            f"{self.id} is {what} environment, which verifiers {version} for {sys.executable} does not run",
            f"name a Python that has {needs}",
        )

    def _comes_with_verifiers(self) -> bool:
        try:
            return importlib.util.find_spec(f"verifiers.v1.tasksets.{self.module}") is not None
        except ModuleNotFoundError:
            return False

    def _install(self, prefix: str = sys.prefix) -> str:
        """What brings the package to the Python in the folder ``prefix``."""
        version = f"@{self.version}" if self.version else ""
        if "/" in self.id:
            return f"VIRTUAL_ENV={shlex.quote(prefix)} prime env install {self.id}{version}"
        exact = f"=={self.version}" if self.version else ""
        return f"uv pip install --python {shlex.quote(prefix)}/bin/python {self.name}{exact}"


class Answers:
    """The policy's answers of one rollout, which are known again where the environment sends them back.

    The policy is asked with a history whose own answers are given by number, so that their tokens stay the
    sampled ones. What the environment changed is another history, and not taken for an answer.
    """

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self._numbers: dict[str, int] = {}
        """By the digest of a history that ends with an answer: the answer's number."""
        self.texts: dict[int, str] = {}

    async def to(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]
    ) -> tuple[int, dict[str, Any], bool]:
        """The answer to ``messages``, which are as `plain` makes them: its number, the message that it is,
        and whether the model closed it. Raises the program's NoRoom."""
        digest, history = "", []
        for message in messages:
            digest = _digest(digest, message)
            known = self._numbers.get(digest) if message["role"] == "assistant" else None
            history.append(_for_template(message) if known is None else {"answer": known})
        said = await self._policy.ask(history=history, tools=tools)
        number, text = said["number"], said["text"]
        message = plain("assistant", text, calls=_calls(number, said["calls"]))
        self._numbers[_digest(digest, message)] = number
        self.texts[number] = text
        return number, message, said["closed"]


def _runs(kind: str) -> bool:
    """Whether the installed verifiers does."""
    return metadata.version("verifiers").startswith({"api_v0": "0.3.", "api_v1": "0.4."}[kind])


def plain(
    role: str, content: Any, *, calls: list[dict[str, str]] | None = None, name: str | None = None
) -> dict[str, Any]:
    """A message in the one form that digests and templates take. Raises ValueError for one with pictures."""
    message: dict[str, Any] = {"role": role, "content": text_of(content)}
    if calls:
        message["calls"] = calls
    if role == "tool" and name:
        message["name"] = name
    return message


def text_of(content: Any) -> str:
    """Of a message's content: text, or parts that are text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError("a message with something other than text: the policy reads text alone")
    return "\n".join(part["text"] for part in parts)


def check_answers(given: dict[int, str], judged: dict[int, str]) -> list[list[Any]]:
    """What was judged, for the orchestrator to compare with what it sampled."""
    if not judged:
        raise RuntimeError("the environment judged no answer of the policy")
    if strange := [number for number in judged if number not in given]:
        raise RuntimeError(f"the environment judged answers {strange}, which the policy never gave")
    return [[number, judged[number]] for number in sorted(judged)]


def _calls(number: int, calls: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Tool calls with names of their own. One that could not be read gets arguments that are no JSON, so
    that the environment tells the model."""
    return [
        {
            "id": f"call_{number}_{index}",
            "name": call["name"] or "unknown",
            "arguments": f"<{call['problem']}>" if call["problem"] else json.dumps(call["arguments"]),
        }
        for index, call in enumerate(calls)
    ]


def _for_template(message: dict[str, Any]) -> dict[str, Any]:
    """As chat templates read it."""
    calls = message.get("calls")
    shown = {key: value for key, value in message.items() if key != "calls"}
    if calls:
        functions = [{"name": call["name"], "arguments": _arguments(call["arguments"])} for call in calls]
        shown["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return shown


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _digest(before: str, message: dict[str, Any]) -> str:
    return hashlib.sha256(f"{before}{json.dumps(message, sort_keys=True)}".encode()).hexdigest()


def _beside(name: str) -> ModuleType:
    """The module of this folder, which is no package here."""
    sys.modules.setdefault("stackrl_adapter", sys.modules[__name__])
    spec = importlib.util.spec_from_file_location(f"stackrl_{name}", Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

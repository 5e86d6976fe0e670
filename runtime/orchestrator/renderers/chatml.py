"""ChatML: Qwen2.5, Qwen3, SmolLM, Hermes and many others. Calls are JSON in <tool_call> tags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stackrl.runtime.environments.base import Call, Tool
from stackrl.runtime.orchestrator.renderers.base import Renderer, blocks
from stackrl.runtime.orchestrator.renderers.reading import Unreadable, read_object


class ChatML(Renderer):
    name = "chatml"
    signs = ("<|im_start|>",)
    opening = "<tool_call>"
    example = '<tool_call>{"name": "function", "arguments": {"argument": "value"}}</tool_call>'

    def calls(self, text: str, tools: Sequence[Tool]) -> Iterator[Call]:
        for inside, problem in blocks(text, "<tool_call>", "</tool_call>"):
            try:
                yield Call("", problem=problem) if problem else read_object(inside, "arguments")
            except Unreadable as error:
                yield Call("", problem=str(error))


class Qwen3(ChatML):
    """ChatML whose answers begin with thoughts."""

    name = "qwen3"
    signs = ("<|im_start|>", "</think>", "<tool_call>")


class AnyTemplate(ChatML):
    """A family that is not known here: its template closes turns, and calls are asked for as in ChatML."""

    name = "any"
    signs = ()

"""GLM-4.5, 4.6 and 5: a turn is ended by the token that opens the next one; calls are pairs of tags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stackrl.runtime.environments.base import Call, Tool
from stackrl.runtime.orchestrator.renderers.base import Renderer, blocks, records
from stackrl.runtime.orchestrator.renderers.reading import read_arguments


class Glm(Renderer):
    name = "glm"
    signs = ("<|observation|>", "<|assistant|>")
    ends = ("<|user|>", "<|observation|>", "<|endoftext|>")
    opening = "<tool_call>"
    example = "<tool_call>function<arg_key>argument</arg_key><arg_value>value</arg_value></tool_call>"

    def calls(self, text: str, tools: Sequence[Tool]) -> Iterator[Call]:
        for inside, problem in blocks(text, "<tool_call>", "</tool_call>"):
            yield Call("", problem=problem) if problem else _call(inside, tools)


def _call(inside: str, tools: Sequence[Tool]) -> Call:
    head = inside.partition("<arg_key>")[0]
    name = head.strip()
    if len(name.split()) != 1:
        return Call("", problem="it begins with the function's name, then come its arguments")
    pairs = records(inside[len(head) :], ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>"))
    if pairs is None:
        return Call(name, problem="each argument is <arg_key>its name</arg_key><arg_value>value</arg_value>")
    return Call(name, read_arguments(name, [(key.strip(), value) for key, value in pairs], tools))

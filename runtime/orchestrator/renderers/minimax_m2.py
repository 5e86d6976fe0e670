"""MiniMax-M2: calls are <invoke> elements, one or more of them in a <minimax:tool_call>."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stackrl.runtime.environments.base import Call, Tool
from stackrl.runtime.orchestrator.renderers.base import Renderer, blocks, records
from stackrl.runtime.orchestrator.renderers.reading import read_arguments


class MiniMaxM2(Renderer):
    name = "minimax_m2"
    signs = ("]~b]ai", "[e~[")
    opening = "<minimax:tool_call>"
    example = (
        '<minimax:tool_call>\n<invoke name="function">\n<parameter name="argument">value</parameter>\n'
        "</invoke>\n</minimax:tool_call>"
    )

    def calls(self, text: str, tools: Sequence[Tool]) -> Iterator[Call]:
        for inside, problem in blocks(text, "<minimax:tool_call>", "</minimax:tool_call>"):
            invoked = records(inside, ("<invoke name=", ">"), ("", "</invoke>"))
            if problem or not invoked:
                problem = problem or 'it holds <invoke name="a function"> … </invoke> and nothing else'
                yield Call("", problem=problem)
                continue
            for name, body in invoked:
                yield _call(_bare(name), body, tools)


def _call(name: str, body: str, tools: Sequence[Tool]) -> Call:
    parameters = records(body, ("<parameter name=", ">"), ("", "</parameter>"))
    if parameters is None:
        return Call(name, problem='each argument is <parameter name="its name">value</parameter>')
    return Call(name, read_arguments(name, [(_bare(key), value) for key, value in parameters], tools))


def _bare(name: str) -> str:
    """``name`` without the quotes around it."""
    return name.strip().strip("\"'")

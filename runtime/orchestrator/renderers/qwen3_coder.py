"""Qwen3-Coder, Qwen3.5 and later: ChatML whose calls are tags for the function and for each parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stackrl.runtime.environments.base import Call, Tool
from stackrl.runtime.orchestrator.renderers.base import Renderer, blocks, records
from stackrl.runtime.orchestrator.renderers.reading import read_arguments


class Qwen3Coder(Renderer):
    name = "qwen3_coder"
    signs = ("<|im_start|>", "<function=")
    opening = "<tool_call>"
    example = (
        "<tool_call>\n<function=function>\n<parameter=argument>\nvalue\n</parameter>\n</function>\n"
        "</tool_call>"
    )

    def calls(self, text: str, tools: Sequence[Tool]) -> Iterator[Call]:
        for inside, problem in blocks(text, "<tool_call>", "</tool_call>"):
            functions = records(inside, ("<function=", ">"), ("", "</function>"))
            if problem or not functions:
                yield Call(
                    "", problem=problem or "it holds <function=its name> … </function> and nothing else"
                )
                continue
            for name, body in functions:
                yield _call(name.strip(), body, tools)


def _call(name: str, body: str, tools: Sequence[Tool]) -> Call:
    parameters = records(body, ("<parameter=", ">"), ("", "</parameter>"))
    if parameters is None:
        return Call(name, problem="each argument is <parameter=its name> value </parameter>")
    written = [(key.strip(), value.removeprefix("\n").removesuffix("\n")) for key, value in parameters]
    return Call(name, read_arguments(name, written, tools))

"""Llama 3, 3.1, 3.2 and 3.3: the whole answer is a call, as JSON, or none is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stackrl.runtime.environments.base import Call, Tool
from stackrl.runtime.orchestrator.renderers.base import Renderer
from stackrl.runtime.orchestrator.renderers.reading import Unreadable, read_object

_MARK = "<|python_tag|>"
"""Stands before a call where the model was taught to set it; nothing else does."""


class Llama3(Renderer):
    name = "llama3"
    signs = ("<|start_header_id|>", "<|eot_id|>")
    ends = ("<|eom_id|>",)
    opening = "{"
    example = '{"name": "function", "parameters": {"argument": "value"}}'

    def calls(self, text: str, tools: Sequence[Tool]) -> Iterator[Call]:
        marked = text.strip().startswith(_MARK)
        said = text.strip().removeprefix(_MARK).strip()
        if not marked and not (said.startswith("{") and '"name"' in said):
            return
        try:
            yield read_object(said, "parameters")
        except Unreadable as error:
            yield Call("", problem=str(error))

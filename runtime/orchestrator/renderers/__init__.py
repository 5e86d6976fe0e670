"""Families of chat templates: which tokens end a turn, and how calls of tools are written."""

from __future__ import annotations

from stackrl.runtime.orchestrator.renderers.base import Renderer
from stackrl.runtime.orchestrator.renderers.chatml import AnyTemplate, ChatML, Qwen3
from stackrl.runtime.orchestrator.renderers.glm import Glm
from stackrl.runtime.orchestrator.renderers.llama3 import Llama3
from stackrl.runtime.orchestrator.renderers.minimax_m2 import MiniMaxM2
from stackrl.runtime.orchestrator.renderers.qwen3_coder import Qwen3Coder

RENDERERS: tuple[Renderer, ...] = (
    Glm(),
    MiniMaxM2(),
    Llama3(),
    Qwen3Coder(),
    Qwen3(),
    ChatML(),
    AnyTemplate(),
)
"""In the order in which they are asked whether a template is theirs; the last one takes any."""


def renderer_of(template: str, name: str = "auto") -> Renderer:
    """The one with ``name``; for ``auto`` the first that recognises ``template``."""
    return next(r for r in RENDERERS if (r.recognises(template) if name == "auto" else r.name == name))

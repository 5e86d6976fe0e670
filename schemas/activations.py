"""`trainer.activation_checkpointing:` which activations the backward pass computes again."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from stackrl.schemas.base import Model

Part = Literal["attention", "mlp", "experts", "norms"]


class SelectiveCheckpointing(Model):
    """The named parts of each layer are computed again in the backward pass, the rest is kept."""

    type: Literal["selective"]
    """Some parts of a layer."""
    parts: list[Part] = Field(min_length=1)
    """`mlp`: dense and shared ones; `experts`: those that a router chooses from, not the router itself."""


def _form(value: Any) -> str:
    return "selective" if isinstance(value, dict | SelectiveCheckpointing) else "whole"


Checkpointing = Annotated[
    Annotated[Literal["none", "full"], Tag("whole")] | Annotated[SelectiveCheckpointing, Tag("selective")],
    Discriminator(_form),
]

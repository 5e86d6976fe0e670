"""`algorithm.reference`: a model that is asked about tokens which were sampled, or that samples itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from stackrl.schemas.base import Model

if TYPE_CHECKING:
    from stackrl.schemas.algorithm import Algorithm


class Reference(Model):
    """A model that tells the logprob of each sampled token, as the reference of a divergence or as a teacher,
    and that writes the answers of environments which are `sampled_by: reference`.

    It has the policy's tokenizer, and a server of vLLM serves it.
    """

    endpoint: str | None = Field(default=None, pattern=r"^https?://[^/\s]+(/[^\s]*)?$")
    """Address of its server, such as http://10.0.0.7:8000. Left out: the policy itself, as the engines hold
    it then, which can teach by its `demonstration`."""
    model: str | None = None
    """The name that the server knows it by."""
    secret: str | None = Field(default=None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the secret, or variable, that holds the server's key."""
    demonstration: bool = False
    """It reads a demonstration of the environment before the prompt, which the policy does not."""
    requests: int = Field(default=32, ge=1)
    """Requests that it is sent at once."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds within which it answers, repetitions included. The run ends where it does not."""


def looks_at_reference(algorithm: Algorithm, component: str) -> bool:
    """Whether what an environment of ``component`` learns depends on what a reference says of its tokens."""
    if component == "rl":
        divergence = algorithm.shaping is not None and algorithm.shaping.divergence is not None
        return divergence or algorithm.loss.kl is not None or algorithm.loss.type == "python"
    return component == "ref_kl"

"""`trainer.mixture:` how the experts of a model are chosen while it is trained."""

from __future__ import annotations

from pydantic import Field

from stackrl.schemas.base import Model


class Mixture(Model):
    """Routing of a mixture of experts. A model without experts takes none of these keys."""

    balance_rate: float = Field(default=0.0, ge=0, lt=1)
    """How far the bias in each expert's choice moves after a step, up where fewer tokens than on average went
    through the expert, down where more did (arXiv 2408.15664); 0: it stays. Only for models whose routers
    have such a bias."""
    frozen_router: bool = False
    """Leave the routers' weights as they are; the experts and everything else are trained."""
    router_replay: bool = False
    """Train each token through the experts that the engine chose when it sampled (arXiv 2510.11370). Engines
    on GPUs report them, engines on CPUs do not."""

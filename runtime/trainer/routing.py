"""How the experts of a model are chosen while it is trained: what is given, what is seen, what is balanced.

Balance is that of arXiv 2408.15664, without a loss of its own; replay that of arXiv 2510.11370.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from stackrl.runtime.trainer.models.mlp import Mixture, Router, Traffic
from stackrl.runtime.trainer.models.shape import ModelError
from stackrl.schemas import mixture as settings_of


def routers(model: nn.Module) -> dict[int, Router]:
    """Those of the layers that have one, by the layer's number; none in a model that is not ours."""
    return {
        next(int(part) for part in name.split(".") if part.isdigit()): module.gate
        for name, module in model.named_modules()
        if isinstance(module, Mixture)
    }


def prepare_routers(model: nn.Module, settings: settings_of.Mixture) -> None:
    """Freeze the routers where ``settings`` say so; before the model is sharded.

    Raises ModelError where they ask for what the model does not have.
    """
    of_model = list(routers(model).values())
    asked = [name for name in type(settings).model_fields if getattr(settings, name)]
    if asked and not of_model:
        raise ModelError(f"trainer.mixture.{asked[0]}: the model has no experts; remove the key")
    if settings.balance_rate and not all(router.shape.corrected for router in of_model):
        raise ModelError(
            "trainer.mixture.balance_rate: the model's routers lack the bias that would move "
            "(e_score_correction_bias, which GLM and MiniMax models have); remove the key"
        )
    for router in of_model if settings.frozen_router else ():
        router.weight.requires_grad_(False)


class Routing:
    """The routers of a model through the micro-batches of one optimizer step."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._routers = routers(model)
        sizes = [router.number for router in self._routers.values()]
        # loads of each layer's experts, then each layer's confidence, then tokens and those of them replayed:
        # one tensor, summed over ranks in one go, exact for whole numbers up to 2⁵³
        self._parts = [*sizes, len(sizes), 2]
        self._sums = torch.zeros(sum(self._parts), dtype=torch.float64, device=device)
        self._tokens = self._sums[-2:]

    def begin(self, counted: Tensor, routes: Tensor | None = None) -> None:
        """A micro-batch comes, of T tokens.

        ``counted`` bool [T]: those that are no padding; ``routes`` int8 or int16 [T, L, k]: the experts that
        each token takes in each of the decoder's L layers, -1 where the router chooses itself. What it says
        of layers without experts means nothing. Raises ValueError where it does not fit the model.
        """
        if routes is not None:
            self._check(routes)
        replayed = torch.zeros_like(counted)
        for number, router in self._routers.items():
            given = None if routes is None else routes[:, number]
            router.traffic = Traffic(counted, given)
            if given is not None:
                replayed = counted & (given >= 0).all(1)
        self._tokens = torch.stack([counted.sum(), replayed.sum()])

    def end(self) -> None:
        """The micro-batch has passed, backward included."""
        if not self._routers:
            return
        passed = [router.traffic for router in self._routers.values()]
        for router in self._routers.values():
            router.traffic = None
        confidences = torch.stack([traffic.confidence for traffic in passed])
        self._sums += torch.cat([*(traffic.load for traffic in passed), confidences, self._tokens])

    def reduce(self) -> None:
        """Sum over ranks."""
        if self._routers:
            dist.all_reduce(self._sums)

    def loads(self) -> dict[int, Tensor]:
        """Tokens that went through each expert of a layer: float64 [E], whole numbers."""
        return dict(zip(self._routers, self._sums.split(self._parts), strict=False))

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move each expert's bias by ``rate``: up where its load is below the mean, down where above."""
        for router, load in zip(self._routers.values(), self.loads().values(), strict=True):
            # in whole numbers, in which a load that is the mean is known for certain
            direction = torch.sign(load.sum() - load * len(load))
            router.e_score_correction_bias += rate * direction.to(router.e_score_correction_bias)

    def metrics(self) -> dict[str, float]:
        """Of the tokens of the step: nothing for a model without experts, or a step without tokens.

        ``load_imbalance/LAYER``: tokens of the expert that got most over the mean, ``load_imbalance`` the
        worst of them; ``router_confidence``: the share that a token's experts have of all its scores, mean
        over tokens and layers; ``routes_replayed``: share of the tokens whose experts were given.
        """
        *_, confidences, (tokens, replayed) = self._sums.split(self._parts)
        if not tokens:
            return {}
        layers = {number: float(load.max() / load.mean()) for number, load in self.loads().items()}
        return {
            "load_imbalance": max(layers.values()),
            **{f"load_imbalance/{number}": imbalance for number, imbalance in layers.items()},
            "router_confidence": float(confidences.mean() / tokens),
            "routes_replayed": float(replayed / tokens),
        }

    def _check(self, routes: Tensor) -> None:
        """Before a GPU would stop at what it cannot look up."""
        for number, router in self._routers.items():
            if number >= routes.shape[1] or routes.shape[2] != router.shape.chosen:
                raise ValueError(
                    f"routes of {routes.shape[1]} layers and {routes.shape[2]} experts per token do not fit "
                    f"layer {number} of the model, where a token goes through {router.shape.chosen}"
                )
        experts = routes[:, list(self._routers)]
        most = int(experts.max()) if experts.numel() else -1  # of few tokens, a rank may have none
        if most >= min((router.number for router in self._routers.values()), default=0):
            raise ValueError(f"routes name expert {most}, which the model does not have")

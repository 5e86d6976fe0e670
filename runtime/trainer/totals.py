"""What is seen of a step on the way: sums over its tokens, for metrics, and their logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stackrl.runtime.trainer.context import Context
from stackrl.runtime.trainer.losses import TokenLoss, TrainedTokens, estimate
from stackrl.runtime.trainer.prepared import Prepared
from stackrl.runtime.trainer.routing import Routing
from stackrl.runtime.transport.messages import CE, REF_KL


@dataclass(frozen=True)
class Part:
    """One component of a micro-batch's loss."""

    component: int
    tokens: TrainedTokens
    loss: TokenLoss
    weights: Tensor
    """float32, one for each of its tokens."""

    @property
    def total(self) -> Tensor:
        return (self.loss.values * self.weights).sum()


class Totals:
    """What is summed over the trained tokens of a step, for its metrics, and their logprobs."""

    _NAMES = (
        "loss",
        "loss_ce",
        "loss_ref_kl",
        "entropy",
        "mismatch_kl",
        "capped",
        "reference_kl",
        "compared",
        "referred",
        "tokens_ce",
        "tokens_ref_kl",
        "tokens_trained",
        "tokens_packed",
    )
    _COMPONENTS: ClassVar[dict[int, str]] = {CE: "ce", REF_KL: "ref_kl"}

    def __init__(self, device: torch.device, routing: Routing, reported: Context | None = None) -> None:
        """``reported``: the ranks that share micro-batches, to keep these' logprobs for `logprobs`."""
        self.routing = routing
        self._reported = reported
        self._logprobs: list[Tensor] = []
        self._sums = {name: torch.zeros((), dtype=torch.float64, device=device) for name in self._NAMES}
        self._ratio_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, micro: Prepared, parts: Sequence[Part], logprobs: Tensor, entropies: Tensor) -> None:
        if self._reported is not None:
            self._logprobs.append(self._reported.whole(logprobs.float(), micro.own, micro.trained))
        if not micro.trained:
            return
        self._sums["entropy"] += entropies.sum()
        self._sums["tokens_trained"] += len(micro.own)
        self._sums["tokens_packed"] += len(micro.tokens)
        for part in parts:
            self._add(part)

    def _add(self, part: Part) -> None:
        tokens, total = part.tokens, part.total.detach()
        self._sums["loss"] += total
        if part.component in self._COMPONENTS:
            name = self._COMPONENTS[part.component]
            self._sums[f"loss_{name}"] += total
            self._sums[f"tokens_{name}"] += len(tokens.logprobs)
        if part.component == CE:
            return
        log_ratios = tokens.log_ratios().detach().double()
        ratios = log_ratios.exp()
        self._sums["compared"] += len(ratios)
        self._sums["mismatch_kl"] += (ratios - 1 - log_ratios).sum()
        self._ratio_max = torch.cat([self._ratio_max[None], ratios]).max()
        if part.loss.capped is not None:
            self._sums["capped"] += part.loss.capped.sum()
        if tokens.reference is not None:
            divergence = estimate("k3", tokens.logprobs.detach().double(), tokens.reference)
            known = divergence.isfinite()
            self._sums["reference_kl"] += torch.where(known, divergence, 0.0).sum()
            self._sums["referred"] += known.sum()

    def reduce(self) -> None:
        """Sum over ranks."""
        sums = torch.stack(list(self._sums.values()))
        dist.all_reduce(sums)
        self._sums = dict(zip(self._sums, sums, strict=True))
        dist.all_reduce(self._ratio_max, dist.ReduceOp.MAX)
        self.routing.reduce()

    def metrics(self) -> dict[str, float]:
        """Sums of the loss and of tokens; means over trained tokens of the entropy, over those of them that
        the engine sampled of what compares with it, and over those that a reference has seen of the
        divergence from it. What the step has no tokens for is left out."""
        sums = {name: float(value) for name, value in self._sums.items()}
        compared, referred = sums.pop("compared"), sums.pop("referred")
        sums["entropy"] /= max(1.0, sums["tokens_trained"])
        for mean in ("mismatch_kl", "capped"):
            sums[mean] /= max(1.0, compared)
        sums["reference_kl"] /= max(1.0, referred)
        for name in self._COMPONENTS.values():
            if not sums[f"tokens_{name}"]:
                del sums[f"tokens_{name}"], sums[f"loss_{name}"]
        if not referred:
            del sums["reference_kl"]
        return sums | {"ratio_max": float(self._ratio_max)} | self.routing.metrics()

    def logprobs(self) -> np.ndarray:
        """float32 [N]: of the trained tokens of this rank's batch, in order, as the loss saw them."""
        return torch.cat([torch.empty(0), *(part.cpu() for part in self._logprobs)]).numpy()

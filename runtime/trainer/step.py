"""One optimizer step: micro-batches through the model, one sum of gradients, one update.

The loss of a step is a sum over trained tokens with weights that are known beforehand, so it does not
depend on how tokens lie in documents, micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stackrl.runtime.trainer.context import Context
from stackrl.runtime.trainer.losses import TokenLoss, TrainedTokens, token_weights
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.documents import Documents
from stackrl.runtime.trainer.optimizer import all_finite, clip, global_norm
from stackrl.runtime.trainer.parallelize import computes_on
from stackrl.runtime.trainer.protocol import Step
from stackrl.runtime.trainer.routing import Routing
from stackrl.runtime.transport.messages import Batch, MicroBatch
from stackrl.schemas.algorithm import Normalize

AGAINST_ENGINE = ("mismatch_kl", "capped", "ratio_max")
"""Metrics that compare trainer and engine; they mean nothing where no engine sampled the tokens."""


@dataclass(frozen=True)
class Objective:
    """What a step minimises."""

    loss: Callable[[TrainedTokens], TokenLoss]
    normalize: Normalize
    max_tokens: int
    """Tokens of a longest reply, for `normalize: constant`."""


@dataclass(frozen=True)
class Prepared:
    """What this rank has of a micro-batch, as tensors: t tokens, which predict n of its N trained ones."""

    tokens: Tensor
    """int64 [t]"""
    layout: Documents
    documents: Tensor
    """int64 [N]: the document of each trained token."""
    own: Tensor
    """int64 [n]: which of the trained tokens are predicted here."""
    predictors: Tensor
    """int64 [n]: the place here of the token before each of them."""
    targets: Tensor
    """int64 [n]: these tokens."""
    engine_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor
    """float32 [n] each."""
    counted: Tensor
    """bool [t]: tokens that count in what is said of routers; none where there is nothing to learn."""
    routes: Tensor | None
    """int16 [t, layers, experts per token]: experts to go through, -1 where the router chooses."""


def train_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    objective: Objective,
    *,
    rate: float,
    limit: float,
    balance_rate: float = 0.0,
) -> Step:
    """Apply ``batch`` with learning rate ``rate``, its gradient clipped to ``limit``; all ranks together.
    Routers' biases move by ``balance_rate``.

    A metric that would not be finite is left out. A gradient that is not finite leaves weights and optimizer
    as they are, on every rank, and `skipped` is 1. Weights that are not finite all the same make
    `weights_finite` 0.
    """
    totals = accumulate(model, batch, objective)
    norm = global_norm(model.parameters())
    skipped = not math.isfinite(norm)
    if not skipped:
        clip(model.parameters(), norm, limit)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        if balance_rate:
            totals.routing.balance(balance_rate)
    optimizer.zero_grad(set_to_none=True)
    metrics = {
        "gradient_norm": norm,
        "learning_rate": rate,
        "skipped": float(skipped),
        "weights_finite": float(all_finite(model.parameters())),
        **totals.metrics(),
    }
    finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
    return Step(finite, totals.logprobs() if batch.report else None)


def accumulate(model: Decoder, batch: Batch, objective: Objective) -> Totals:
    """Add the gradients of ``batch`` to the model's; the sums over all ranks of what was seen on the way."""
    device = computes_on(model)
    routing = Routing(model, device)
    totals = Totals(device, routing, model.context if batch.report else None)
    learning = [micro for micro in batch.micro_batches if micro.loss_mask.any()]
    for number in range(_rounds(max(1, len(learning)), device)):
        # a rank that has nothing left to learn still has its part in every layer of the others
        micro = prepare(learning[number] if number < len(learning) else EMPTY, device, model.context)
        routing.begin(micro.counted, micro.routes)
        logprobs, entropies = model(
            micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures
        )
        trained = TrainedTokens(logprobs, micro.engine_logprobs, micro.advantages)
        loss = objective.loss(trained)
        weights = token_weights(
            objective.normalize,
            micro.documents,
            tokens=batch.tokens,
            sequences=batch.sequences,
            max_tokens=objective.max_tokens,
        )
        total = (loss.values * weights.index_select(0, micro.own)).sum()
        total.backward()
        routing.end()
        totals.add(micro, total.detach(), trained, loss, entropies)
    totals.reduce()
    return totals


def prepare(micro: MicroBatch, device: torch.device, context: Context = Context()) -> Prepared:  # noqa: B008
    """Select the trained tokens of ``micro`` and move what the model needs to ``device``.

    ``context``: with which other ranks this one shares it.
    """
    document_of = np.repeat(np.arange(len(micro.lengths)), micro.lengths)
    chosen = np.flatnonzero(micro.loss_mask)
    if np.isin(chosen, np.cumsum(micro.lengths) - micro.lengths).any():
        raise ValueError("the first token of a document is marked as trained, but nothing predicts it")
    here = context.own(len(micro.tokens))
    own = np.flatnonzero((chosen > here.start) & (chosen <= here.stop))  # predicted by the token before
    targets, documents = chosen[own], document_of[chosen]

    def tensor(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device)

    return Prepared(
        tokens=tensor(micro.tokens[here.start : here.stop], np.int64),
        layout=context.layout(micro.lengths, device),
        documents=tensor(documents, np.int64),
        own=tensor(own, np.int64),
        predictors=tensor(targets - 1 - here.start, np.int64),
        targets=tensor(micro.tokens[targets], np.int64),
        engine_logprobs=tensor(micro.logprobs[targets], np.float32),
        advantages=tensor(micro.advantages[documents[own]], np.float32),
        temperatures=tensor(micro.temperatures[documents[own]], np.float32),
        counted=torch.full((len(here),), bool(len(chosen)), device=device),
        routes=None if micro.routes is None else tensor(micro.routes[here.start : here.stop], np.int16),
    )


class Totals:
    """What is summed over the trained tokens of a step, for its metrics, and their logprobs."""

    _NAMES = ("loss", "entropy", "mismatch_kl", "capped", "tokens_trained", "tokens_packed")

    def __init__(self, device: torch.device, routing: Routing, reported: Context | None = None) -> None:
        """``reported``: the ranks that share micro-batches, to keep these' logprobs for `logprobs`."""
        self.routing = routing
        self._reported = reported
        self._logprobs: list[Tensor] = []
        self._sums = torch.zeros(len(self._NAMES), dtype=torch.float64, device=device)
        self._ratio_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(
        self, micro: Prepared, total: Tensor, trained: TrainedTokens, loss: TokenLoss, entropies: Tensor
    ) -> None:
        if self._reported is not None:
            logprobs = trained.logprobs.detach().float()
            self._logprobs.append(self._reported.whole(logprobs, micro.own, len(micro.documents)))
        if not len(micro.documents):
            return
        log_ratios = trained.log_ratios().detach().double()
        ratios = log_ratios.exp()
        mismatch = (ratios - 1 - log_ratios).sum()
        sums = torch.stack([total, entropies.sum(), mismatch, loss.capped.sum()])
        counts = torch.tensor([len(micro.own), len(micro.tokens)], device=total.device)
        self._sums += torch.cat([sums, counts])
        self._ratio_max = torch.cat([self._ratio_max[None], ratios]).max()

    def reduce(self) -> None:
        """Sum over ranks."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._ratio_max, dist.ReduceOp.MAX)
        self.routing.reduce()

    def metrics(self) -> dict[str, float]:
        """Sums of the loss and of tokens, means over trained tokens of the rest."""
        metrics = dict(zip(self._NAMES, self._sums.tolist(), strict=True))
        for mean in ("entropy", "mismatch_kl", "capped"):
            metrics[mean] /= max(1.0, metrics["tokens_trained"])
        return metrics | {"ratio_max": float(self._ratio_max)} | self.routing.metrics()

    def logprobs(self) -> np.ndarray:
        """float32 [N]: of the trained tokens of this rank's batch, in order, as the loss saw them."""
        return torch.cat([torch.empty(0), *(part.cpu() for part in self._logprobs)]).numpy()


def _rounds(own: int, device: torch.device) -> int:
    """Micro-batches of the rank that has most: layers are gathered together, so all must run as many."""
    rounds = torch.tensor(own, device=device)
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    return int(rounds)


EMPTY = MicroBatch(
    tokens=np.zeros(2, "<i4"),
    lengths=np.array([2], "<i4"),
    loss_mask=np.zeros(2, "|u1"),
    logprobs=np.zeros(2, "<f4"),
    advantages=np.zeros(1, "<f4"),
    temperatures=np.ones(1, "<f4"),
    documents=["demonstration"],
)
"""Two tokens that train nothing: the part of a rank that has nothing to do."""

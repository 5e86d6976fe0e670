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

from stackrl.runtime.trainer.losses import TokenLoss, TrainedTokens, token_weights
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.documents import Documents, layout
from stackrl.runtime.trainer.optimizer import all_finite, clip, global_norm
from stackrl.runtime.trainer.protocol import Step
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
    """A micro-batch as tensors; N of its T tokens are trained."""

    tokens: Tensor
    """int64 [T]"""
    layout: Documents
    chosen: Tensor
    """int64 [N]: which tokens are trained."""
    documents: Tensor
    """int64 [N]: the document of each."""
    engine_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor
    """float32 [N] each."""


def train_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    objective: Objective,
    *,
    rate: float,
    limit: float,
) -> Step:
    """Apply ``batch`` with learning rate ``rate``, its gradient clipped to ``limit``; all ranks together.

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
    device = next(model.parameters()).device
    totals = Totals(device, keep_logprobs=batch.report)
    empty = prepare(_EMPTY, device)
    for number in range(_rounds(len(batch.micro_batches), device)):
        micro = prepare(batch.micro_batches[number], device) if number < len(batch.micro_batches) else empty
        if not len(micro.chosen):
            micro = empty  # nothing to learn, but the other ranks need this one's part of every layer
        logprobs, entropies = model(micro.tokens, micro.layout, micro.chosen, micro.temperatures)
        trained = TrainedTokens(logprobs, micro.engine_logprobs, micro.advantages)
        loss = objective.loss(trained)
        weights = token_weights(
            objective.normalize,
            micro.documents,
            tokens=batch.tokens,
            sequences=batch.sequences,
            max_tokens=objective.max_tokens,
        )
        total = (loss.values * weights).sum()
        total.backward()
        totals.add(micro, total.detach(), trained, loss, entropies)
    totals.reduce()
    return totals


def prepare(micro: MicroBatch, device: torch.device) -> Prepared:
    """Select the trained tokens of ``micro`` and move what the model needs to ``device``."""
    document_of = np.repeat(np.arange(len(micro.lengths)), micro.lengths)
    chosen = np.flatnonzero(micro.loss_mask)
    if np.isin(chosen, np.cumsum(micro.lengths) - micro.lengths).any():
        raise ValueError("the first token of a document is marked as trained, but nothing predicts it")
    documents = document_of[chosen]

    def tensor(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device)

    return Prepared(
        tokens=tensor(micro.tokens, np.int64),
        layout=layout(micro.lengths, device),
        chosen=tensor(chosen, np.int64),
        documents=tensor(documents, np.int64),
        engine_logprobs=tensor(micro.logprobs[chosen], np.float32),
        advantages=tensor(micro.advantages[documents], np.float32),
        temperatures=tensor(micro.temperatures[documents], np.float32),
    )


class Totals:
    """What is summed over the trained tokens of a step, for its metrics, and their logprobs."""

    _NAMES = ("loss", "entropy", "mismatch_kl", "capped", "tokens_trained", "tokens_packed")

    def __init__(self, device: torch.device, *, keep_logprobs: bool = False) -> None:
        """``keep_logprobs``: of this rank's trained tokens, for `logprobs`."""
        self._keep_logprobs = keep_logprobs
        self._logprobs: list[Tensor] = []
        self._sums = torch.zeros(len(self._NAMES), dtype=torch.float64, device=device)
        self._ratio_max = torch.zeros((), dtype=torch.float64, device=device)

    def add(
        self, micro: Prepared, total: Tensor, trained: TrainedTokens, loss: TokenLoss, entropies: Tensor
    ) -> None:
        if not len(micro.chosen):
            return
        if self._keep_logprobs:
            self._logprobs.append(trained.logprobs.detach().float())
        log_ratios = trained.log_ratios().detach().double()
        ratios = log_ratios.exp()
        mismatch = (ratios - 1 - log_ratios).sum()
        sums = torch.stack([total, entropies.sum(), mismatch, loss.capped.sum()])
        counts = torch.tensor([len(micro.chosen), len(micro.tokens)], device=total.device)
        self._sums += torch.cat([sums, counts])
        self._ratio_max = torch.maximum(self._ratio_max, ratios.max())

    def reduce(self) -> None:
        """Sum over ranks."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._ratio_max, dist.ReduceOp.MAX)

    def metrics(self) -> dict[str, float]:
        """Sums of the loss and of tokens, means over trained tokens of the rest."""
        metrics = dict(zip(self._NAMES, self._sums.tolist(), strict=True))
        for mean in ("entropy", "mismatch_kl", "capped"):
            metrics[mean] /= max(1.0, metrics["tokens_trained"])
        return metrics | {"ratio_max": float(self._ratio_max)}

    def logprobs(self) -> np.ndarray:
        """float32 [N]: of this rank's trained tokens, in the batch's order, as they went through the loss."""
        return torch.cat([torch.empty(0), *(part.cpu() for part in self._logprobs)]).numpy()


def _rounds(own: int, device: torch.device) -> int:
    """Micro-batches of the rank that has most: layers are gathered together, so all must run as many."""
    rounds = torch.tensor(own, device=device)
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    return int(rounds)


_EMPTY = MicroBatch(
    tokens=np.zeros(2, "<i4"),
    lengths=np.array([2], "<i4"),
    loss_mask=np.zeros(2, "|u1"),
    logprobs=np.zeros(2, "<f4"),
    advantages=np.zeros(1, "<f4"),
    temperatures=np.ones(1, "<f4"),
    documents=["demonstration"],
)

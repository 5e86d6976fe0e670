"""One optimizer step: micro-batches through the model, one sum of gradients, one update.

The loss of a step is a sum over trained tokens with weights that are known beforehand, so it does not
depend on how tokens lie in documents, micro-batches and ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from stackrl.runtime.trainer.losses import (
    TokenLoss,
    TrainedTokens,
    distillation,
    supervised,
    token_weights,
)
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.optimizer import all_finite, clip, global_norm
from stackrl.runtime.trainer.parallelize import computes_on
from stackrl.runtime.trainer.prepared import EMPTY, Prepared, prepare
from stackrl.runtime.trainer.protocol import Step
from stackrl.runtime.trainer.reference import Reference
from stackrl.runtime.trainer.routing import Routing
from stackrl.runtime.trainer.totals import Part, Totals
from stackrl.runtime.transport.messages import CE, REF_KL, Batch
from stackrl.schemas.losses import Distillation, Normalize

AGAINST_ENGINE = ("mismatch_kl", "capped", "ratio_max")
"""Metrics that compare trainer and engine; they mean nothing where no engine sampled the tokens."""


@dataclass(frozen=True)
class Objective:
    """What a step minimises."""

    loss: Callable[[TrainedTokens], TokenLoss]
    """Of tokens marked RL."""
    normalize: Normalize
    max_tokens: int
    """Tokens of a longest reply, for `normalize: constant`."""
    refers: bool = False
    """Whether the loss looks at a reference."""
    distillation: Callable[[TrainedTokens], TokenLoss] = partial(distillation, Distillation())  # noqa: RUF009
    """Of tokens marked REF_KL."""


def train_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    objective: Objective,
    *,
    rate: float,
    limit: float,
    balance_rate: float = 0.0,
    reference: Reference | None = None,
) -> Step:
    """Apply ``batch`` with learning rate ``rate``, its gradient clipped to ``limit``; all ranks together.
    Routers' biases move by ``balance_rate``. ``reference`` tells logprobs that do not come with the batch.

    A metric that would not be finite is left out. A gradient that is not finite leaves weights and optimizer
    as they are, on every rank, and `skipped` is 1. Weights that are not finite all the same make
    `weights_finite` 0.
    """
    totals = accumulate(model, batch, objective, reference)
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


def accumulate(
    model: Decoder, batch: Batch, objective: Objective, reference: Reference | None = None
) -> Totals:
    """Add the gradients of ``batch`` to the model's; the sums over all ranks of what was seen on the way.

    Raises ValueError where a loss looks at a reference, and nobody tells its logprobs.
    """
    device = computes_on(model)
    routing = Routing(model, device)
    totals = Totals(device, routing, model.context if batch.report else None)
    learning = [micro for micro in batch.micro_batches if micro.loss_mask.any()]
    for number in range(_rounds(max(1, len(learning)), device)):
        # a rank that has nothing left to learn still has its part in every layer of the others
        micro = prepare(learning[number] if number < len(learning) else EMPTY, device, model.context)
        if reference is not None:
            micro = replace(micro, reference=_completed(micro.reference, reference.logprobs(micro)))
        routing.begin(micro.counted, micro.routes)
        logprobs, entropies = model(
            micro.tokens, micro.layout, micro.predictors, micro.targets, micro.temperatures
        )
        parts = list(_parts(objective, batch, micro, logprobs))
        sum(part.total for part in parts).backward()
        routing.end()
        totals.add(micro, parts, logprobs.detach(), entropies)
    totals.reduce()
    return totals


def _parts(objective: Objective, batch: Batch, micro: Prepared, logprobs: Tensor) -> Iterator[Part]:
    """Each component of the loss that ``micro`` has tokens of; that of RL always, since it may have sums over
    ranks, of which some have none."""
    for component in micro.components:
        tokens = micro.select(component, logprobs)
        if component == CE:
            yield Part(component, tokens, supervised(tokens), _mean_over(batch.ce_tokens, tokens))
        elif component == REF_KL:
            loss = objective.distillation(tokens)
            yield Part(component, tokens, loss, _mean_over(batch.ref_kl_tokens, tokens))
        else:
            weights = token_weights(
                objective.normalize,
                tokens.sequences,
                tokens=batch.tokens,
                sequences=batch.sequences,
                max_tokens=objective.max_tokens,
            )
            yield Part(component, tokens, objective.loss(tokens), weights)


def _mean_over(count: int, tokens: TrainedTokens) -> Tensor:
    return torch.full_like(tokens.advantages, 1.0 / max(1, count))


def _completed(known: Tensor | None, computed: Tensor) -> Tensor:
    """``computed`` where nothing is ``known``."""
    return computed if known is None else torch.where(known.isnan(), computed, known)


def _rounds(own: int, device: torch.device) -> int:
    """Micro-batches of the rank that has most: layers are gathered together, so all must run as many."""
    rounds = torch.tensor(own, device=device)
    dist.all_reduce(rounds, dist.ReduceOp.MAX)
    return int(rounds)

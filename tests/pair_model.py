"""A language model that looks at one token only, for tests of losses: exact, and a step takes no time."""

from __future__ import annotations

import os
from collections.abc import Sequence as Items
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from loopback import free_port
from loss_formulas import Result, Sequence, cross_entropy, distillation
from rank_processes import on_ranks
from torch import Tensor, nn
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer.context import Context
from stackrl.runtime.trainer.models.documents import Documents
from stackrl.runtime.trainer.ranks import Rank, join, leave
from stackrl.runtime.trainer.step import Objective, accumulate
from stackrl.runtime.transport.messages import CE, REF_KL, RL, Sample, Span, Version

VOCABULARY = 24
STEP = 8
MAX_TOKENS = 16


class PairModel(nn.Module):
    """The logits of a token are the row of the token before it."""

    def __init__(self, context: Context = Context()) -> None:  # noqa: B008
        super().__init__()
        numbers = torch.Generator().manual_seed(3)
        self.table = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=numbers, dtype=torch.float64))
        self.context = context

    def forward(
        self, tokens: Tensor, layout: Documents, predictors: Tensor, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs = (self.table[tokens[predictors]] / temperatures[:, None].double()).log_softmax(-1)
        entropies = -(logprobs.exp() * logprobs).sum(-1).detach()
        return logprobs.gather(-1, targets[:, None]).squeeze(-1), entropies


def mixed_samples(count: int, seed: int) -> list[Sample]:
    """Sequences whose tokens learn by reinforcement, by cross-entropy, to be as a teacher, or by two."""
    rng = np.random.default_rng(seed)
    return [_mixed(sample, n, rng) for n, sample in enumerate(make_samples(count, seed, VOCABULARY))]


def _mixed(sample: Sample, number: int, rng: np.random.Generator) -> Sample:
    length, first = len(sample.tokens), int(sample.loss_mask.argmax())
    mask = sample.loss_mask.copy()
    match number % 5:
        case 1:
            mask[mask == RL] = CE
        case 2:
            mask[mask == RL] = REF_KL
        case 3:
            mask[1:3] = CE  # what the environment said
        case 4:
            mask[first:-1] = 0  # one token
    middle = (first + length) // 2
    ages = rng.integers(0, STEP, 2)
    spans = [
        Span(start, end, Version(1, STEP - int(age)))
        for start, end, age in zip([first, middle], [middle, length], ages, strict=True)
        if start < end
    ]
    near = np.where(mask, rng.normal(-np.log(VOCABULARY), 1.0, length).clip(max=-0.01), 0).astype("<f4")
    reference = rng.normal(-3, 1, length).astype("<f4")
    return msgspec.structs.replace(sample, loss_mask=mask, logprobs=near, spans=spans, reference=reference)


def step(
    objective: Objective,
    samples: Items[Sample],
    capacity: int = 4096,
    context: Context = Context(),  # noqa: B008
) -> tuple[dict[str, float], Tensor]:
    """Metrics and the gradient of all ranks."""
    model = PairModel(context)
    batches = make_batches(
        samples, dist.get_world_size(), capacity, context=context.ranks, step=STEP, index=STEP
    )
    totals = accumulate(model, batches[dist.get_rank()], objective)
    dist.all_reduce(model.table.grad)
    return totals.metrics(), model.table.grad


def steps(
    ranks: int, shared: bool, objectives: dict[str, Objective], samples: Items[Sample], folder: Path
) -> dict[str, tuple[dict[str, float], Tensor]]:
    """`step` with each of ``objectives`` on ``ranks``, which share every micro-batch or have their own."""
    file = folder / f"steps-{shared}.pt"
    on_ranks(ranks, _work, ranks, free_port(), shared, objectives, list(samples), file)
    return torch.load(file, weights_only=False)


def _work(
    rank: int,
    ranks: int,
    port: int,
    shared: bool,
    objectives: dict[str, Objective],
    samples: Items[Sample],
    file: Path,
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    join(Rank(rank, ranks, rank), f"127.0.0.1:{port}", "cpu")
    context = Context(rank, ranks, dist.group.WORLD) if shared else Context()
    results = {name: step(objective, samples, 100, context) for name, objective in objectives.items()}
    if rank == 0:
        torch.save(results, file)
    dist.barrier()
    leave()


def by_formula(formula, normalize: str, samples: Items[Sample]) -> tuple[float, Tensor]:
    """The loss and its gradient, sample by sample in plain float64."""
    model = PairModel()
    count = {mark: sum(int((s.loss_mask == mark).sum()) for s in samples) for mark in (RL, CE, REF_KL)}
    sequences = sum(bool((s.loss_mask == RL).any()) for s in samples)
    total, surrogate = 0.0, torch.zeros((), dtype=torch.float64)
    for sample in samples:
        for mark, own in ((RL, formula), (CE, cross_entropy), (REF_KL, distillation)):
            (places,) = np.nonzero(sample.loss_mask == mark)
            if not len(places):
                continue
            rows = model.table[torch.from_numpy(sample.tokens[places - 1]).long()] / float(
                np.float32(sample.temperature)
            )
            logprobs = rows.log_softmax(-1)[range(len(places)), sample.tokens[places]]
            values, slopes = own(_sequence(sample, places, logprobs.tolist()))
            weight = 1 / count[mark]
            if mark == RL and normalize != "token":
                weight = 1 / (sequences * (len(places) if normalize == "sequence" else MAX_TOKENS))
            total += weight * sum(values)
            surrogate = surrogate + weight * (torch.tensor(slopes, dtype=torch.float64) * logprobs).sum()
    surrogate.backward()
    return total, model.table.grad


def _sequence(sample: Sample, places: np.ndarray, logprobs: list[float]) -> Sequence:
    ages = np.zeros(len(sample.tokens), int)
    for span in sample.spans:
        ages[span.start : span.end] = STEP - span.version.step
    return Sequence(
        logprobs,
        sample.logprobs[places].tolist(),
        ages[places].tolist(),
        sample.reference[places].tolist(),
        float(np.float32(sample.advantage)),
    )


__all__ = ["PairModel", "Result", "by_formula", "mixed_samples", "step", "steps"]

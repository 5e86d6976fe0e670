"""From samples to the batches of one optimizer step: packed, dealt to the ranks, with global denominators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stackrl.runtime.orchestrator.packing import Cost, pack
from stackrl.runtime.transport.messages import CE, NO_ROUTE, REF_KL, RL, Batch, MicroBatch, Sample

DEMONSTRATION = "demonstration"
"""The name of every document that no rollout made."""


@dataclass(frozen=True)
class Place:
    """Where an optimizer step stands in the run; see Batch for the fields."""

    incarnation: int
    index: int
    step: int
    stage: str
    stage_step: int
    checkpoint: bool
    last_of_stage: bool
    report: bool = False


@dataclass(frozen=True)
class Layout:
    """How the trainer takes its batches."""

    capacity: int
    """Tokens of a micro-batch at most."""
    ranks: int
    cost: Cost
    context: int = 1
    """Neighbouring ranks that get the same micro-batches and share their tokens."""


def build(
    samples: Sequence[Sample], place: Place, layout: Layout, held_out: Sequence[Sample] = ()
) -> list[Batch]:
    """One batch per rank; each has its part of ``held_out``, of which only the loss is measured.

    Raises ValueError for a sample longer than a micro-batch.
    """
    tokens, ce_tokens, ref_kl_tokens = (_marked(samples, component) for component in (RL, CE, REF_KL))
    sequences = sum(bool((sample.loss_mask == RL).any()) for sample in samples)
    measured = _packed(held_out, place.step, layout) if held_out else [[]] * layout.ranks
    return [
        Batch(
            incarnation=place.incarnation,
            index=place.index,
            step=place.step,
            stage=place.stage,
            stage_step=place.stage_step,
            rank=rank,
            ranks=layout.ranks,
            tokens=tokens,
            sequences=sequences,
            ce_tokens=ce_tokens,
            ref_kl_tokens=ref_kl_tokens,
            checkpoint=place.checkpoint,
            last_of_stage=place.last_of_stage,
            micro_batches=micro_batches,
            report=place.report,
            held_out=measured[rank],
        )
        for rank, micro_batches in enumerate(_packed(samples, place.step, layout))
    ]


def _marked(samples: Sequence[Sample], component: int) -> int:
    return sum(int(np.count_nonzero(sample.loss_mask == component)) for sample in samples)


def _packed(samples: Sequence[Sample], step: int, layout: Layout) -> list[list[MicroBatch]]:
    """The micro-batches of each rank."""
    lengths = [len(sample.tokens) for sample in samples]
    dealt = pack(lengths, layout.capacity, layout.ranks // layout.context, layout.cost)
    names = document_names(samples)
    per_share = [
        [
            micro_batch([samples[i] for i in content], [names[i] for i in content], step)
            for content in contents
        ]
        for contents in dealt
    ]
    return [per_share[rank // layout.context] for rank in range(layout.ranks)]


def document_names(samples: Sequence[Sample]) -> list[str]:
    """A name for each: its rollout's, numbered from the second sample of the same rollout on."""
    seen: Counter[str] = Counter()
    names = []
    for sample in samples:
        rollout = sample.rollout if sample.spans else DEMONSTRATION
        names.append(f"{rollout}/{seen[rollout]}" if sample.spans and seen[rollout] else rollout)
        seen[rollout] += 1
    return names


def micro_batch(samples: Sequence[Sample], names: Sequence[str], step: int = 0) -> MicroBatch:
    """The samples back to back, called ``names``, to train the weights of RL step ``step``; none make an
    empty micro-batch.
    """
    return MicroBatch(
        tokens=_concatenated([s.tokens for s in samples], "<i4"),
        lengths=np.array([len(s.tokens) for s in samples], dtype="<i4"),
        loss_mask=_concatenated([s.loss_mask for s in samples], "|u1"),
        logprobs=_concatenated([s.logprobs for s in samples], "<f4"),
        advantages=np.array([s.advantage for s in samples], dtype="<f4"),
        temperatures=np.array([s.temperature for s in samples], dtype="<f4"),
        documents=list(names),
        routes=_routes(samples),
        reference=_reference(samples),
        ages=_ages(samples, step),
    )


def _reference(samples: Sequence[Sample]) -> np.ndarray | None:
    """Of all tokens, where one of the samples has any."""
    if all(sample.reference is None for sample in samples):
        return None
    unknown = [np.full(len(sample.tokens), np.nan) for sample in samples]
    known = [sample.reference for sample in samples]
    return _concatenated([u if k is None else k for u, k in zip(unknown, known, strict=True)], "<f4")


def _ages(samples: Sequence[Sample], step: int) -> np.ndarray | None:
    """Of all tokens, where one of the samples was sampled."""
    if not any(sample.spans for sample in samples):
        return None
    ages = np.zeros(sum(len(sample.tokens) for sample in samples), "<i4")
    begin = 0
    for sample in samples:
        for span in sample.spans:
            ages[begin + span.start : begin + span.end] = step - span.version.step
        begin += len(sample.tokens)
    return ages


def _routes(samples: Sequence[Sample]) -> np.ndarray | None:
    """Of all tokens, where one of the samples has any. Raises ValueError where they are of several models."""
    shapes = {s.routes.shape[1:] for s in samples if s.routes is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise ValueError(f"samples have routes through different layers or experts: {sorted(shapes)}")
    (shape,) = shapes
    return np.concatenate(
        [np.full((len(s.tokens), *shape), NO_ROUTE, "|i1") if s.routes is None else s.routes for s in samples]
    )


def _concatenated(arrays: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=dtype), *arrays], dtype=dtype)

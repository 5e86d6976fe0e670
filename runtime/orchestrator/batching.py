"""From samples to the batches of one optimizer step: packed, dealt to the ranks, with global denominators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stackrl.runtime.orchestrator.packing import Cost, pack
from stackrl.runtime.transport.messages import Batch, MicroBatch, Sample

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
    """How the trainer takes its batches: ``capacity`` tokens per micro-batch, for ``ranks`` ranks."""

    capacity: int
    ranks: int
    cost: Cost


def build(samples: Sequence[Sample], place: Place, layout: Layout) -> list[Batch]:
    """One batch per rank. Raises ValueError for a sample longer than a micro-batch."""
    dealt = pack([len(sample.tokens) for sample in samples], layout.capacity, layout.ranks, layout.cost)
    tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    names = document_names(samples)
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
            sequences=len(samples),
            checkpoint=place.checkpoint,
            last_of_stage=place.last_of_stage,
            micro_batches=[
                micro_batch([samples[i] for i in content], [names[i] for i in content])
                for content in contents
            ],
            report=place.report,
        )
        for rank, contents in enumerate(dealt)
    ]


def document_names(samples: Sequence[Sample]) -> list[str]:
    """A name for each: its rollout's, numbered from the second sample of the same rollout on."""
    seen: Counter[str] = Counter()
    names = []
    for sample in samples:
        rollout = sample.rollout if sample.spans else DEMONSTRATION
        names.append(f"{rollout}/{seen[rollout]}" if sample.spans and seen[rollout] else rollout)
        seen[rollout] += 1
    return names


def micro_batch(samples: Sequence[Sample], names: Sequence[str]) -> MicroBatch:
    """The samples back to back, called ``names``; none make an empty micro-batch."""
    return MicroBatch(
        tokens=_concatenated([s.tokens for s in samples], "<i4"),
        lengths=np.array([len(s.tokens) for s in samples], dtype="<i4"),
        loss_mask=_concatenated([s.loss_mask for s in samples], "|u1"),
        logprobs=_concatenated([s.logprobs for s in samples], "<f4"),
        advantages=np.array([s.advantage for s in samples], dtype="<f4"),
        temperatures=np.array([s.temperature for s in samples], dtype="<f4"),
        documents=list(names),
    )


def _concatenated(arrays: Sequence[np.ndarray], dtype: str) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=dtype), *arrays])

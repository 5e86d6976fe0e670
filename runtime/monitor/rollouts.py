"""The rollouts that a report shows are kept while the run goes on: those of every so many steps, the newest.

Nothing here is needed to go on: what cannot be written is left out with a warning. The arrays are encoded,
compressed and written by a thread of their own, in the order in which they were added.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stackrl.runtime.monitor.kept_rollouts import (
    About,
    KeptLogprobs,
    KeptRollout,
    KeptSequence,
    KeptSpan,
    file_of,
    files,
    index_of,
    member,
    read_about,
    replace_file,
)
from stackrl.runtime.orchestrator.batching import document_names

if TYPE_CHECKING:
    from stackrl.runtime.orchestrator.groups import FinishedGroup
    from stackrl.runtime.transport.messages import Sample
    from stackrl.schemas.stack import Rollouts

_MOST_WAITING = 16
"""Pieces that may wait for the disk; more are left out, so that a slow disk costs no memory."""

log = logging.getLogger(__name__)


class RolloutLog:
    """Writes what `read_steps` reads. All methods return at once, but for `forget_from` and `close`."""

    def __init__(self, folder: Path, settings: Rollouts | None) -> None:
        """``settings`` (`monitors.rollouts`) None keeps nothing."""
        self._folder, self._settings = folder, settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollout-log")
        self._waiting: list[Future[None]] = []
        self._counts: dict[int, int] = {}
        if settings is not None:
            self._submit(self._take_stock, "the folder")

    def wanted(self, step: int) -> bool:
        """Whether the rollouts that train RL step ``step`` are kept."""
        return self._settings is not None and step % self._settings.every == 0

    def add(
        self,
        index: int,
        step: int,
        stage: str,
        groups: Sequence[FinishedGroup],
        samples: Sequence[Sample],
    ) -> None:
        """Keep the rollouts of the batch of optimizer step ``index``, where its RL step is `wanted`.

        ``samples`` are those of ``groups`` as they are trained, with their advantages.

        Adding the same batch again, as after a restart, changes nothing.
        """
        if self.wanted(step):
            self._submit(lambda: self._add(index, step, stage, groups, samples), f"step {index + 1}")

    def add_logprobs(
        self, index: int, documents: Sequence[str], lengths: np.ndarray, logprobs: np.ndarray
    ) -> None:
        """Keep the trainer's logprobs beside the rollouts of ``index``; nothing where those are not kept.

        ``lengths`` int [D], the trained tokens of each of ``documents``; ``logprobs`` float32 [their sum].
        """
        if self._settings is not None:
            self._submit(
                lambda: self._add_logprobs(index, documents, lengths, logprobs),
                f"logprobs of step {index + 1}",
            )

    def forget_from(self, index: int) -> None:
        """Delete what was kept of the optimizer steps ``index`` and later: the run goes back behind them."""
        if self._settings is not None:
            self._thread.submit(_guarded, lambda: self._forget_from(index), "what is forgotten").result()

    def close(self) -> None:
        """Wait until all that was added is on disk."""
        self._thread.shutdown(wait=True)

    def _submit(self, piece: Callable[[], None], what: str) -> None:
        self._waiting = [future for future in self._waiting if not future.done()]
        if len(self._waiting) >= _MOST_WAITING:
            log.warning("the report will lack %s: the disk is too slow", what)
            return
        self._waiting.append(self._thread.submit(_guarded, piece, what))

    def _take_stock(self) -> None:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in self._folder.glob(".step-*"):
            file.unlink()
        for file in files(self._folder):
            try:
                self._counts[index_of(file)] = read_about(file).rollouts
            except (OSError, ValueError) as error:
                log.warning("%s is deleted: it cannot be read (%s)", file, error)
                file.unlink()

    def _add(
        self,
        index: int,
        step: int,
        stage: str,
        groups: Sequence[FinishedGroup],
        samples: Sequence[Sample],
    ) -> None:
        rollouts = _kept(groups, samples)
        data = member(About(index, step, stage, len(rollouts))) + member(rollouts)
        file = file_of(self._folder, index)
        if not (file.exists() and file.read_bytes().startswith(data)):
            replace_file(file, data)
        self._counts[index] = len(rollouts)
        self._prune()

    def _add_logprobs(
        self, index: int, documents: Sequence[str], lengths: np.ndarray, logprobs: np.ndarray
    ) -> None:
        file = file_of(self._folder, index)
        if file.exists():
            addition = KeptLogprobs(
                list(documents), lengths.astype("<i4").tobytes(), logprobs.astype("<f4").tobytes()
            )
            replace_file(file, file.read_bytes() + member(addition))

    def _forget_from(self, index: int) -> None:
        for kept in [kept for kept in self._counts if kept >= index]:
            self._delete(kept)

    def _prune(self) -> None:
        """Delete the oldest steps, as long as the others have the rollouts that are to be kept."""
        oldest = sorted(self._counts)
        while len(oldest) > 1 and sum(self._counts.values()) - self._counts[oldest[0]] >= self._settings.keep:
            self._delete(oldest.pop(0))

    def _delete(self, index: int) -> None:
        file_of(self._folder, index).unlink(missing_ok=True)
        del self._counts[index]


def _kept(groups: Sequence[FinishedGroup], samples: Sequence[Sample]) -> list[KeptRollout]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    of: dict[str, list[tuple[str, Sample]]] = {rollout.id: [] for rollout in rollouts}
    for name, sample in zip(document_names(samples), samples, strict=True):
        of[sample.rollout].append((name, sample))
    return [
        KeptRollout(
            id=rollout.id,
            group=rollout.group,
            environment=rollout.environment,
            reward=rollout.reward,
            advantage=of[rollout.id][0][1].advantage if of[rollout.id] else 0.0,
            metrics=rollout.metrics,
            turns=rollout.turns,
            sampled=rollout.sampled,
            sequences=[_kept_sequence(name, sample) for name, sample in of[rollout.id]],
        )
        for rollout in rollouts
    ]


def _kept_sequence(document: str, sample: Sample) -> KeptSequence:
    trained = sample.loss_mask > 0
    return KeptSequence(
        document=document,
        tokens=sample.tokens.astype("<i4").tobytes(),
        trained=trained.astype("|u1").tobytes(),
        logprobs=sample.logprobs[trained].astype("<f4").tobytes(),
        spans=[KeptSpan(span.start, span.end, str(span.version)) for span in sample.spans],
        temperature=sample.temperature,
    )


def _guarded(piece: Callable[[], None], what: str) -> None:
    try:
        piece()
    except Exception as error:
        log.warning("the report will lack %s: %s: %s", what, type(error).__name__, error)

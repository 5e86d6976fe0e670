"""When a group may start, and which groups make the next batch. No clock, no network: a state machine.

Counted in groups; a batch is ``per_batch`` of them. A group admitted while the engines held step *a* has no
token older than *a*, so it is fresh enough for the trainer's steps up to its deadline *a* + max_staleness.
Two rules keep every group within its deadline without dropping any:

- at most (max_staleness + 1) × per_batch groups are admitted and not yet trained, and a group is only
  admitted while the engines hold the newest step;
- a batch takes the earliest deadlines among the finished groups, and is only sealed if those left behind can
  all be trained in time: for each step d, at most (d − step) × per_batch of them are due by d.

With max_staleness 0 this is a barrier: a batch is generated wholly by the step that it trains.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field


@dataclass
class Admission:
    """The groups of one stage that are admitted and not yet trained."""

    per_batch: int
    max_staleness: int
    step: int
    """RL steps that the trainer has taken: the step whose weights the next batch trains."""
    batches_left: int
    """Batches of this stage that are not sealed."""
    waiting: dict[int, int] = field(default_factory=dict)
    """Deadline of each group that is running or finished."""
    training: int = 0
    """Groups of the sealed batch, until it is applied."""

    def may_admit(self, engines: int) -> bool:
        """Whether another group may start while all engines hold step ``engines``."""
        return (
            engines == self.step
            and len(self.waiting) + self.training < (self.max_staleness + 1) * self.per_batch
            and len(self.waiting) < self.batches_left * self.per_batch
        )

    def admit(self, group: int) -> None:
        self.waiting[group] = self.step + self.max_staleness

    def take_up(self, group: int, admitted: int) -> None:
        """A group that was admitted at step ``admitted``, before the orchestrator was started again."""
        self.waiting[group] = admitted + self.max_staleness

    def drop(self, group: int) -> None:
        """The group failed, has no signal or is too old; another may take its place."""
        del self.waiting[group]

    def choose(self, finished: Collection[int]) -> list[int] | None:
        """The groups of the next batch, in the order of their ids; None while one must be waited for."""
        if self.training:
            return None
        chosen = sorted(finished, key=lambda group: (self.waiting[group], group))[: self.per_batch]
        if len(chosen) < self.per_batch:
            return None
        left = sorted(self.waiting[group] for group in self.waiting.keys() - set(chosen))
        in_time = all(place < (deadline - self.step) * self.per_batch for place, deadline in enumerate(left))
        return sorted(chosen) if in_time else None

    def seal(self, groups: Collection[int]) -> None:
        """``groups`` are on their way to the trainer."""
        for group in groups:
            del self.waiting[group]
        self.training = len(groups)
        self.batches_left -= 1

    def applied(self) -> None:
        """The trainer has stepped."""
        self.training = 0
        self.step += 1

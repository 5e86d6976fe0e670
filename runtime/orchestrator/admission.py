"""When a group may start, and which groups make the next batch. No clock, no network: a state machine.

Counted in planned rollouts, since the groups of several environments may differ in size. A batch takes whole
groups, up to the first that brings it to ``batch_size``; what is finished beyond that waits for the next one.
A group admitted while the engines held step *a* has no token older than *a*, so it is fresh enough for the
trainer's steps up to its deadline *a* + max_staleness, and it must be trained before its stage ends. Three
rules keep every group within its deadline without dropping any:

- a group is only admitted while the engines hold the newest step and fewer than (max_staleness + 1) ×
  batch_size rollouts are admitted and not yet trained;
- and only while fewer wait than the batches that are left will hold at least;
- a batch takes the earliest deadlines among the finished groups, and is only sealed if those left behind can
  all be trained in time: before a group that is due by step d, fewer than (d − step) × batch_size rollouts
  wait with a deadline as early.

With max_staleness 0 this is a barrier: a batch is generated wholly by the step that it trains.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple


class Waiting(NamedTuple):
    """A group that is running or finished."""

    deadline: int
    """The last step that may train it."""
    size: int
    """Rollouts that were planned: those that failed count, so that nothing depends on when they do."""


@dataclass
class Admission:
    """The groups of one stage that are admitted and not yet trained."""

    batch_size: int
    """Rollouts that a batch has at least."""
    max_staleness: int
    step: int
    """RL steps that the trainer has taken: the step whose weights the next batch trains."""
    batches_left: int
    """Batches of this stage that are not sealed."""
    waiting: dict[int, Waiting] = field(default_factory=dict)
    """By the group's id."""
    training: int = 0
    """Rollouts of the sealed batch, until it is applied."""

    @property
    def rollouts_waiting(self) -> int:
        return sum(group.size for group in self.waiting.values())

    def may_admit(self, engines: int) -> bool:
        """Whether another group, of any size, may start while all engines hold step ``engines``."""
        if engines != self.step:
            return False
        waiting = self.rollouts_waiting
        return (
            waiting + self.training < (self.max_staleness + 1) * self.batch_size
            and waiting < self.batches_left * self.batch_size
        )

    def admit(self, group: int, size: int) -> None:
        self.take_up(group, size, self.step)

    def take_up(self, group: int, size: int, admitted: int) -> None:
        """A group that was admitted at step ``admitted``, before the orchestrator was started again."""
        self.waiting[group] = Waiting(admitted + self.max_staleness, size)

    def drop(self, group: int) -> None:
        """The group failed, has no signal or is too old; another may take its place."""
        del self.waiting[group]

    def choose(self, finished: Collection[int]) -> list[int] | None:
        """The groups of the next batch, in the order of their ids; None while one must be waited for."""
        if self.training or sum(self.waiting[group].size for group in finished) < self.batch_size:
            return None
        chosen = self._first(self._in_order(finished))
        everything = self._in_order(self.waiting)
        if chosen == self._first(everything):  # to wait for others would change nothing
            return sorted(chosen)
        taken = set(chosen)
        left = [group for group in everything if group not in taken]
        return sorted(chosen) if self._in_time(left) else None

    def seal(self, groups: Collection[int]) -> None:
        """``groups`` are on their way to the trainer."""
        self.training = sum(self.waiting.pop(group).size for group in groups)
        self.batches_left -= 1

    def applied(self) -> None:
        """The trainer has stepped."""
        self.training = 0
        self.step += 1

    def _in_order(self, groups: Iterable[int]) -> list[int]:
        """The most urgent first."""
        return sorted(groups, key=lambda group: (self.waiting[group].deadline, group))

    def _first(self, groups: list[int]) -> list[int]:
        """As many of them as make a batch."""
        rollouts = 0
        for count, group in enumerate(groups, start=1):
            rollouts += self.waiting[group].size
            if rollouts >= self.batch_size:
                return groups[:count]
        return groups

    def _in_time(self, left: list[int]) -> bool:
        """Whether the batches after the next one train all of ``left``, the most urgent first, in time."""
        last = self.step + self.batches_left - 1
        before = accumulate((self.waiting[group].size for group in left), initial=0)
        return all(
            rollouts < (min(self.waiting[group].deadline, last) - self.step) * self.batch_size
            for rollouts, group in zip(before, left, strict=False)
        )

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

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
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
    waiting: dict[int, Waiting] = field(default_factory=dict, init=False)
    """By the group's id."""
    rollouts_waiting: int = field(default=0, init=False)
    """Of all groups together."""
    training: int = field(default=0, init=False)
    """Rollouts of the sealed batch, until it is applied."""
    _queue: list[tuple[int, int]] = field(default_factory=list, init=False)
    """Deadline and id of each group, the most urgent first. Thousands of groups are asked about at each
    arrival, so it is kept in order."""

    def may_admit(self, engines: int) -> bool:
        """Whether another group, of any size, may start while all engines hold step ``engines``."""
        if engines != self.step:
            return False
        return (
            self.rollouts_waiting + self.training < (self.max_staleness + 1) * self.batch_size
            and self.rollouts_waiting < self.batches_left * self.batch_size
        )

    def admit(self, group: int, size: int) -> None:
        self.take_up(group, size, self.step)

    def take_up(self, group: int, size: int, admitted: int) -> None:
        """A group that was admitted at step ``admitted``, before the orchestrator was started again."""
        deadline = admitted + self.max_staleness
        self.waiting[group] = Waiting(deadline, size)
        self.rollouts_waiting += size
        insort(self._queue, (deadline, group))

    def drop(self, group: int) -> None:
        """The group failed, has no signal or is too old; another may take its place."""
        self._take_out(group)

    def choose(self, finished: Collection[int]) -> list[int] | None:
        """The groups of the next batch, in the order of their ids; None while one must be waited for."""
        if self.training or sum(self.waiting[group].size for group in finished) < self.batch_size:
            return None
        chosen = self._first(group for _, group in self._queue if group in finished)
        if chosen == self._first(group for _, group in self._queue):  # to wait would change nothing
            return sorted(chosen)
        taken = set(chosen)
        left = (group for _, group in self._queue if group not in taken)
        return sorted(chosen) if self._in_time(left) else None

    def seal(self, groups: Collection[int]) -> None:
        """``groups`` are on their way to the trainer."""
        self.training = sum(self._take_out(group) for group in groups)
        self.batches_left -= 1

    def applied(self) -> None:
        """The trainer has stepped."""
        self.training = 0
        self.step += 1

    def _take_out(self, group: int) -> int:
        """The group waits no more; its size."""
        deadline, size = self.waiting.pop(group)
        self.rollouts_waiting -= size
        del self._queue[bisect_left(self._queue, (deadline, group))]
        return size

    def _first(self, groups: Iterable[int]) -> list[int]:
        """As many of them as make a batch."""
        first, rollouts = [], 0
        for group in groups:
            first.append(group)
            rollouts += self.waiting[group].size
            if rollouts >= self.batch_size:
                break
        return first

    def _in_time(self, left: Iterable[int]) -> bool:
        """Whether the batches after the next one train all of ``left``, the most urgent first, in time."""
        last = self.step + self.batches_left - 1
        before = 0
        for deadline, size in map(self.waiting.__getitem__, left):
            if before >= (min(deadline, last) - self.step) * self.batch_size:
                return False
            before += size
        return True

"""How many rollouts an engine is to have at once. No clock, no network: a state machine.

A rollout more costs little while the KV cache of its engine has room. Where there is none, vLLM takes the
room of one running request for another, whose keys it computes again later: it thrashes. So the limit

- grows while rollouts wait for a place and those that run leave room: by half at each look until there was
  trouble once, then by an eighth;
- grows only as far as requests fit that weigh what the heaviest mix of late weighed. Rollouts that have just
  begun weigh little, and will not stay so;
- shrinks to what fits when the cache is nearly full and requests queue for it, and by a fifth at least when a
  request has lost its room;
- shrinks once, and then waits until the rollouts beyond it have ended.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST = 8
"""Rollouts that an engine begins with."""
AIM = 0.92
"""Share of the cache that is to be in use."""
FULL = 0.98
"""Share of the cache from which on a queue is one for room in it."""
FADES_IN = 15.0
"""Seconds of full work in which the memory of what requests weigh fades by half."""


@dataclass(frozen=True)
class Look:
    """What was seen of an engine, and since the look before."""

    seconds: float
    """Since the look before."""
    cache_use: float
    running: int
    """Requests that hold room in the cache."""
    queued: int
    """Requests that wait in the engine for room."""
    preempted: int
    """Requests that have lost their room since."""
    taken: int
    """Places that rollouts have, those beyond the limit included."""
    lacking: bool
    """Whether a rollout had to wait for a place since."""


class Concurrency:
    """The limit of one engine: from 1 to ``most``. Ask `after` each look."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.limit = min(FIRST, most)
        self._weight = 0.0
        """Share of the cache that a request takes, in the heaviest mix of late."""
        self._troubled = False
        """Whether it ever had too many."""
        self._ebbing = False
        """Whether rollouts beyond a lowered limit are still to end."""
        self._queue_counts = True

    def paused(self) -> None:
        """The engine stood still for new weights: who queues behind that does not queue for room."""
        self._queue_counts = False

    def after(self, look: Look) -> int:
        """The limit from this look on."""
        if look.queued == 0:
            self._queue_counts = True
        if look.taken <= self.limit:
            self._ebbing = False
        if look.running and (look.lacking or look.preempted):
            fading = 0.5 ** (look.seconds / FADES_IN)
            self._weight = max(self._weight * fading, look.cache_use / look.running)
        crowded = look.queued > 0 and look.cache_use >= FULL and self._queue_counts
        if look.preempted or crowded:
            self._shrink(look)
        elif look.lacking and not look.queued and not self._ebbing:
            self._grow()
        return self.limit

    @property
    def _fitting(self) -> int:
        """Requests that fit into the cache."""
        return max(1, int(min(self.most, AIM / self._weight))) if self._weight else self.most

    def _grow(self) -> None:
        step = self.limit // 8 if self._troubled else self.limit // 2
        self.limit = max(self.limit, min(self._fitting, self.limit + max(1, step)))

    def _shrink(self, look: Look) -> None:
        self._troubled = True
        if self._ebbing:
            return
        limit = min(self._fitting, self.limit)
        if look.preempted:
            limit = min(limit, self.limit * 4 // 5)
        self.limit = max(1, limit)
        self._weight = max(self._weight, AIM / (self.limit + 1))
        self._ebbing = look.taken > self.limit

"""Who takes a version together.

A broadcast needs all its receivers at once, and they come when they like: each as soon as its engine stands
still. Those that have come before are waited for, though not for long. One that comes for the first time, or
too late, goes alone and belongs to the next round; one that does not come is not waited for again until it
does. So engines may die, join and be restarted, and nobody keeps a list of them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from stackrl.runtime.transport.messages import Version

log = logging.getLogger(__name__)

_ROUNDS_KEPT = 4
T = TypeVar("T")


@dataclass
class _Round(Generic[T]):
    """The receivers of one version."""

    seen: set[str] = field(default_factory=set)
    """Have come for it, to wait or to go alone."""
    members: dict[str, str] = field(default_factory=dict)
    """Wait for it, or have got it together → what they hold."""
    deadline: float | None = None
    closed: bool = False
    outcome: T | None = None


class Rounds(Generic[T]):
    """Brings receivers together, a round for each version. Thread-safe."""

    def __init__(self, gather: float) -> None:
        """``gather``: seconds that a round waits for those it expects."""
        self._gather = gather
        self._changed = threading.Condition()
        self._known: set[str] = set()
        self._rounds: dict[Version, _Round[T]] = {}

    def join(
        self, version: Version, member: str, holds: str, begin: Callable[[Mapping[str, str]], T]
    ) -> T | None:
        """Wait for the others that take ``version``. None: ``member`` goes alone.

        The ``begin`` of one of them is called when the round is full, with all members → what each ``holds``;
        it must not take long. All get what it returns.
        """
        with self._changed:
            stranger = member not in self._known
            self._known.add(member)
            current = self._round(version)
            current.seen.add(member)
            self._changed.notify_all()
            if stranger or current.closed:
                return None
            current.members[member] = holds
            if current.deadline is None:
                current.deadline = time.monotonic() + self._gather
            while not current.closed:
                left = current.deadline - time.monotonic()
                if left <= 0 or not self._missing(version, current):
                    self._close(version, current, begin)
                else:
                    self._changed.wait(left)
            return current.outcome

    def _round(self, version: Version) -> _Round[T]:
        current = self._rounds.setdefault(version, _Round())
        for old in sorted(self._rounds)[:-_ROUNDS_KEPT]:
            del self._rounds[old]
        return current

    def _missing(self, version: Version, current: _Round[T]) -> set[str]:
        """Who is expected and has not come. Who came for a newer version does not come back for this one."""
        newer = (other.seen for number, other in self._rounds.items() if number > version)
        return self._known.difference(current.seen, *newer)

    def _close(self, version: Version, current: _Round[T], begin: Callable[[Mapping[str, str]], T]) -> None:
        if missing := self._missing(version, current):
            self._known -= missing
            log.warning(
                "%d of %d receivers did not come for weight version %s within %g s; the others go on",
                len(missing),
                len(missing) + len(current.members),
                version,
                self._gather,
            )
        current.closed = True
        try:
            current.outcome = begin(dict(current.members))
        finally:
            self._changed.notify_all()

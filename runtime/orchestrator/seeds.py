"""One seed tree: every random choice of a run is a function of the stack's seed and of what it is for.

Nothing here depends on the order or the time at which things happen, so a resumed run draws what the
unbroken one would have drawn.
"""

from __future__ import annotations

import hashlib
from random import Random

Name = str | int


class Seeds:
    """A node of the tree; ``branch`` goes down."""

    def __init__(self, root: int, path: tuple[Name, ...] = ()) -> None:
        self._root, self._path = root, path

    def branch(self, *names: Name) -> Seeds:
        return Seeds(self._root, (*self._path, *names))

    def number(self) -> int:
        """The seed of this node: 63 bits, so that it fits a signed integer of 64."""
        digest = hashlib.blake2b(repr((self._root, *self._path)).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1

    def rng(self) -> Random:
        return Random(self.number())


def turn_seed(rollout: Seeds, turn: int) -> int:
    """Sampling seed of one turn of a rollout."""
    return rollout.branch("turn", turn).number()

"""What the answers to a set of prompts are worth, and how sure that is.

The prompts are a sample of what the environment could ask, so intervals are over prompts: answers to the same
prompt are averaged first. With k answers to a prompt the means are avg@k, and pass@k is the probability that
one of k answers solves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean

import numpy as np

_RESAMPLES = 2000
_Z = 1.959963984540054
"""Of the normal distribution, for 95 %."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its interval of 95 % confidence."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """From one number for each prompt: Wilson's interval where they are 0 or 1, else the bootstrap's.

        The bootstrap alone would be sure of what was never or always solved.
        """
        mean = fmean(values)
        low, high = _wilson(mean, len(values)) if set(values) <= {0.0, 1.0} else _bootstrap(values)
        return cls(mean, low, high)

    def named(self, name: str) -> dict[str, float]:
        return {name: self.mean, f"{name}_low": self.low, f"{name}_high": self.high}


@dataclass(frozen=True)
class Answered:
    """What one answer to a prompt was worth, and whether it solved it."""

    reward: float
    solved: float


def scores(answers: Sequence[Sequence[Answered]], samples: int) -> dict[str, float]:
    """`reward`, `exact` and, for more than one answer, `pass@2`, `pass@4` … up to `samples`, with intervals.

    ``answers``: of each prompt those that did not fail; at least one prompt has one. A prompt with fewer than
    k of them says nothing about pass@k.
    """
    some = [those for those in answers if those]
    found = {
        **Estimate.of([fmean(a.reward for a in those) for those in some]).named("reward"),
        **Estimate.of([fmean(a.solved for a in those) for those in some]).named("exact"),
    }
    for k in tries(samples):
        passed = [
            pass_at(k, len(those), sum(a.solved >= 1 for a in those)) for those in some if len(those) >= k
        ]
        if passed:
            found |= Estimate.of(passed).named(f"pass@{k}")
    return found


def tries(samples: int) -> list[int]:
    """The k of pass@k that are told of: powers of two, and ``samples`` itself; none for one."""
    powers = [1 << power for power in range(1, samples.bit_length()) if 1 << power < samples]
    return [*powers, samples] if samples > 1 else []


def pass_at(k: int, answers: int, solved: int) -> float:
    """The unbiased estimate of pass@k from ``answers`` ≥ k of which ``solved`` solved it:
    1 − C(answers − solved, k) / C(answers, k)  (arXiv 2107.03374)."""
    return 1.0 - comb(answers - solved, k) / comb(answers, k)


def _wilson(share: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of a share of ``count`` trials."""
    spread = _Z * sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    centre, scale = share + _Z**2 / (2 * count), 1 + _Z**2 / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of means over prompts drawn with repetition; the same for the same values."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(values), size=(_RESAMPLES, len(values)))
    low, high = np.percentile(np.asarray(values)[drawn].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)

"""Every loss once more, in plain floats and from its paper's formula: the value of each token of a sequence,
and the slope of their sum along each token's logprob."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

LIMIT = 20.0
"""Of a log ratio: beyond it nothing grows, and nothing has a slope."""


@dataclass(frozen=True)
class Sequence:
    """Trained tokens that belong together."""

    logprobs: list[float]
    engine: list[float]
    ages: list[int]
    reference: list[float]
    advantage: float

    def log_ratios(self) -> list[float]:
        return [within(p - q) for p, q in zip(self.logprobs, self.engine, strict=True)]

    def free(self) -> list[float]:
        """1 where the log ratio is not at its limit, so that it has a slope."""
        return [float(abs(p - q) <= LIMIT) for p, q in zip(self.logprobs, self.engine, strict=True)]


Result = tuple[list[float], list[float]]
Formula = Callable[..., Result]


def within(value: float) -> float:
    return min(max(value, -LIMIT), LIMIT)


def by_token(sequence: Sequence, token: Callable[[int], tuple[float, float]]) -> Result:
    pairs = [token(t) for t in range(len(sequence.logprobs))]
    return [value for value, _ in pairs], [slope for _, slope in pairs]


def clip(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> tuple[float, bool]:
    """The objective, and whether the ratio has a say in it."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    objective, free = min(ratio * advantage, clipped * advantage), ratio * advantage <= clipped * advantage
    if dual is not None and advantage < 0 and dual * advantage > objective:
        return dual * advantage, False
    return objective, free


def aipo(sequence: Sequence, ratio_cap: float = 5.0) -> Result:
    weights = [min(math.exp(d), ratio_cap) for d in sequence.log_ratios()]
    return weighted(sequence, weights)


def weighted(sequence: Sequence, weights: list[float]) -> Result:
    """REINFORCE: −w · A · log π, w a constant."""
    return by_token(
        sequence,
        lambda t: (
            -weights[t] * sequence.advantage * sequence.logprobs[t],
            -weights[t] * sequence.advantage,
        ),
    )


def grpo(sequence: Sequence, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Result:
    d, free = sequence.log_ratios(), sequence.free()

    def token(t: int) -> tuple[float, float]:
        objective, moves = clip(math.exp(d[t]), sequence.advantage, low, high, dual)
        return -objective, -math.exp(d[t]) * sequence.advantage * moves * free[t]

    return by_token(sequence, token)


def gspo(sequence: Sequence, low: float = 3e-4, high: float = 4e-4) -> Result:
    d, free = sequence.log_ratios(), sequence.free()
    ratio = math.exp(math.fsum(d) / len(d))
    objective, moves = clip(ratio, sequence.advantage, low, high, None)
    # the loss of the sequence stands at each of n tokens, and each logprob is 1/n of the exponent
    return by_token(sequence, lambda t: (-objective, -ratio * sequence.advantage * moves * free[t]))


def gmpo(sequence: Sequence, low: float = 0.4, high: float = 0.4) -> Result:
    d, free, advantage = sequence.log_ratios(), sequence.free(), sequence.advantage
    clipped = [min(x, high) if advantage > 0 else max(x, -low) for x in d]
    mean = math.exp(math.fsum(clipped) / len(d))
    return by_token(
        sequence, lambda t: (-advantage * mean, -advantage * mean * (clipped[t] == d[t]) * free[t])
    )


def cispo(sequence: Sequence, low: float = 1.0, high: float = 4.0) -> Result:
    return weighted(sequence, [min(max(math.exp(d), 1 - low), 1 + high) for d in sequence.log_ratios()])


def level_ratio(level: str, log_ratios: list[float]) -> list[float]:
    d = [within(x) for x in log_ratios]
    return {
        "token": [math.exp(x) for x in d],
        "sequence": [math.exp(within(math.fsum(d)))] * len(d),
        "geometric": [math.exp(math.fsum(d) / len(d))] * len(d),
    }[level]


def correct(weights: list[float], method: str, low: float, high: float) -> list[float]:
    if method == "mask":
        return [w if low <= w <= high else 0.0 for w in weights]
    return [min(max(w, low), high) for w in weights]


def reinforce(
    sequence: Sequence, level: str = "", method: str = "truncate", low: float = 0.0, high: float = 2.0
) -> Result:
    if not level:
        return weighted(sequence, [1.0] * len(sequence.logprobs))
    return weighted(sequence, correct(level_ratio(level, sequence.log_ratios()), method, low, high))


def topr(sequence: Sequence, level: str = "sequence") -> Result:
    ratios = level_ratio(level, sequence.log_ratios())
    return weighted(sequence, [1.0 if sequence.advantage >= 0 else min(w, 1.0) for w in ratios])


def sapo(sequence: Sequence, positive: float = 1.0, negative: float = 1.05) -> Result:
    d, free = sequence.log_ratios(), sequence.free()
    tau = positive if sequence.advantage > 0 else negative

    def token(t: int) -> tuple[float, float]:
        ratio = math.exp(d[t])
        gate = 1 / (1 + math.exp(-tau * (ratio - 1))) if ratio < 100 else 1.0
        slope = 4 * gate * (1 - gate) * ratio * free[t]
        return -4 / tau * gate * sequence.advantage, -slope * sequence.advantage

    return by_token(sequence, token)


def icepop(sequence: Sequence, low: float = 0.5, high: float = 5.0) -> Result:
    d, free = sequence.log_ratios(), sequence.free()

    def token(t: int) -> tuple[float, float]:
        weight = math.exp(d[t]) if low <= math.exp(d[t]) <= high else 0.0
        return -weight * sequence.advantage, -weight * sequence.advantage * free[t]

    return by_token(sequence, token)


def half_square(d: float) -> tuple[float, float]:
    """A parabola between two straight lines, and its slope."""
    if abs(d) <= LIMIT:
        return d * d / 2, d
    return LIMIT * abs(d) - LIMIT * LIMIT / 2, math.copysign(LIMIT, d)


def penalised(sequence: Sequence, keep: Callable[[int], bool], gains: list[float], penalty: float) -> Result:
    d, free = sequence.log_ratios(), sequence.free()

    def token(t: int) -> tuple[float, float]:
        gain = math.exp(d[t]) * gains[t] * keep(t)
        square, slope = half_square(sequence.logprobs[t] - sequence.engine[t])
        return 2 * penalty * square - gain, 2 * penalty * slope - gain * free[t]

    return by_token(sequence, token)


def coins(p: float, q: float) -> float:
    """The divergence of a coin that shows heads with probability ``q`` from one with ``p``, in nats."""
    heads = p * math.log(p / q)
    tails = (1 - p) * math.log((1 - p) / (1 - q)) if p < 1 > q else math.inf if p < 1 else 0.0
    return heads + tails


def dppo(
    sequence: Sequence, kind: str = "tv", low: float = 0.2, high: float = 0.2, penalty: float = 1e-3
) -> Result:
    def keep(t: int) -> bool:
        p, q = math.exp(sequence.logprobs[t]), math.exp(sequence.engine[t])
        moved = abs(p - q) if kind == "tv" else coins(q, p)
        if sequence.advantage > 0:
            return not (p > q and moved > high)
        return not (p < q and moved > low)

    return penalised(sequence, keep, [sequence.advantage] * len(sequence.logprobs), penalty)


def ipo(sequence: Sequence, limit: float = 0.1, penalty: float = 1e-3) -> Result:
    def keep(t: int) -> bool:
        return abs(math.exp(sequence.logprobs[t]) - math.exp(sequence.engine[t])) <= limit

    return penalised(sequence, keep, [sequence.advantage] * len(sequence.logprobs), penalty)


def distillation(sequence: Sequence, limit: float = 0.2, penalty: float = 1e-3) -> Result:
    def keep(t: int) -> bool:
        return math.exp(sequence.logprobs[t]) - math.exp(sequence.engine[t]) >= -limit

    gains = [within(r - p) for r, p in zip(sequence.reference, sequence.logprobs, strict=True)]
    return penalised(sequence, keep, gains, penalty)


def decoupled_ppo(
    sequence: Sequence,
    approximated: bool = False,
    low: float = 0.2,
    high: float = 0.2,
    level: str = "token",
    method: str = "truncate",
    cap: float = 5.0,
) -> Result:
    def proximal(t: int) -> float:
        p, q, age = sequence.logprobs[t], sequence.engine[t], sequence.ages[t]
        if not approximated or age == 0:
            return p
        alpha = (age - 1) / age  # (v_prox − v_μ) / (v_θ − v_μ), with the proximal policy one step behind
        return q + alpha * (p - q)

    near = [proximal(t) for t in range(len(sequence.logprobs))]
    behind = level_ratio(level, [n - q for n, q in zip(near, sequence.engine, strict=True)])
    weights = correct(behind, method, 0.0, cap)

    def token(t: int) -> tuple[float, float]:
        difference = sequence.logprobs[t] - near[t]
        ratio = math.exp(within(difference))
        objective, moves = clip(ratio, sequence.advantage, low, high, None)
        slope = ratio * sequence.advantage * moves * (abs(difference) <= LIMIT)
        return -weights[t] * objective, -weights[t] * slope

    return by_token(sequence, token)


def cross_entropy(sequence: Sequence) -> Result:
    return by_token(sequence, lambda t: (-sequence.logprobs[t], -1.0))


def divergence(sequence: Sequence, estimator: str) -> Result:
    def token(t: int) -> tuple[float, float]:
        d = sequence.logprobs[t] - sequence.reference[t]
        match estimator:
            case "k1":
                return d, 1.0
            case "k2":
                return half_square(d)
        steepest = -math.log(1 + LIMIT)  # there the slope is −LIMIT
        if d >= steepest:
            return math.exp(-d) + d - 1, 1 - math.exp(-d)
        return LIMIT + steepest - LIMIT * (d - steepest), -LIMIT

    return by_token(sequence, token)

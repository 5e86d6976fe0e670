"""How much arithmetic a token costs a model, and how many weights it goes through: counted from the shape."""

from __future__ import annotations

from dataclasses import dataclass

from stackrl.runtime.launch.planning.parameters import parameters_of
from stackrl.runtime.trainer.models.shape import GroupedAttention, LatentAttention, Shape


@dataclass(frozen=True)
class Work:
    """Of one token. An operation is a multiplication or an addition: two for each weight."""

    common: int
    """Weights that every token is multiplied with: attention, dense and shared MLPs, routers, the head."""
    experts: int
    """Weights of all experts of all layers."""
    chosen: float
    """Share of its layer's experts that a token goes through."""
    layers: int
    weights: int
    """All of the model's."""
    pairs: tuple[tuple[int, int | None], ...]
    """(multiplications for each earlier token that is attended to, how many are at most), kind by kind."""

    def operations(self, context: float, *, recent: bool = True) -> float:
        """Of a forward pass through everything, for a token that has ``context`` tokens before it; where not
        ``recent``, on average over a sequence of so many tokens."""
        return 2 * (self.common + self.chosen * self.experts) + self.attention(context, recent=recent)

    def attention(self, context: float, *, recent: bool = True) -> float:
        """Those of them that look at earlier tokens."""
        return 2 * sum(
            size * (_last(context, most) if recent else _mean(context, most)) for size, most in self.pairs
        )

    def weights_read(self, tokens: float) -> float:
        """Weights that ``tokens`` tokens at once need from memory: experts that none of them chose stay out,
        where each token chooses at random."""
        return self.common + self.experts * (1 - (1 - self.chosen) ** tokens)


def work_of(shape: Shape) -> Work:
    """Count a model's."""
    parameters = parameters_of(shape)
    experts = sum(layer.experts for layer in parameters.layers)
    active = sum(layer.chosen for layer in parameters.layers)
    pairs: dict[int | None, int] = {}
    for layer in shape.layers:
        for size, most in _pairs(layer.attention):
            pairs[most] = pairs.get(most, 0) + size
    return Work(
        common=parameters.multiplied - active,
        experts=experts,
        chosen=active / experts if experts else 0.0,
        layers=len(shape.layers),
        weights=parameters.total,
        pairs=tuple((size, most) for most, size in pairs.items()),
    )


def _pairs(attention: GroupedAttention | LatentAttention) -> list[tuple[int, int | None]]:
    """Multiplications for a token and one before it: scores and values, and those of the indexer."""
    if isinstance(attention, GroupedAttention):
        return [(2 * attention.heads * attention.head_size, None)]
    size = attention.plain_size + attention.rotary_size + attention.value_size
    found: list[tuple[int, int | None]] = [(attention.heads * size, attention.indexer.chosen)]
    if attention.indexer.own:
        found.append((attention.indexer.heads * attention.indexer.size, None))
    return found


def _last(context: float, most: int | None) -> float:
    return context if most is None else min(context, most)


def _mean(length: float, most: int | None) -> float:
    """Tokens that a token of a sequence attends to, itself among them, averaged over the sequence."""
    if most is None or length <= most:
        return length / 2
    return most - most * most / (2 * length)

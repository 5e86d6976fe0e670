"""Rotary positions (arXiv 2104.09864): pairs of dimensions turn with the token's place in its document."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from stackrl.runtime.trainer.models.shape import Rope


@dataclass(frozen=True)
class Rotation:
    """How far each token's heads are turned. Made by `rotation`."""

    cosine: Tensor
    """[T, 1, size]"""
    sine: Tensor
    interleaved: bool


def rotation(positions: Tensor, rope: Rope, dtype: torch.dtype) -> Rotation:
    """For tokens at ``positions`` int64 [T], in ``dtype``."""
    exponents = torch.arange(0, rope.size, 2, device=positions.device, dtype=torch.float32) / rope.size
    angles = positions[:, None].float() * _stretched(1.0 / rope.theta**exponents, rope)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return Rotation(angles.cos().to(dtype), angles.sin().to(dtype), rope.interleaved)


def rotate(states: Tensor, turn: Rotation) -> Tensor:
    """Rotate the first dimensions of [T, heads, size]; i turns together with i + half of them.

    Interleaved ones are first brought into that order, and stay in it: queries and keys both do.
    """
    size = turn.cosine.shape[-1]
    turning, fixed = states[..., :size], states[..., size:]
    if turn.interleaved:
        turning = turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    low, high = turning.chunk(2, dim=-1)
    turned = turning * turn.cosine + torch.cat([-high, low], dim=-1) * turn.sine
    return torch.cat([turned, fixed], dim=-1) if fixed.shape[-1] else turned


def _stretched(frequencies: Tensor, rope: Rope) -> Tensor:
    """Llama 3's scaling: long wavelengths divided by ``factor``, short ones kept, a ramp between."""
    if rope.factor == 1.0:
        return frequencies
    turns = rope.original_length * frequencies / (2 * math.pi)
    ramp = (turns - rope.low_frequency_factor) / (rope.high_frequency_factor - rope.low_frequency_factor)
    return torch.lerp(frequencies / rope.factor, frequencies, ramp.clamp(0, 1))

"""Figures drawn with characters, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def resampled(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` values: means of equal stretches."""
    if len(values) <= width:
        return list(values)
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    return [fmean(values[a:b]) for a, b in pairwise(edges)]


def curve(values: Sequence[float], width: int, height: int) -> list[str]:
    """Bars from the smallest value to the largest, as ``height`` lines of ``width`` characters at most, the
    top line first. A curve without a range is flat at the bottom."""
    points = resampled(values, width)
    low, high = min(points, default=0.0), max(points, default=0.0)
    scale = (height * 8 - 1) / (high - low) if high > low else 0.0
    levels = [1 + round((point - low) * scale) for point in points]
    return [
        "".join(_EIGHTHS[min(max(level - 8 * row, 0), 8)] for level in levels)
        for row in reversed(range(height))
    ]


def number(value: float | None, digits: int = 3) -> str:
    """``0.613``, ``1.2e-06``; a dash where there is none."""
    if value is None:
        return "–"
    small = value != 0 and abs(value) < 10**-digits
    return f"{value:.1e}" if small or abs(value) >= 1e5 else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """``980``, ``2.1k``, ``3.4M``."""
    if value is None:
        return "–"
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def share(value: float | None) -> str:
    """``12 %``."""
    return "–" if value is None else f"{value:.0%}".replace("%", " %")

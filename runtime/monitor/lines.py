"""Text for a terminal: lines of several programs in one stream (`trainer-0 | …`), and spans of time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TextIO

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_NOISE = re.compile(
    r"nanobind: | - leaked (instance|type|keep_alive|function)|^ - \.\.\. skipped remainder"
    r"|See https://nanobind\.readthedocs|resource_tracker"
    r"|\[rank\d+\]:\[W.*(destroy_process_group|TCPStore|HeartbeatMonitor)|^\s*warnings\.warn\("
)
"""What libraries write while a process ends; it never says why."""
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Prefixed:
    """Writes lines to a stream, each behind the name of its program."""

    def __init__(self, stream: TextIO, names: Sequence[str]) -> None:
        self._stream = stream
        self._width = max(map(len, names), default=0)
        self._colours = dict(zip(names, _COLOURS * len(names), strict=False)) if stream.isatty() else {}

    def __call__(self, name: str, line: str) -> None:
        prefix = f"{name:<{self._width}} |"
        if name in self._colours:
            prefix = f"\033[{self._colours[name]}m{prefix}\033[0m"
        print(prefix, printable(line), file=self._stream, flush=True)


def printable(text: str) -> str:
    """Without colours and the control characters that could move a terminal's cursor."""
    return "".join(c for c in _CONTROL_SEQUENCE.sub("", text) if c.isprintable() or c == "\t")


def duration(seconds: float) -> str:
    """``7:32``, ``1:02:03``."""
    minutes, seconds = divmod(round(max(seconds, 0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def is_noise(line: str) -> bool:
    """Whether a line of a log tells nothing of what a process did: blank, or a library's parting words."""
    return not line.strip() or _NOISE.search(line) is not None

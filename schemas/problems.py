"""What is wrong with a stack, where, and what to do about it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

Path = tuple[str | int, ...]
"""Keys and list positions from the root of the file to a value."""

STACK: Path = ("_metadata", "stack")
"""Where the stack lies inside SkyPilot's task."""


@dataclass(frozen=True)
class Place:
    """Where something is written: a line and column (from 1) of a file, or an option of the command line."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Problem:
    """``what`` is wrong at ``path`` and how to ``mend`` it. The loader adds the place.

    ``at_key`` points at the key itself instead of its value: the key is what is wrong.
    """

    path: Path
    what: str
    mend: str = ""
    at_key: bool = False
    place: Place | None = None

    def __str__(self) -> str:
        key, place = dotted(self.path), str(self.place)
        told = not key or place.endswith(f" {key}")  # `--set seed` names the key already
        return f"{place}: {'' if told else key + ': '}{self.what}{'; ' + self.mend if self.mend else ''}"

    def as_json(self) -> dict[str, object]:
        """For ``-o json``: source, line, column, key, what, mend."""
        place = asdict(self.place) if self.place else {}
        return {**place, "key": dotted(self.path), "what": self.what, "mend": self.mend}


class StackError(Exception):
    """A stack that cannot be used. Carries every problem that was found."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def at(*steps: str | int) -> Path:
    """A path inside the stack."""
    return (*STACK, *steps)


def dotted(path: Path) -> str:
    """``("_metadata", "stack", "stages", 0, "steps")`` → ``stages.0.steps``, as ``--set`` takes it.

    Keys of SkyPilot's task are written from the root of the file.
    """
    inside = path[len(STACK) :] if path[: len(STACK)] == STACK and len(path) > len(STACK) else path
    return ".".join(map(str, inside))

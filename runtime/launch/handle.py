"""Who carries a run: handle.json in its folder, and what every backend can be asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal, Protocol

from stackrl.runtime.run import RunFolder
from stackrl.schemas.loader import LoadedStack

FILE = "handle.json"


@dataclass(frozen=True)
class Handle:
    """Where a run is, as `launch` left it."""

    backend: str
    """local, slurm or sky."""
    job: str = ""
    """What the backend calls it: Slurm's job id, SkyPilot's cluster or managed job."""
    submitted: float = 0.0
    """Seconds since 1970."""
    hourly: float | None = None
    """Dollars per hour of all its machines; None: unknown."""
    details: dict[str, str] = field(default_factory=dict)
    """What else the backend needs to find it again."""

    def write(self, run: RunFolder) -> None:
        run.write(FILE, asdict(self))

    @classmethod
    def of(cls, run: RunFolder) -> Handle:
        """A run without the file is of this machine."""
        return cls(**run.read(FILE)) if (run.path / FILE).exists() else cls("local")


@dataclass(frozen=True)
class Seen:
    """What a backend says of a run's machines."""

    phase: Literal["waiting", "running", "ended", "unreachable"]
    words: str = ""
    """The backend's own: a state such as PENDING (Resources), or why it cannot be asked."""


class Backend(Protocol):
    """A way to get machines for a run."""

    def launch(self, source: LoadedStack, infra: str, *, detach: bool) -> int:
        """Get machines and start the run on them; the verb's exit code. Raises StackError and RunError."""

    def look(self, run: RunFolder, handle: Handle) -> Seen:
        """Ask for the state of its machines. Never raises for what is merely gone."""

    def down(self, run: RunFolder, handle: Handle) -> list[str]:
        """End it and give its machines back; what could not be reached, in words. Repeating it is fine."""

    def execute(self, run: RunFolder, handle: Handle, command: Sequence[str], node: int) -> int:
        """Run a command on one of its nodes; its exit code."""

    def logs(self, run: RunFolder, handle: Handle, *, follow: bool) -> int | None:
        """Print logs that are not in the run's folder here; None where they are."""

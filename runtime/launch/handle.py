"""Who carries a run: handle.json in its folder, and what every backend can be asked."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
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
    """Dollars per hour of all its machines; 0: nobody asks for money; None: unknown."""
    ended: float | None = None
    """When its machines were seen to be given back; they are not asked again."""
    details: dict[str, str] = field(default_factory=dict)
    """What else the backend needs to find it again; `infra` holds the words of `--infra`."""

    def write(self, run: RunFolder) -> None:
        run.write(FILE, asdict(self))

    def end(self, run: RunFolder, words: str = "") -> None:
        """Note that its machines are gone, and what the backend said of it."""
        details = self.details | ({"end": words} if words else {})
        replace(self, ended=self.ended or time.time(), details=details).write(run)

    @classmethod
    def of(cls, run: RunFolder) -> Handle:
        """A run without the file is of this machine. What other versions have written besides is left out."""
        if not (run.path / FILE).exists():
            return cls("local", hourly=0.0)
        known = {one.name for one in fields(cls)}
        return cls(**{key: value for key, value in run.read(FILE).items() if key in known})


@dataclass(frozen=True)
class Seen:
    """What a backend says of a run's machines."""

    phase: Literal["waiting", "running", "ended", "unreachable"]
    words: str = ""
    """The backend's own: a state such as PENDING (Resources), or why it cannot be asked."""


class Backend(Protocol):
    """A way to get machines for a run. Each method that waits has a limit."""

    def launch(self, source: LoadedStack, infra: str, *, detach: bool) -> int:
        """Get machines and start a new run on them; the verb's exit code. Raises StackError and RunError.

        Without ``detach`` it shows the run until its end. ``infra`` is the whole word of `--infra`, such as
        `slurm/tower/gpu`. Where nothing was started, no folder of a run is left.
        """

    def resume(self, run: RunFolder, infra: str, source: LoadedStack | None, *, detach: bool) -> int:
        """Get machines for a run whose folder is there and which is not at work: one that ended early, or a
        fork. ``source`` is what it goes on with, where it is another stack. As `launch` otherwise."""

    def look(self, run: RunFolder, handle: Handle) -> Seen:
        """Ask for the state of its machines. Never raises for what is merely gone.

        Where the run's folder of the machines is not the one here, it brings what it can of state.json and
        metrics.jsonl up to date.
        """

    def down(self, run: RunFolder, handle: Handle) -> list[str]:
        """End it and give its machines back; what could not be reached, in words. Repeating it is fine."""

    def execute(self, run: RunFolder, handle: Handle, command: Sequence[str], node: int) -> int:
        """Run a command on one of its nodes; its exit code."""

    def logs(self, run: RunFolder, handle: Handle, *, follow: bool) -> int | None:
        """Print logs that are not in the run's folder here; None where they are."""

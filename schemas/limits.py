"""`limits:` when a run ends by itself, and how long anything may keep it waiting."""

from __future__ import annotations

from pydantic import Field

from stackrl.schemas.base import Model


class Limits(Model):
    """How long the run, its silence and its end may take, and how often a process is started again."""

    hours: float | None = Field(default=None, gt=0)
    """Hours after which the run is saved and stopped, all its starts together; by default there is no end."""
    cost: float | None = Field(default=None, gt=0)
    """Dollars after which the run is saved and stopped, all its starts together; by default there is no end.
    It needs the price of the machines (docs/launching.md)."""
    idle_minutes: float = Field(default=60.0, gt=0)
    """Minutes without a finished rollout or an optimizer step after which the run ends as failed."""
    silence_seconds: float = Field(default=60.0, ge=5)
    """Seconds without a sign of life after which a process is taken for stopped, ended and started again."""
    restarts: int = Field(default=5, ge=0)
    """Times in a row, without an optimizer step in between, that processes are started again; 0: never."""
    stop_seconds: float = Field(default=120.0, ge=1)
    """Seconds that saving the run may take when it is told to stop; then it is ended without."""

"""`guards:` what is taken for a sign that the run learns the wrong thing, and who is told."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from stackrl.schemas.base import Model, untouched

Action = Literal["ignore", "warn", "stop"]
"""Not `off`: YAML reads that as false."""
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
"""Stands for the value of an environment variable."""
Steps = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Webhook = Annotated[
    str,
    Field(
        pattern=rf"^(https?://[^\s/]\S*|{VARIABLE.pattern})$",
        examples=["https://example.org/hook", "${SLACK_WEBHOOK}"],
    ),
]


class _Guard(Model):
    steps: Steps = 5
    """Steps in a row that must show it before it counts."""
    action: Action = "warn"
    """What happens then. `warn`: tell, and go on; `stop`: tell, save and stop the run; `ignore`: nothing."""


class NotFiniteGuard(_Guard):
    """A loss, a gradient or weights that are not finite. Such a step changes no weights, so one or two do no
    harm; weights that are not finite count at once."""

    steps: Steps = 3
    action: Action = "stop"


class EntropyGuard(_Guard):
    """The policy has stopped trying different things: little is left of the entropy it had at the beginning
    of the stage."""

    share: float = Field(default=0.1, gt=0, lt=1)
    """Below this share of the mean entropy of the stage's first `window` steps."""
    window: Steps = 10
    """Steps at the beginning of the stage whose mean is what is normal."""
    unless_solved: Share | None = 0.9
    """Does not count while at least this share of the rollouts is solved: a policy that has learnt its task
    may be sure of itself. `null`: it always counts."""
    steps: Steps = 10


class MismatchGuard(_Guard):
    """The trainer computes other probabilities than the engine sampled with (`trainer/mismatch_kl`, in nats
    per token): weights that did not arrive, other numerics, or samples that are too old."""

    above: float = Field(default=0.1, gt=0)
    """Above this many nats per token, or"""
    growth: float = Field(default=10.0, gt=1)
    """this many times the mean of the stage's first `window` steps, where that is more than"""
    growth_above: float = Field(default=0.01, ge=0)
    """this many nats per token, below which growth does no harm."""
    window: Steps = 10
    """Steps at the beginning of the stage whose mean is what is normal."""


class SignalGuard(_Guard):
    """Ever more groups teach nothing, because all their rewards are equal: the task has become too easy, or
    is too hard. Groups that `no_signal: refill` replaced count too."""

    above: float = Field(default=0.9, gt=0, lt=1)
    """Above this share of the groups."""
    unless_solved: Share | None = 0.9
    """Does not count while at least this share of the rollouts is solved: the task is learnt. `null`: it
    always counts."""
    steps: Steps = 10


class RewardGuard(_Guard):
    """The mean reward jumps and stays there: something broke, or the policy has found a way to be rewarded
    for something else than the task."""

    deviations: float = Field(default=6.0, gt=0)
    """Further than this many standard deviations from the mean of the steps before."""
    window: int = Field(default=20, ge=4)
    """Steps before it whose mean and deviation are what is normal."""
    steps: Steps = 3


class Notify(Model):
    """Who is called at each alarm and at the end of the run, with a JSON object that holds `run`, `event`
    (`alarm` or `ended`), `stage`, `step`, `guard`, `action`, `status` and `text`."""

    command: str | list[str] | None = Field(default=None, min_length=1)
    """A command, which gets the object on its standard input: a line for the shell, or a list of words."""
    webhook: Webhook | None = None
    """A URL that the object is posted to, or `${NAME}`: the URL is in that environment variable."""
    timeout: float = Field(default=10.0, gt=0, le=300)
    """Seconds that each call may take. Neither a slow call nor one that fails holds up the run."""


class Guards(Model):
    """Guards against learning the wrong thing in silence. Each warns once when it begins to see its sign,
    and again only after that was gone; a new stage begins anew."""

    not_finite: NotFiniteGuard = untouched(NotFiniteGuard)
    entropy_collapse: EntropyGuard = untouched(EntropyGuard)
    mismatch: MismatchGuard = untouched(MismatchGuard)
    no_signal: SignalGuard = untouched(SignalGuard)
    reward_jump: RewardGuard = untouched(RewardGuard)
    notify: Notify = untouched(Notify)

"""`algorithm.advantage`: how much better a rollout was, `shaping`: what its reward is changed by before, and
`curriculum`: which environments are drawn how often.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, Tag

from stackrl.schemas.base import Model, variant


class GrpoAdvantage(Model):
    """Reward minus the mean of its group (arXiv 2402.03300; without the deviation: 2503.20783)."""

    type: Literal["grpo"] = "grpo"
    """Which advantage."""
    divide_by_deviation: bool = False
    """Divide by the group's standard deviation as well."""


class LeaveOneOutAdvantage(Model):
    """Reward minus the mean of the others of its group (RLOO, arXiv 2402.14740)."""

    type: Literal["leave_one_out"]
    """Which advantage."""


class ReinforcePlusPlusAdvantage(Model):
    """Reward minus a mean, over the deviation of the step's rewards (REINFORCE++, arXiv 2501.03262)."""

    type: Literal["reinforce_plus_plus"]
    """Which advantage."""
    baseline: Literal["batch", "group"] = "batch"
    """The mean over all rollouts of the step, or over the rollout's group."""


class MaxRlAdvantage(Model):
    """Reward minus the mean of its group, divided by that mean: rare successes count more (MaxRL, arXiv
    2602.02710). Groups whose mean is not above zero teach nothing, so it is for rewards that are not
    negative, before shaping and after it."""

    type: Literal["max_rl"]
    """Which advantage."""


class RaeAdvantage(Model):
    """Reward minus a moving mean of the environment, and of the agent where its metrics tell one
    (role-conditioned advantage estimation, arXiv 2506.24119). Groups may have one rollout."""

    type: Literal["rae"]
    """Which advantage."""
    decay: float = Field(default=0.95, ge=0, lt=1)
    """How much of the mean is kept at each rollout. It starts at 0, and each step's metrics carry it."""


class HierarchicalAdvantage(Model):
    """Reward minus the mean of the same agent's rollouts in the group. The environment tells the agent and
    the episode of a rollout, whole numbers, as its metrics `agent` and `episode`."""

    type: Literal["hierarchical"]
    """Which advantage."""
    within_episode: list[int] = []
    """Agents whose rollouts are compared with those of the same episode only."""


class PythonAdvantage(Model):
    """A function of yours: `function(rewards, rollouts, **arguments)` gives one number for each of a group's
    rewards, a numpy array. It is not asked about groups whose rewards are equal, which teach nothing."""

    type: Literal["python"]
    """Which advantage."""
    path: str = Field(min_length=1, examples=["my_package.advantages:ranked"])
    """`module:function`, `folder/file.py:function`, or the name of an entry point in `stackrl.advantages`."""
    arguments: dict[str, JsonValue] = {}
    """Given to the function by name."""


Advantage = Annotated[
    Annotated[GrpoAdvantage, Tag("grpo")]
    | Annotated[LeaveOneOutAdvantage, Tag("leave_one_out")]
    | Annotated[ReinforcePlusPlusAdvantage, Tag("reinforce_plus_plus")]
    | Annotated[MaxRlAdvantage, Tag("max_rl")]
    | Annotated[RaeAdvantage, Tag("rae")]
    | Annotated[HierarchicalAdvantage, Tag("hierarchical")]
    | Annotated[PythonAdvantage, Tag("python")],
    variant("type", default="grpo"),
]


def compares(advantage: Advantage) -> bool:
    """Whether the rollouts of a group are compared with each other, so that equal rewards teach nothing."""
    if advantage.type == "reinforce_plus_plus":
        return advantage.baseline == "group"
    return advantage.type != "rae"


class LengthPenalty(Model):
    """Of rewards above zero a part is taken off, by length beside the longest of the group: reward −
    mean · (sampled · tokens/most + read · tokens/most + turns · turns/most)."""

    sampled: float = Field(default=0.25, ge=0)
    """For tokens that the model wrote."""
    read: float = Field(default=0.1, ge=0)
    """For tokens that it was given to read."""
    turns: float = Field(default=0.1, ge=0)
    """For answers."""


class Overlong(Model):
    """Up to `penalty` is taken off a reward whose rollout comes near to a limit, and all of it beyond that
    (DAPO's soft overlong punishment, arXiv 2503.14476)."""

    limit: int = Field(ge=1)
    """Sampled tokens of a rollout from which on the whole penalty is taken."""
    buffer: int = Field(ge=1)
    """Tokens below the limit over which the penalty grows from nothing."""
    penalty: float = Field(default=1.0, gt=0)
    """What is taken off at the limit."""


class DivergencePenalty(Model):
    """The divergence from `algorithm.reference`, summed over a rollout's tokens, is taken off its reward. A
    loss can hold it instead."""

    weight: float = Field(gt=0)
    """What one nat of it costs."""
    estimator: Literal["k1", "k2", "k3"] = "k1"
    """With d = log μ − log π_ref of a sampled token, limited to ±20. k1: d; k2: d²/2; k3: e^(−d) + d − 1, in
    a straight line where its slope would be below −20."""


class Shaping(Model):
    """What a reward is changed by before rollouts are compared; metrics and evaluations keep it as it was."""

    length: LengthPenalty | None = None
    """Shorter ones of a group are worth more."""
    overlong: Overlong | None = None
    """Rollouts near to their limit are worth less."""
    divergence: DivergencePenalty | None = None
    """Rollouts far from a reference model are worth less."""


class Curriculum(Model):
    """Environments are pools of prompts by difficulty: those that are solved about half of the time are drawn
    more often. Each is drawn in proportion to weight · max(floor, 4 p (1 − p)), where p is the moving mean of
    its metric `solved`."""

    decay: float = Field(default=0.9, ge=0, lt=1)
    """How much of the solve rate is kept at each step that holds rollouts of the environment."""
    floor: float = Field(default=0.1, gt=0, le=1)
    """Share of its weight that a pool keeps which is always solved, or never."""

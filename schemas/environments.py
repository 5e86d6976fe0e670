"""`environments:` what is learnt. The arguments of each type are checked against the schema it declares."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from stackrl.schemas.algorithm import Advantage
from stackrl.schemas.base import Model, Name
from stackrl.schemas.inference import SamplingChange

EnvironmentType = Literal[
    "reverse_text",
    "reverse_text_tries",
    "swap_words",
    "sort_words",
    "arithmetic",
    "word_problems",
    "guess_number",
    "wordle",
    "tool_use",
    "math",
    "dataset",
    "python",
    "swe",
    "verifiers",
]
Component = Literal["rl", "ce", "ref_kl"]
"""Parts of the loss, each averaged over its own tokens."""


class Environment(Model):
    """One environment of the mix."""

    name: Name
    """Unique; metrics carry it."""
    type: EnvironmentType
    """Which environment; stackrl/runtime/environments/ has one file for each."""
    args: dict[str, JsonValue] = {}
    """The environment's own arguments."""
    weight: float = Field(default=1.0, gt=0)
    """Share of the prompts, relative to the other environments."""
    rewards: dict[str, float] = {}
    """Weights of the environment's rewards by name, where they are not its own."""
    group_size: int | None = Field(default=None, ge=1)
    """Rollouts of one prompt of this environment, instead of `algorithm.group_size`."""
    sampling: SamplingChange | None = None
    """Changes to `sampling` for this environment."""
    advantage: Advantage | None = None
    """Of its rollouts, instead of `algorithm.advantage`; the whole advantage is given."""
    component: Component = "rl"
    """What its answers teach. `rl`: by `algorithm.loss` and their advantage; `ce`: to write the same again,
    by cross-entropy; `ref_kl`: to write as the reference model does. Each is averaged over its own tokens."""
    sampled_by: Literal["policy", "reference"] = "policy"
    """Who writes the answers: the model that is trained, or `algorithm.reference` as a teacher, whose answers
    are learnt by `component: ce`."""
    failures: Literal["retry", "drop"] = "retry"
    """A rollout that failed: it is done once more before its group goes on without it, or its group does so
    at once."""
    workers: int = Field(default=1, ge=1, le=64)
    """Processes that the rollouts of an environment run in which leads them itself: `swe`, `verifiers`, your
    own. Each of them runs many at once; one that dies or blocks is replaced."""
    at_once: int | None = Field(default=None, ge=1)
    """Rollouts in each worker at a time; others wait before their time begins. By default `swe` has 32, for
    each of them holds a sandbox, and there is no bound for others."""
    id: str | None = Field(
        default=None, pattern=r"^([A-Za-z0-9._-]+/)?[A-Za-z0-9._-]+$", examples=["will/wordle"]
    )
    """`verifiers`: the package, as the Environments Hub names it. It has to be installed already."""
    version: str | None = Field(default=None, min_length=1)
    """`verifiers`: the version of the package; any, where it is left out."""
    python: str | None = Field(default=None, min_length=1)
    """`verifiers`: the Python that the package is installed for, by default that of the run. Packages that
    exclude each other get one each."""
    agent: dict[str, JsonValue] = {}
    """`verifiers` of version 1: settings of its agents, such as `max_turns`, `timeout`, `harness` and
    `runtime`; by default a chat in the worker itself."""


class Evaluate(Model):
    """Evaluations: of what a stage learns, before and after it, and of held-out environments."""

    environments: list[Environment] = []
    """Held-out ones. They are evaluated on the weights that the run begins with, then before and after each
    rl stage."""
    every: int | None = Field(default=None, ge=1)
    """Held-out environments are evaluated after so many trainer steps as well."""
    prompts: int = Field(default=256, ge=2)
    """Prompts of an evaluation: the same ones each time."""
    samples: int = Field(default=1, ge=1)
    """Answers to each prompt: with 8, reward and exact match are avg@8, and pass@2, pass@4 and pass@8 are
    told too. Each prompt is answered once more with the likeliest tokens."""

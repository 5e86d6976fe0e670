"""Does it learn? Runs the first RL stage of a stack on several seeds, and once more with an RL rate of 0.

    python benchmarks/learns.py [--stack stacks/x.yaml] [--seeds 0 1 2] [--plot docs/learning.svg]
    python benchmarks/learns.py --losses aipo grpo gspo --staleness 0 2 8 [--plot docs/algorithms.svg]

The second form runs the first of the seeds with each loss (its defaults, but for SETTINGS) and with each
`max_staleness`. For each run: the mean reward of the first ten and of the last ten steps. The gain is to be
at least 0.35; with a rate of 0 the two stay within 0.1. Exit code 1 where one of them is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

GAIN, DRIFT, WINDOW = 0.35, 0.1, 10
SETTINGS = {"gspo": {"clip_low": 0.1, "clip_high": 0.1}}
"""Of a loss whose defaults are made for rates a thousand times smaller than those of this stack."""


@dataclass(frozen=True)
class Variant:
    """What one run changes of the stack."""

    name: str
    seed: int
    changes: dict[str, Any] = field(default_factory=dict)
    """Key path → value."""
    rate: float | None = None
    """Of the RL stage, instead of the stack's."""


@dataclass(frozen=True)
class Outcome:
    variant: Variant
    rewards: list[float]
    seconds: float

    @property
    def first(self) -> float:
        return fmean(self.rewards[:WINDOW])

    @property
    def last(self) -> float:
        return fmean(self.rewards[-WINDOW:])

    @property
    def holds(self) -> bool:
        gain = self.last - self.first
        return abs(gain) <= DRIFT if self.variant.rate == 0 else gain >= GAIN


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stack", type=Path, default=Path("stacks/reverse-text-cpu.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--losses", nargs="+", default=[], help="types of algorithm.loss")
    parser.add_argument("--staleness", type=int, nargs="+", default=[], help="algorithm.max_staleness")
    parser.add_argument("--plot", type=Path, help="write the curves there (SVG; extra `benchmarks`)")
    options = parser.parse_args()

    stages = first_rl_stage(options.stack)
    outcomes = []
    print("| run | first ten | last ten | gain | seconds | |\n| --- | --- | --- | --- | --- | --- |")
    for variant in variants(options.seeds, options.losses, options.staleness):
        outcome = run(options.stack, stages, variant)
        outcomes.append(outcome)
        gain, verdict = outcome.last - outcome.first, "ok" if outcome.holds else "NOT SO"
        print(
            f"| {variant.name} | {outcome.first:.3f} | {outcome.last:.3f} | {gain:.3f} "
            f"| {outcome.seconds:.0f} | {verdict} |",
            flush=True,
        )
    if options.plot:
        plot(outcomes, options.plot)
    return 0 if all(outcome.holds for outcome in outcomes) else 1


def variants(seeds: list[int], losses: list[str], staleness: list[int]) -> list[Variant]:
    if not losses and not staleness:
        return [*(Variant(f"seed {seed}", seed) for seed in seeds), Variant("rate 0", seeds[0], rate=0.0)]
    settings = {loss: {"type": loss} | SETTINGS.get(loss, {}) for loss in losses}
    return [
        *(Variant(loss, seeds[0], {"algorithm.loss": said}) for loss, said in settings.items()),
        *(Variant(f"max staleness {n}", seeds[0], {"algorithm.max_staleness": n}) for n in staleness),
    ]


def first_rl_stage(stack: Path) -> list[dict]:
    """The stack's stages up to its first RL stage."""
    stages = yaml.safe_load(stack.read_text())["_metadata"]["stack"]["stages"]
    end = next(i for i, stage in enumerate(stages) if stage["type"] == "rl")
    return stages[: end + 1]


def run(stack: Path, stages: list[dict], variant: Variant) -> Outcome:
    """Launch the stack with these stages and what the variant changes, and read its rewards."""
    if variant.rate is not None:
        optimizer = stages[-1].get("optimizer", {}) | {"learning_rate": variant.rate}
        stages = [*stages[:-1], stages[-1] | {"optimizer": optimizer}]
    changes = {"seed": variant.seed, "stages": stages, **variant.changes}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "stackrl", "launch", str(stack)]
        for path, value in changes.items():
            command += ["--set", f"{path}={json.dumps(value)}"]
        done = subprocess.run(
            command, env=os.environ | {"STACKRL_HOME": home}, capture_output=True, text=True, timeout=3600
        )
        if done.returncode:
            raise SystemExit(f"{variant.name}: the run failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        (metrics,) = Path(home).glob("runs/*/metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [record["reward"] for record in records if record["kind"] == "rl"]
    return Outcome(variant, rewards, time.monotonic() - began)


def plot(outcomes: list[Outcome], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for outcome in outcomes:
        grey = "0.6" if outcome.variant.rate == 0 else None
        axes.plot(outcome.rewards, label=outcome.variant.name, color=grey, linewidth=1.5)
    axes.set(xlabel="RL step", ylabel="mean reward at temperature 1", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())

"""Does it learn? Runs the first RL stage of a stack on several seeds, and once more with an RL rate of 0.

    python benchmarks/learns.py [--stack stacks/x.yaml] [--seeds 0 1 2] [--plot docs/learning.svg]

For each seed: the mean reward of the first ten and of the last ten steps. With the stack's rate the gain is
to be at least 0.35; with a rate of 0 the two stay within 0.1. Exit code 1 where one of them is not so.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import yaml

GAIN, DRIFT, WINDOW = 0.35, 0.1, 10


@dataclass(frozen=True)
class Outcome:
    seed: int
    rate: float
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
        return abs(gain) <= DRIFT if self.rate == 0 else gain >= GAIN


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stack", type=Path, default=Path("stacks/reverse-text-cpu.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--plot", type=Path, help="write the curves there (SVG; extra `benchmarks`)")
    options = parser.parse_args()

    stages = first_rl_stage(options.stack)
    rate = stages[-1].get("optimizer", {}).get("learning_rate")
    outcomes = []
    print(f"{'seed':>4} {'rate':>8} {'first ten':>10} {'last ten':>9} {'gain':>6} {'seconds':>8}")
    for seed, chosen in [(seed, rate) for seed in options.seeds] + [(options.seeds[0], 0.0)]:
        outcome = run(options.stack, stages, seed, chosen)
        outcomes.append(outcome)
        gain, verdict = outcome.last - outcome.first, "ok" if outcome.holds else "NOT SO"
        print(
            f"{seed:>4} {chosen:>8.0e} {outcome.first:>10.3f} {outcome.last:>9.3f} "
            f"{gain:>6.3f} {outcome.seconds:>8.0f}  {verdict}",
            flush=True,
        )
    if options.plot:
        plot(outcomes, options.plot)
    return 0 if all(outcome.holds for outcome in outcomes) else 1


def first_rl_stage(stack: Path) -> list[dict]:
    """The stack's stages up to its first RL stage."""
    stages = yaml.safe_load(stack.read_text())["_metadata"]["stack"]["stages"]
    end = next(i for i, stage in enumerate(stages) if stage["type"] == "rl")
    return stages[: end + 1]


def run(stack: Path, stages: list[dict], seed: int, rate: float) -> Outcome:
    """Launch the stack with these stages and read its rewards."""
    stages = [
        *stages[:-1],
        stages[-1] | {"optimizer": stages[-1].get("optimizer", {}) | {"learning_rate": rate}},
    ]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home:
        command = [sys.executable, "-m", "stackrl", "launch", str(stack)]
        command += ["--set", f"seed={seed}", "--set", f"stages={json.dumps(stages)}"]
        done = subprocess.run(
            command, env=os.environ | {"STACKRL_HOME": home}, capture_output=True, text=True, timeout=3600
        )
        if done.returncode:
            raise SystemExit(f"the run of seed {seed} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        (metrics,) = Path(home).glob("runs/*/metrics.jsonl")
        records = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [record["reward"] for record in records if record["kind"] == "rl"]
    return Outcome(seed, rate, rewards, time.monotonic() - began)


def plot(outcomes: list[Outcome], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for outcome in outcomes:
        frozen = outcome.rate == 0
        label = f"seed {outcome.seed}" + (", rate 0" if frozen else "")
        axes.plot(outcome.rewards, label=label, color="0.6" if frozen else None, linewidth=1.5)
    axes.set(xlabel="RL step", ylabel="mean reward at temperature 1", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())

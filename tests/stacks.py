"""Stacks for tests: a small good one, and ways to make it bad."""

from __future__ import annotations

from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
STACKS = sorted((ROOT / "stacks").glob("*.yaml"))
PLANNED = {
    "glm4.5-air",
    "glm5",
    "glm5-b200",
    "glm5-h200",
    "minimax-m2.5-swe",
    "qwen3-30b-a3b-math",
    "qwen3-30b-a3b-swe",
}
"""Stacks that are checked and planned, and ask for what the runtime cannot do yet."""

GOOD = """\
name: small
num_nodes: 1
workdir: .
envs: {STACK: small.yaml}
run: stackrl node "$STACK"

_metadata:
  stack:
    version: 1
    model: {init: random, architecture: qwen3, config: {hidden_size: 64, num_hidden_layers: 2}}
    roles:
      trainer: {processes: 1}
      inference: {processes: 1}
    environments:
      - {name: reverse, type: reverse_text, args: {letters: [3, 6]}}
    sampling: {max_tokens: 9}
    algorithm:
      loss: {type: aipo, ratio_cap: 2.0}
      group_size: 8
      batch_size: 64
    stages:
      - {name: warmup, type: supervised, steps: 20, clean_steps: 10}
      - {name: main, type: rl, steps: 5}
"""


def write(folder: Path, *changes: tuple[str, str], base: str = GOOD) -> Path:
    """``base`` with ``changes`` (old text, new text) as small.yaml in ``folder``."""
    text = base
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the stack"
        text = text.replace(old, new)
    file = folder / "small.yaml"
    file.write_text(text)
    return file


def gpus(count: int, roles: str, more: str = "") -> tuple[tuple[str, str], ...]:
    """Changes that give the one node GPUs and split them as ``roles`` says (flow mapping)."""
    return (
        ("num_nodes: 1\n", f"num_nodes: 1\nresources: {{accelerators: 'H100:{count}'}}\n"),
        (
            "    roles:\n      trainer: {processes: 1}\n      inference: {processes: 1}\n",
            f"    roles: {roles}\n{more}",
        ),
    )


def task_of(file: Path) -> dict:
    return yaml.safe_load(file.read_text())

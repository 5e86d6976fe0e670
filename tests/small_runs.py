"""Run folders for the orchestrator, with the byte tokenizer and no model, and answers for fake engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from loopback import free_port

from stackrl.runtime.orchestrator.chat import Chat
from stackrl.runtime.run import Endpoints, RunFolder, State
from stackrl.runtime.trainer.models.byte_tokenizer import byte_tokenizer
from stackrl.schemas.stack import Stack

TOKEN = "a-token-of-these-tests"
STACK: dict[str, Any] = {
    "version": 1,
    "seed": 3,
    "model": {"init": "random", "architecture": "qwen3"},
    "roles": {"trainer": {"processes": 1}, "inference": {"processes": 1}},
    "trainer": {"sequence_length": 128},
    "inference": {"max_model_length": 128},
    "environments": [{"name": "reverse", "type": "reverse_text", "args": {"letters": [3, 6]}}],
    "sampling": {"max_tokens": 9, "timeout": 20.0},
    "algorithm": {"group_size": 4, "batch_size": 16, "max_staleness": 1},
    "evaluate": {"prompts": 8},
    "checkpoint": {"every": 3},
    "stages": [
        {"name": "warmup", "type": "supervised", "steps": 2, "batch_size": 8},
        {"name": "main", "type": "rl", "steps": 6},
    ],
}


@cache
def chat() -> Chat:
    return Chat(byte_tokenizer(256), "the byte tokenizer")


def make_run(folder: Path, **changes: Any) -> RunFolder:
    """A run in ``folder`` whose stack is STACK with ``changes``, ready for an orchestrator."""
    run = RunFolder(folder / "run")
    run.model.mkdir(parents=True)
    byte_tokenizer(256).save_pretrained(run.model)
    (run.model / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 32}))
    run.write("stack.json", Stack.model_validate(STACK | changes).model_dump(mode="json"))
    begin_attempt(run)
    return run


def begin_attempt(run: RunFolder) -> None:
    """Fresh ports and the next incarnation, as the node program gives them to each attempt."""
    before = run.state() if (run.path / "state.json").exists() else State()
    run.write_state(State(status="running", attempt=before.attempt + 1, incarnation=before.incarnation + 1))
    url = f"http://127.0.0.1:{free_port()}"
    run.write("endpoints.json", vars(Endpoints(orchestrator=url, weights="", engines=[], rendezvous="")))


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def word_in(prompt: Sequence[int]) -> str:
    """The word that a reverse_text prompt asks for."""
    return chat().text(prompt).partition("reverse: ")[2].partition("<|im_end|>")[0]


def reversed_badly(prompt: list[int], rng: Random) -> list[int]:
    """The right answer, each letter replaced with probability 0.4."""
    letters = (rng.choice("xyz") if rng.random() < 0.4 else letter for letter in word_in(prompt)[::-1])
    return chat().answer("".join(letters))


def reversed_well(prompt: list[int], rng: Random) -> list[int]:
    return chat().answer(word_in(prompt)[::-1])

"""What a run may be resumed with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_roles import STACK, fresh_home, make_run, stack, task_file

from stackrl.runtime.launch.admit import admit
from stackrl.runtime.launch.resume import refuse_changes
from stackrl.runtime.run import RunFolder, State
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError

WARMUP, MAIN = STACK["stages"]
"""20 supervised steps, then 60 of reinforcement learning."""


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


def begun(done: int) -> RunFolder:
    """A run of this stack that has taken ``done`` steps."""
    run = make_run()
    run.write_plan(stack(checkpoint={"path": "/saved"}), {})
    run.write_state(State("failed", attempt=1))
    if done:
        run.metrics.write_text(json.dumps({"index": done - 1, "stage": "main", "reward": 0.5}) + "\n")
    return run


def resume(run: RunFolder, folder: Path, **changes: Any) -> None:
    loaded = load(task_file(folder, **({"checkpoint": {"path": "/saved"}} | changes)))
    refuse_changes(run, loaded, admit(loaded)[0])


@pytest.mark.parametrize(
    ("done", "changes", "expected"),
    [
        (0, {"seed": 1}, "seed: the run was made with 0; put it back, or start a new run without --resume"),
        (
            0,
            {
                "model": STACK["model"]
                | {
                    "architecture": "llama",
                    "config": STACK["model"]["config"] | {"max_position_embeddings": 4096},
                }
            },
            "model.architecture: the run was made with the text 'qwen3'",
        ),
        (0, {"model": {"id": "owner/name"}}, "model.tokenizer: the run was made with the text 'bytes'"),
        (
            0,
            {"checkpoint": {"path": "/elsewhere"}},
            "checkpoint.path: the run was made with the text '/saved'",
        ),
        (0, {"stages": [MAIN]}, "stages.0: the run has begun the supervised stage warmup in this place"),
        (
            25,
            {"stages": [WARMUP, MAIN | {"name": "other"}]},
            "stages.1: the run has begun the rl stage main in",
        ),
        (25, {"stages": [WARMUP]}, "stages.1: the run has begun the rl stage main in this place"),
        (
            25,
            {"stages": [WARMUP | {"steps": 40}, MAIN]},
            "stages.0.steps: the run has taken all 20 steps of this",
        ),
        (
            25,
            {"stages": [WARMUP, MAIN | {"steps": 4}]},
            "stages.1.steps: the run has taken 5 steps of this stage",
        ),
    ],
)
def test_what_the_run_is_made_of_stays(tmp_path: Path, done: int, changes: Any, expected: str) -> None:
    with pytest.raises(StackError) as error:
        resume(begun(done), tmp_path, **changes)
    told = [str(problem) for problem in error.value.problems]
    assert any(
        f": {expected}" in problem and problem.startswith(f"{tmp_path}/fake.yaml:") for problem in told
    ), told


@pytest.mark.parametrize(
    ("done", "changes"),
    [
        (25, {}),
        (25, {"roles": {"trainer": {"processes": 2}, "inference": {"processes": 1}}}),
        (25, {"stages": [WARMUP, MAIN | {"steps": 5}]}),
        (25, {"stages": [WARMUP, MAIN, MAIN | {"name": "more"}]}),
        (10, {"stages": [WARMUP, MAIN | {"name": "other", "steps": 1}]}),
        (25, {"checkpoint": {"path": "/saved", "every": 7}}),
    ],
)
def test_the_rest_may_change(tmp_path: Path, done: int, changes: Any) -> None:
    resume(begun(done), tmp_path, **changes)


def test_the_stages_of_a_run_that_never_began_may_change(tmp_path: Path) -> None:
    run = begun(0)
    run.write_state(State())
    resume(run, tmp_path, stages=[MAIN])

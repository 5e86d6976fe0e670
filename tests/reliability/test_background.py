"""An exception in any background task of the orchestrator ends its process; the run goes on with another."""

from __future__ import annotations

from pathlib import Path

import crashing
import pytest
import trials
from crashing import Crash
from small_runs import lines

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ORCHESTRATOR = "stackrl.runtime.orchestrator."


@pytest.mark.parametrize(
    ("task", "function", "count"),
    [
        ("a demonstration is drawn in a thread", "supervised:Demonstrations.work", 2),
        ("a group is rolled out", "reinforcement:Reinforcement._roll_out_group", 5),
        ("an engine is updated", "engine_life:EngineLife.want", 3),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("groups are admitted", "reinforcement:Reinforcement._plan", 5),
                ("a checkpoint is completed", "saving:Saving._declare", 1),
                ("a rank greets", "progress:Progress.stepped", 2),
            )
        ),
    ],
)
def test_the_process_ends_by_name_and_the_run_goes_on(
    tmp_path: Path, tokenizer: Path, task: str, function: str, count: int
) -> None:
    crash = Crash("orchestrator", ORCHESTRATOR + function, "before", count, "call")
    run = trials.make_run(tmp_path, tokenizer, [crash])
    assert trials.live(run) == 1
    assert crashing.happened(run.path) == [0], task
    restarted = [event for event in lines(run.events) if event["event"] == "restarted"]
    assert [event["process"] for event in restarted] == ["orchestrator"]
    assert "orchestrator ended with exit code 1" in restarted[0]["reason"]
    assert crashing.FAULT in restarted[0]["reason"]
    trials.check(run)

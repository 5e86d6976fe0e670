"""Everything is killed and the run's folder lost: the run goes on from its durable checkpoints."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import crashing
import pytest
import trials
from fake_roles import gone, task_file, wait_until
from small_runs import lines

from stackrl.runtime import checkpoints
from stackrl.runtime.launch.again import recreate
from stackrl.runtime.processes import descendants, send
from stackrl.runtime.run import RunFolder, create_run
from stackrl.schemas.loader import LoadedStack, load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CUT = 6
"""Optimizer steps of the checkpoint before everything is lost; there is one of 3, too."""


def stack_file(folder: Path, ranks: int) -> LoadedStack:
    roles = {"trainer": {"processes": ranks}, "inference": {"processes": trials.ENGINES}}
    saved = {"every": 3, "keep": 3, "path": str(folder / "durable")}
    return load(task_file(folder, **trials.STACK | {"roles": roles, "checkpoint": saved}))


def arm(run: RunFolder, tokenizer: Path) -> None:
    run.model.symlink_to(tokenizer)
    crashing.write(run.path, [])


def lose_everything(run: RunFolder) -> None:
    """Once step ``CUT`` is saved and the next one taken: SIGKILL to all, and the folder is gone."""
    node = trials.start(run)
    saved = checkpoints.folder(run.checkpoints(run.stack()), CUT)
    wait_until(lambda: (saved / checkpoints.MANIFEST).exists(), limit=120)
    wait_until(lambda: lines(run.metrics)[-1]["index"] >= CUT, limit=60)
    everybody = [node.pid, *descendants(node.pid)]
    for pid in everybody:
        send(pid, signal.SIGKILL)
    node.wait(30)
    wait_until(lambda: gone(*everybody[1:]))
    shutil.rmtree(run.path)


def first_life(folder: Path, tokenizer: Path) -> str:
    loaded = stack_file(folder, trials.RANKS)
    plan = {"processes": [vars(process) for process in trials.processes_of(loaded.stack)]}
    run = create_run(loaded.name, loaded.path, loaded.hash, loaded.stack, plan)
    arm(run, tokenizer)
    lose_everything(run)
    return run.id


def relaunch(folder: Path, run_id: str, tokenizer: Path, ranks: int) -> RunFolder:
    run = recreate(run_id, stack_file(folder, ranks), trials.planned)
    assert run is not None and run.id == run_id
    arm(run, tokenizer)
    assert trials.live(run) == 1
    return run


def test_another_machine_with_other_ranks_goes_on(tmp_path: Path, tokenizer: Path) -> None:
    run = relaunch(tmp_path, first_life(tmp_path, tokenizer), tokenizer, ranks=3)
    trials.check(run)
    assert run.state().incarnation == 2
    [resumed] = [event for event in lines(run.events) if event["event"] == "resumed"]
    assert resumed["index"] == CUT
    # the metrics of the steps before the loss came with the checkpoint
    assert [record["index"] for record in lines(run.metrics)] == list(range(trials.SUPERVISED + trials.RL))


def flip_a_byte(checkpoint: Path) -> str:
    file = checkpoint / "orchestrator" / "journal.sqlite"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return "journal.sqlite is damaged"


def take_a_file_away(checkpoint: Path) -> str:
    (checkpoint / "trainer" / "sum-1.json").unlink()
    return "sum-1.json is missing"


def truncate_the_manifest(checkpoint: Path) -> str:
    file = checkpoint / checkpoints.MANIFEST
    file.write_bytes(file.read_bytes()[:-40])
    return "manifest.json is damaged"


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        pytest.param(take_a_file_away, marks=pytest.mark.nightly),
        pytest.param(truncate_the_manifest, marks=pytest.mark.nightly),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_used(
    tmp_path: Path, tokenizer: Path, damage: Callable[[Path], str]
) -> None:
    run_id = first_life(tmp_path, tokenizer)
    newest = max(path for path in (tmp_path / "durable" / run_id).glob("step-*") if path.name[5:].isdigit())
    while not (newest / checkpoints.MANIFEST).exists():  # one that was being written
        newest = checkpoints.folder(newest.parent, checkpoints.index_of(newest) - 3)
    complaint = damage(newest)
    run = relaunch(tmp_path, run_id, tokenizer, ranks=1)
    trials.check(run)
    said = (run.logs(1) / "node.log").read_text()
    assert complaint in said and newest.name in said
    resumed = next(event for event in lines(run.events) if event["event"] == "resumed")
    assert resumed["index"] == checkpoints.index_of(newest) - 3

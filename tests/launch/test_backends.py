"""Runs that somebody else carries: a backend that is told what to answer, and the verbs over it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from fake_roles import SERVES, fresh_home, make_run, process, start_node, task_file, wait_until

from stackrl.cli import main
from stackrl.runtime.launch import backends, runs
from stackrl.runtime.launch.handle import FILE, Handle, Seen
from stackrl.runtime.launch.listing import describe, status_of
from stackrl.runtime.run import RunError, RunFolder, State, all_runs
from stackrl.schemas.loader import load

HOUR = 3600.0


@dataclass
class Pretended:
    """A backend that notes what it is asked and says what it was told to."""

    seen: Seen = field(default_factory=lambda: Seen("running", "RUNNING on n1"))
    unreached: list[str] = field(default_factory=list)
    lines: str | None = None
    asked: list[Any] = field(default_factory=list)

    def launch(self, source: Any, infra: str, *, detach: bool) -> int:
        self.asked.append(("launch", source.name, infra, detach))
        return 7

    def resume(self, run: RunFolder, infra: str, source: Any, *, detach: bool) -> int:
        self.asked.append(("resume", run.id, infra, source and source.name, detach))
        return 8

    def look(self, run: RunFolder, handle: Handle) -> Seen:
        self.asked.append(("look", handle.job))
        return self.seen

    def down(self, run: RunFolder, handle: Handle) -> list[str]:
        self.asked.append(("down", handle.job))
        return self.unreached

    def execute(self, run: RunFolder, handle: Handle, command: Sequence[str], node: int) -> int:
        self.asked.append(("execute", handle.job, list(command), node))
        return 9

    def logs(self, run: RunFolder, handle: Handle, *, follow: bool) -> int | None:
        if self.lines is None:
            return None
        print(self.lines)
        return 0


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    module = ModuleType("a_backend_of_these_tests")
    module.BACKEND = Pretended()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(backends.MODULES, backends.SKY, module.__name__)
    return module.BACKEND


def carried(status: str = "created", **handle: Any) -> RunFolder:
    """A run that the cloud of these tests carries."""
    run = make_run()
    run.write_state(State(status=status))
    Handle(**{"backend": "sky", "job": "rl-7", "submitted": 1000.0} | handle).write(run)
    return run


@pytest.mark.parametrize(
    ("infra", "name"),
    [
        ("local", "local"),
        ("slurm", "slurm"),
        ("slurm/tower/gpu", "slurm"),
        ("sky", "sky"),
        ("aws/us-east-1", "sky"),
        ("K8s/context", "sky"),
        ("*/us-east-1", "sky"),
    ],
)
def test_infra_names_the_backend(infra: str, name: str) -> None:
    assert backends.backend_of_infra(infra) == name


@pytest.mark.parametrize(
    ("infra", "words"), [("slrm", "did you mean slurm"), ("mars", "begins with local"), ("", "begins with")]
)
def test_an_unknown_infra_is_refused_before_anything_is_made(
    infra: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", str(task_file(tmp_path)), "--infra", infra]) == 2
    assert words in capsys.readouterr().err and all_runs() == []


def test_a_stack_is_launched_by_the_backend_of_its_infra(cloud: Pretended, tmp_path: Path) -> None:
    file = str(task_file(tmp_path))
    assert main(["launch", file, "--infra", "aws/us-east-1", "-d"]) == 7
    assert main(["launch", "--infra", "gcp"]) == 2
    assert cloud.asked == [("launch", "fake", "aws/us-east-1", True)]


def test_a_run_goes_on_where_it_was_or_where_it_is_sent(cloud: Pretended, tmp_path: Path) -> None:
    run = carried("failed", details={"infra": "aws/us-east-1"})
    cloud.seen = Seen("ended")
    file = str(task_file(tmp_path))
    assert main(["launch", "--resume", run.id]) == 8
    assert main(["launch", file, "--resume", run.id, "--infra", "gcp", "-d"]) == 8
    here = make_run()
    assert main(["launch", "--resume", here.id, "--infra", "aws"]) == 8
    assert [ask for ask in cloud.asked if ask[0] == "resume"] == [
        ("resume", run.id, "aws/us-east-1", None, False),
        ("resume", run.id, "gcp", "fake", True),
        ("resume", here.id, "aws", None, False),
    ]


@pytest.mark.parametrize("phase", ["waiting", "running", "unreachable"])
@pytest.mark.parametrize("infra", [[], ["--infra", "gcp"], ["--infra", "local"]])
def test_a_run_that_may_be_at_work_elsewhere_is_not_begun_again(
    cloud: Pretended, phase: Any, infra: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = carried("stopped")
    cloud.seen = Seen(phase, "the words of the cloud")
    assert main(["launch", "--resume", run.id, *infra]) == 2
    assert f"end it first with `stackrl down {run.id}`" in capsys.readouterr().err
    assert {ask[0] for ask in cloud.asked} == {"look"}


def test_a_finished_run_does_not_go_on(cloud: Pretended) -> None:
    cloud.seen = Seen("ended")
    with pytest.raises(RunError, match="is finished"):
        backends.launch(None, "aws", detach=False, resume=carried("finished").id)


def test_what_does_not_fit_here_is_refused_with_the_places_that_the_stack_names(tmp_path: Path) -> None:
    file = task_file(tmp_path, roles={"trainer": {"gpus": 7}, "inference": {"gpus": 1}})
    machines = "{accelerators: 'H100:8', any_of: [{infra: slurm/tower}, {infra: aws}]}"
    file.write_text(file.read_text() + f"resources: {machines}\n")
    with pytest.raises(RunError) as caught:
        backends.launch(load(file), None, detach=True)
    assert "needs 8 GPUs" in str(caught.value)
    assert f"`stackrl launch {file} --infra slurm/tower` or" in str(caught.value)
    assert f"`stackrl launch {file} --infra aws`" in str(caught.value)
    assert "--infra slurm` or `" in backends.choices("x.yaml", {})
    assert all_runs() == []


@pytest.mark.parametrize(
    ("state", "phase", "status"),
    [
        ("created", "waiting", "waiting"),
        ("created", "running", "starting"),
        ("running", "running", "running"),
        ("running", "waiting", "waiting"),
        ("created", "ended", "ended"),
        ("running", "ended", "died"),
        ("running", "unreachable", "unreachable"),
        ("finished", "ended", "finished"),
        ("finished", "unreachable", "finished"),
        ("stopped", "waiting", "waiting"),
    ],
)
def test_the_status_is_what_the_run_and_its_machines_say(
    cloud: Pretended, state: str, phase: Any, status: str
) -> None:
    cloud.seen = Seen(phase, "its words")
    described = describe(carried(state))
    assert (described["status"], described["machines"]) == (status, {"phase": phase, "words": "its words"})


def test_status_lists_the_runs_of_all_backends(cloud: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    here, there = make_run(), carried("running", hourly=3.0)
    assert runs.status(None, "text") == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == [*("RUN", "STATUS", "STAGE", "STEP", "REWARD", "AGE", "COST", "WHERE", "ROLES")]
    assert rows[1].split()[:3] == [here.id, "created", "0/80"] and rows[1].split()[-1] == "here"
    assert rows[2].split()[:3] == [there.id, "running", "0/80"] and "sky rl-7" in rows[2]
    assert runs.status(there.id, "text") == 0
    told = capsys.readouterr().out
    assert "machines  running: RUNNING on n1" in told and "$3.00 an hour" in told


def test_money_is_no_column_where_nobody_asks_for_any(
    cloud: Pretended, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    carried("running", hourly=0.0)
    runs.status(None, "text")
    assert "COST" not in capsys.readouterr().out
    carried("running")
    runs.status(None, "text")
    assert "unknown" in capsys.readouterr().out


def test_machines_that_are_gone_are_not_asked_again_and_cost_no_more(cloud: Pretended) -> None:
    run = carried("finished", hourly=3.0, submitted=1000.0)
    cloud.seen = Seen("ended", "SUCCEEDED")
    first = describe(run)
    ended = Handle.of(run).ended
    assert ended is not None and first["cost"] == pytest.approx((ended - 1000.0) * 3 / HOUR)
    assert describe(run)["machines"] == {"phase": "ended", "words": "SUCCEEDED"}
    assert describe(run)["cost"] == first["cost"]
    assert cloud.asked == [("look", "rl-7")]


def test_an_end_is_not_noted_of_a_launch_that_came_later(cloud: Pretended) -> None:
    run = carried("stopped")
    before = Handle.of(run)
    Handle("sky", "rl-8").write(run)
    cloud.seen = Seen("ended")
    assert backends.look(run, before).phase == "ended"
    assert Handle.of(run).ended is None


def test_a_backend_that_fails_hides_no_other_run(
    cloud: Pretended, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run()
    lost = carried("running", backend="teleport")
    assert runs.status(None, "json") == 0
    told = {one["id"]: one for one in json.loads(capsys.readouterr().out)}
    assert told[lost.id]["status"] == "damaged" and "no backend 'teleport'" in told[lost.id]["reason"]


def test_down_says_what_it_cannot_reach_and_may_be_repeated(
    cloud: Pretended, capsys: pytest.CaptureFixture[str]
) -> None:
    run = carried("running")
    cloud.unreached = ["cluster rl-7: the API server does not answer"]
    assert main(["down", run.id]) == 1
    assert "not reached: cluster rl-7: the API" in capsys.readouterr().err
    assert run.state().status == "running" and Handle.of(run).ended is None
    cloud.unreached = []
    for _ in range(2):
        assert main(["down", run.id]) == 0
        assert f"run {run.id} was stopped by `stackrl down`" in capsys.readouterr().err
    assert run.state().status == "stopped" and Handle.of(run).ended is not None
    assert [ask[0] for ask in cloud.asked] == ["down"] * 3


def test_down_keeps_the_end_that_the_run_has_written(cloud: Pretended) -> None:
    run = carried("finished")
    assert main(["down", run.id]) == 0
    assert run.state().status == "finished" and Handle.of(run).ended is not None


def test_a_command_is_run_on_a_node_with_its_own_options(cloud: Pretended) -> None:
    run = carried("running")
    assert main(["exec", run.id, "--node", "3", "--", "nvidia-smi", "-l", "--node", "1"]) == 9
    assert cloud.asked == [("execute", "rl-7", ["nvidia-smi", "-l", "--node", "1"], 3)]
    assert main(["exec", run.id]) == 2


def test_a_command_here_has_the_runs_folder_and_environment(
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = make_run()
    run.write("run.json", run.read("run.json") | {"environment": {"MODE": "7"}})
    shows = "import os; print(os.getcwd(), os.environ['MODE']); raise SystemExit(5)"
    assert main(["exec", run.id, "--", sys.executable, "-c", shows]) == 5
    assert capfd.readouterr().out == f"{run.path} 7\n"
    with pytest.raises(RunError, match="--node 0"):
        runs.execute(run.id, ["true"], 1)


def test_logs_of_other_machines_are_passed_through(
    cloud: Pretended, capsys: pytest.CaptureFixture[str]
) -> None:
    run = carried("running")
    cloud.lines = "(trainer) step 3"
    assert main(["logs", run.id]) == 0
    assert capsys.readouterr().out == "(trainer) step 3\n"


def test_the_ports_of_a_run_elsewhere_are_asked_there(
    cloud: Pretended, capsys: pytest.CaptureFixture[str]
) -> None:
    run = carried("running")
    assert main(["ports", run.id]) == 2
    assert f"`stackrl exec {run.id} -- stackrl ports {run.id}`" in capsys.readouterr().err
    cloud.seen = Seen("ended")
    assert main(["ports", run.id]) == 2
    assert "is not running" in capsys.readouterr().err


def test_followed_logs_end_with_the_machines(cloud: Pretended, capsys: pytest.CaptureFixture[str]) -> None:
    run = carried("running")
    run.logs(0).mkdir(parents=True)
    (run.logs(0) / "trainer-0.log").write_text("step 3\n")
    cloud.seen = Seen("ended")
    assert main(["logs", "-f", run.id]) == 0
    assert capsys.readouterr().out == "trainer-0 | step 3\n"


def test_a_run_of_this_machine_has_a_handle_and_one_without_is_of_this_machine() -> None:
    run = make_run()
    assert Handle.of(run) == Handle("local", hourly=0.0)
    run.write(FILE, {"backend": "local", "mood": "good"})
    assert Handle.of(run) == Handle("local")


@pytest.mark.slow
def test_a_run_of_another_machine_with_the_same_home_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(process("orchestrator", SERVES))
    Handle("local", hourly=0.0, details={"host": "elsewhere"}).write(run)
    node = start_node(run)
    wait_until(lambda: run.state().status == "running")
    assert status_of(run) == "running"
    assert main(["down", run.id]) == 1
    assert f"type `stackrl down {run.id}` there" in capsys.readouterr().err
    assert main(["exec", run.id, "--", "true"]) == 2
    assert "is on elsewhere" in capsys.readouterr().err
    Handle("local", hourly=0.0).write(run)
    assert main(["down", run.id]) == 0 and node.wait(timeout=30) == 1

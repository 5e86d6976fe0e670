"""The view is a pure function of what was read: fixed records, fixed screens."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from fake_roles import make_run, stack
from rich.console import Console

from stackrl.runtime.launch.handle import Handle
from stackrl.runtime.monitor.doings import Doing, read_doings
from stackrl.runtime.monitor.figures import count, curve, number, resampled
from stackrl.runtime.monitor.records import History, Reader, Tail
from stackrl.runtime.monitor.view import follow, plain, render, told, told_change
from stackrl.runtime.run import State

GOLDEN = Path(__file__).with_name("golden")
BEGAN = 1_000_000.0
WIDTH = 100


def supervised(index: int) -> dict[str, Any]:
    return {
        "time": BEGAN + index,
        "kind": "supervised",
        "stage": "warmup",
        "stage_step": index,
        "stage_steps": 20,
        "index": index,
        "step": 0,
        "seconds_step": 0.5,
        "seconds_rollouts_wait": 0.0,
        "engine_busy": 0.0,
        "tokens_per_second": 3200.0,
        "trainer/loss": 4 - index / 8,
        "trainer/gradient_norm": 1.0,
        "trainer/learning_rate": 1e-3,
    }


def reinforced(step: int) -> dict[str, Any]:
    return {
        "time": BEGAN + 20 + step,
        "kind": "rl",
        "stage": "main",
        "stage_step": step,
        "stage_steps": 60,
        "index": 20 + step,
        "step": step,
        "seconds_step": 1.0,
        "seconds_rollouts_wait": 0.25,
        "engine_busy": 0.9,
        "tokens_per_second": 2100.0,
        "reward": 0.3 + step / 100,
        "reward_std": 0.2,
        "solved": 0.1,
        "staleness_mean": 0.8,
        "staleness_max": 1,
        "dropped": 1 if step == 3 else 0,
        "trainer/loss": -0.0123,
        "trainer/gradient_norm": 0.8,
        "trainer/learning_rate": 1e-4,
        "trainer/entropy": 1.2,
        "trainer/mismatch_kl": 1.2e-7,
        "trainer/ratio_max": 1.01,
        "trainer/capped": 0.0,
    }


def evaluated(when: str, reward: float) -> dict[str, Any]:
    return {
        "time": BEGAN + 21,
        "event": "evaluated",
        "stage": "main",
        "when": when,
        "version": "1.0",
        "reward": reward,
        "exact": 0.1,
        "greedy_reward": reward + 0.1,
        "greedy_exact": 0.2,
        "prompts": 256,
        "failed": 0,
    }


def history(*steps: dict[str, Any], status: str = "running") -> History:
    roles = {"engine-0": "running", "trainer-0": "running"}
    return History("fake-run", stack(), State(status, attempt=2, began=BEGAN, roles=roles), list(steps))


def test_the_title_tells_what_the_machines_have_cost() -> None:
    """Hours of work times their price, beside the limit; nothing where they cost nothing."""
    spends = History("run", stack(limits={"cost": 50}), State("running", began=BEGAN, used=7200.0))
    assert "$" not in screen(spends)
    spends.handle = Handle("slurm", hourly=3.0)
    assert "running · 1:30 · $6.00 of $50.00 ─" in screen(spends)
    spends.handle = Handle("sky", submitted=BEGAN + 89)
    assert "· unknown of $50.00 ─" in screen(spends)


def screen(history: History) -> str:
    console = Console(width=WIDTH, file=io.StringIO(), force_terminal=False, legacy_windows=False)
    console.print(render(history, BEGAN + 90, WIDTH))
    return console.file.getvalue()


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.localtime", __import__("time").gmtime)


WARMUP = [supervised(index) for index in range(20)]
SCREENS = {
    "starting": history(status="starting"),
    "warmup": history(*WARMUP[:12]),
    "rl": history(*WARMUP, *(reinforced(step) for step in range(34))),
}
SCREENS["rl"].add(
    [],
    [
        {"time": BEGAN + 20, "event": "stage_started", "stage": "main", "kind": "rl", "step": 0, "steps": 60},
        evaluated("before", 0.3),
        {"time": BEGAN + 22, "event": "weights_updated", "version": "1.1", "seconds": 0.1},
        {"time": BEGAN + 23, "event": "dropped", "reason": "stale", "rollouts": 8},
    ],
)


@pytest.mark.parametrize("name", SCREENS)
def test_screen(name: str) -> None:
    assert screen(SCREENS[name]) == (GOLDEN / f"{name}.txt").read_text()


def test_plain_lines() -> None:
    shown = history(*WARMUP, reinforced(0), reinforced(1))
    assert plain(shown, shown.steps[-1]) == (
        "main 2/60        reward 0.310 ±0.20  solved 10 %  staleness 0.8 (max 1)  mismatch 1.2e-07  "
        "trainer waits for rollouts 25 %  engines wait for the trainer 10 %  2.1k tokens/s  "
        "stage ends in 0:58"
    )
    assert plain(shown, WARMUP[3]) == "warmup 4/20      loss 3.625  3.2k tokens/s"


def test_steps_that_the_trainer_skipped_are_shown() -> None:
    assert "skipped" not in screen(history(reinforced(0)))
    assert "1 steps whose gradient" in screen(history(reinforced(0) | {"trainer/skipped": 1.0}))


def test_experts_are_shown_where_there_are_some() -> None:
    assert "experts" not in screen(history(reinforced(0)))
    told = {"load_imbalance": 1.5, "load_imbalance/3": 1.5, "router_confidence": 0.25, "routes_replayed": 0.9}
    shown = screen(history(reinforced(0) | {f"trainer/{name}": value for name, value in told.items()}))
    assert "the busiest has 1.50 × the mean load" in shown
    assert "router confidence 0.25" in shown and "replayed 90 %" in shown


def test_the_loss_of_held_out_rows_is_shown_where_it_was_measured() -> None:
    measured = supervised(3) | {"trainer/validation_loss": 2.5}
    steps = [supervised(2), measured, supervised(4)]
    assert "loss 3.625  of held-out rows 2.500" in plain(history(*steps[:2]), measured)
    assert "held-out" not in plain(history(*steps), steps[2])
    assert "loss 3.625, of held-out rows 2.500" in screen(history(*steps))
    ready = {
        "time": BEGAN,
        "event": "data_ready",
        "stage": "warmup",
        "part": "learnt",
        "rows": 40,
        "dropped": 2,
    }
    assert told(ready | {"tokens": 12_300, "learnt": 410}) == (
        "stage warmup has 40 rows of 12.3k tokens, 410 of them learnt, 2 too long and dropped"
    )


def test_follow_without_a_terminal_prints_stages_every_tenth_step_and_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path))
    run = make_run()
    run.write_state(State("finished", attempt=1))
    steps = [*WARMUP, *(reinforced(step) for step in range(12))]
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    run.events.write_text(json.dumps(evaluated("before", 0.3)) + "\n" + '{"torn": ')
    output = io.StringIO()
    read = follow(run, lambda: False, Console(file=output, width=40))
    assert [line.split("  ")[0] for line in output.getvalue().splitlines()] == [
        f"run {run.id} is finished",
        "warmup 1/20",
        "warmup 11/20",
        "warmup 20/20",
        "main 1/60",
        "evaluated before main",
        "main 11/60",
    ]
    later = io.StringIO()
    follow(run, lambda: False, Console(file=later, width=40), since=BEGAN + 30)
    assert later.getvalue().startswith("main 11/60") and later.getvalue().count("\n") == 1
    assert read.done == 32 and read.evaluations["main"]["before"]["reward"] == 0.3


def test_follow_on_a_terminal_redraws_one_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path))
    run = make_run()
    run.metrics.write_text(json.dumps(reinforced(0)) + "\n")
    output = io.StringIO()
    follow(run, lambda: False, Console(file=output, width=WIDTH, force_terminal=True, legacy_windows=False))
    shown = output.getvalue()
    assert run.id in shown and "reward 0.300" in shown and "▁" in shown
    assert "\x1b[1A" in shown  # the cursor goes up to draw over the last screen


def test_a_record_with_gaps_is_shown_with_dashes() -> None:
    bare = {
        key: reinforced(0)[key] for key in ("time", "kind", "stage", "stage_step", "stage_steps", "index")
    }
    shown = history(bare)
    assert "–" in screen(shown) and "reward –" in plain(shown, bare)


def test_tail_reads_each_line_once_and_waits_for_torn_ones(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    tail = Tail(file)
    assert tail.read() == []
    file.write_text('{"a": 1}\n{"a"')
    assert tail.read() == [{"a": 1}]
    with open(file, "a") as more:
        more.write(": 2}\n")
    assert tail.read() == [{"a": 2}]
    assert tail.read() == []


def test_a_resumed_run_repeats_steps_and_the_newer_count() -> None:
    shown = history(*(reinforced(step) for step in range(5)))
    shown.add([reinforced(3) | {"reward": 0.9}])
    assert [step["index"] for step in shown.steps] == [20, 21, 22, 23]
    assert shown.steps[-1]["reward"] == 0.9


def test_time_left_of_stage_and_run() -> None:
    assert history().seconds_left() == (None, None)
    shown = history(*WARMUP[:10])
    assert shown.seconds_left() == (5.0, None)  # nobody knows yet how long an RL step takes
    shown.add([*WARMUP[10:], reinforced(0)])
    assert shown.seconds_left() == (59.0, 59.0)


def test_gains_compare_first_and_last_steps_of_each_rl_stage() -> None:
    ((stage, before, after),) = history(*(reinforced(step) for step in range(40))).gains()
    assert stage == "main"
    assert (before, after) == (pytest.approx(0.345), pytest.approx(0.645))


def test_what_evaluations_changed() -> None:
    shown = history()
    assert told_change(shown.evaluations) == ""
    shown.add([], [evaluated("before", 0.3), evaluated("after", 0.8)])
    assert told_change(shown.evaluations["main"]).startswith(
        "reward 0.300 → 0.800, greedy reward 0.400 → 0.900"
    )


def test_a_run_that_goes_on_says_from_where() -> None:
    resumed = {"time": 0, "event": "resumed", "from": "", "index": 0, "damaged": []}
    assert told(resumed) == "no checkpoint to go on from: the run begins again at step 1"
    resumed |= {"from": "c/step-000050", "index": 50, "damaged": ["c/step-000100.damaged"]}
    assert told(resumed) == "goes on at step 51 from c/step-000050; damaged: c/step-000100.damaged"


def test_a_change_of_the_engines_is_a_sentence() -> None:
    scaled = {"time": 0, "event": "scaled", "pool": "decode", "before": 3, "after": 1}
    scaled |= {"joins": [], "leaves": ["engine-1", "engine-2"]}
    assert told(scaled) == "decode 3 → 1 engines: engine-1 leaves, engine-2 leaves"


def test_events_cannot_move_the_cursor() -> None:
    assert told({"time": 0, "event": "checkpoint", "path": "a\x1b[2Jb\r"}) == "checkpoint  path ab"


def test_figures() -> None:
    assert curve([0, 1, 2, 3], width=10, height=1) == ["▁▃▆█"]
    assert curve([0, 8], width=10, height=2) == [" █", "▁█"]
    assert curve([5, 5], width=10, height=1) == ["▁▁"]
    assert curve([], width=10, height=2) == ["", ""]
    assert resampled([1, 3, 5, 7], 2) == [2, 6]
    assert [number(0.6134), number(1.2e-6), number(None), number(0)] == ["0.613", "1.2e-06", "–", "0.000"]
    assert [count(980), count(2100), count(3.4e6)] == ["980", "2.1k", "3.4M"]


def test_reader_follows_the_files_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path))
    run = make_run()
    reader = Reader(run)
    assert reader.read() == ([], [])
    run.metrics.write_text(json.dumps(reinforced(0)) + "\n")
    run.write_state(State("running", attempt=1))
    assert len(reader.read()[0]) == 1
    assert reader.history.state.status == "running" and reader.history.done == 21


def test_a_dumb_terminal_gets_plain_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "dumb")
    run = make_run()
    run.metrics.write_text(json.dumps(supervised(0)) + "\n")
    screen = io.StringIO()
    follow(run, lambda: False, Console(file=screen, force_terminal=True, width=WIDTH))
    assert "warmup 1/20" in screen.getvalue() and "╭" not in screen.getvalue()


def test_what_processes_do_is_shown_and_those_that_do_the_same_are_counted() -> None:
    shown = history(reinforced(0))
    ranks = {f"trainer-{rank}": "running" for rank in range(8)}
    shown.state.roles = {"engine-0": "restarting (2 of 5)", "orchestrator": "running", **ranks}
    waits = Doing("waiting for rollouts of step 3", BEGAN)
    shown.doings = {"orchestrator": waits, **{rank: Doing("waiting for batch 3", BEGAN) for rank in ranks}}
    text = screen(shown)
    for phrase in (
        "engine-0 restarting (2 of 5)",
        "orchestrator waiting for rollouts of step 3",
        "trainer ×8 waiting for batch 3",
    ):
        assert f"│ {phrase} " in text


def test_the_heartbeat_that_spoke_last_speaks_for_its_process(tmp_path: Path) -> None:
    for name, doing, since in (
        ("engine-0.11", "starting", 9.0),
        ("engine-0.12", "loading", 5.0),
        ("trainer-0.13", "step 3", 1.0),
    ):
        (tmp_path / name).write_text(json.dumps({"doing": doing, "since": since}))
    (tmp_path / "trainer-1.14").write_text('{"doing": ')
    assert read_doings(tmp_path) == {"engine-0": Doing("loading", 5.0), "trainer-0": Doing("step 3", 1.0)}


def test_processes_that_were_restarted_together_are_one_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path))
    run = make_run()
    why = {"event": "restarted", "reason": "trainer-1 was killed by SIGKILL", "count": 2, "incarnation": 3}
    names = ("trainer-0", "trainer-1", "orchestrator")
    events = [{"time": BEGAN + n, "process": name, **why} for n, name in enumerate(names)]
    events.append({**events[-1], "process": "engine-0", "reason": "engine-0 was killed", "count": 1})
    run.events.write_text("".join(json.dumps(event) + "\n" for event in events))
    reader = Reader(run)
    _, [together, alone] = reader.read()
    assert told(together) == (
        "trainer-0, trainer-1, orchestrator started again (2 in a row): trainer-1 was killed by SIGKILL"
    )
    assert told(alone) == "engine-0 started again: engine-0 was killed"
    assert reader.history.restarts == 2 and "· 2 restarts ·" in screen(reader.history)


def test_steps_behind_the_checkpoint_are_forgotten_when_a_run_goes_on_from_it() -> None:
    shown = history(*(reinforced(step) for step in range(6)))
    resumed = {"event": "resumed", "from": "c", "index": 22, "damaged": [], "time": BEGAN + 40}
    shown.add([], [resumed])
    assert [record["index"] for record in shown.steps] == [20, 21]
    shown.add([reinforced(2) | {"time": BEGAN + 50}], [resumed])
    assert [record["index"] for record in shown.steps] == [20, 21, 22]


def test_a_line_that_was_cut_short_hides_no_other(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"index": 0}\n{"ind\n{"index": 1}\n{"index"')
    assert Tail(file).read() == [{"index": 0}, {"index": 1}]

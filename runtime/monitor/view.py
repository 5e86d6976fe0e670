"""The live view of a run: one screen that is redrawn on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stackrl.runtime.launch import money
from stackrl.runtime.monitor.doings import grouped
from stackrl.runtime.monitor.figures import count, curve, number, share
from stackrl.runtime.monitor.lines import duration, printable
from stackrl.runtime.monitor.records import History, Reader, Record
from stackrl.runtime.run import RunFolder

_STEPS_PER_LINE = 10
_CURVE_HEIGHT = 4
_SHOWN_EVENTS = 6
_POLL_SECONDS = 0.5
_BEGINS_AGAIN = "no checkpoint to go on from: the run begins again at step 1"


def follow(run: RunFolder, goes_on: Callable[[], bool], console: Console, since: float = 0.0) -> History:
    """Show the run until ``goes_on`` is false; what was read of it.

    Plain lines leave out what was before ``since`` (seconds since the epoch), told by an earlier attempt.
    """
    reader = Reader(run)
    if console.is_terminal and not console.is_dumb_terminal:  # a dumb one cannot be redrawn
        _redraw(reader, goes_on, console)
    else:
        _print_lines(reader, goes_on, console, since)
    return reader.history


def _redraw(reader: Reader, goes_on: Callable[[], bool], console: Console) -> None:
    with Live(console=console, auto_refresh=False, transient=False) as live:
        size = console.size
        for _ in _readings(goes_on):
            reader.read()
            if console.size != size:  # the lines of the last screen may have been broken anew
                size = console.size
                console.clear()
            live.update(render(reader.history, time.time(), console.width), refresh=True)


def _print_lines(reader: Reader, goes_on: Callable[[], bool], console: Console, since: float) -> None:
    status = ""
    for _ in _readings(goes_on):
        steps, events = reader.read()
        state = reader.history.state
        if state.began >= since and state.status != status:
            status = state.status
            _print(console, f"run {reader.history.run} is {status}")
        new = [record for record in steps + events if record["time"] >= since]
        for record in sorted(new, key=lambda record: record["time"]):
            if text := told(record) if "event" in record else _every_tenth(reader.history, record):
                _print(console, text)


def _every_tenth(history: History, record: Record) -> str:
    """A line for every tenth step of a stage, its last one, and those with a loss of held-out rows."""
    last = record["stage_step"] + 1 == record["stage_steps"]
    measured = record.get("trainer/validation_loss") is not None
    regular = record["stage_step"] % _STEPS_PER_LINE == 0
    return plain(history, record) if last or measured or regular else ""


def _readings(goes_on: Callable[[], bool]) -> Iterable[None]:
    """One reading at a time, the last one after the end, so that nothing is missed."""
    while goes_on():
        yield
        time.sleep(_POLL_SECONDS)
    yield


def _print(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def plain(history: History, record: Record) -> str:
    """One step as a line."""
    oldest = number(record.get("staleness_max"), 0)
    step = f"{record['stage']} {record['stage_step'] + 1}/{record['stage_steps']}"
    if record["kind"] == "supervised":
        facts = [f"loss {number(record.get('trainer/loss'))}"]
        if (held_out := record.get("trainer/validation_loss")) is not None:
            facts.append(f"of held-out rows {number(held_out)}")
    else:
        facts = [
            f"reward {number(record.get('reward'))} ±{number(record.get('reward_std'), 2)}",
            f"solved {share(record.get('solved'))}",
            f"staleness {number(record.get('staleness_mean'), 1)} (max {oldest})",
            f"mismatch {number(record.get('trainer/mismatch_kl'))}",
            *waits(history),
        ]
    facts.append(f"{count(record.get('tokens_per_second'))} tokens/s")
    stage_left, _ = history.seconds_left()
    if stage_left and record is history.steps[-1]:
        facts.append(f"stage ends in {duration(stage_left)}")
    return f"{step:<16} " + "  ".join(facts)


def render(history: History, now: float, width: int) -> RenderableType:
    """The whole screen. Pure: the same history, time and width give the same screen."""
    parts: list[RenderableType] = [_progress(history, width), Text()]
    if history.steps:
        parts += [*_curve(history, width), Text(), _facts(history)]
    else:
        parts += [Text("waiting for the first step", style="dim")]
    parts += _roles(history)
    if events := [(event["time"], text) for event in history.events if (text := told(event))]:
        parts.append(Text())
        parts += [_event(at, text) for at, text in events[-_SHOWN_EVENTS:]]
    state = history.state
    elapsed = duration((state.ended or now) - state.began) if state.began else "0:00"
    attempt = f" · attempt {state.attempt}" if state.attempt > 1 else ""
    restarts = f" · {history.restarts} restart{'s' * (history.restarts > 1)}" if history.restarts else ""
    return Panel(
        Group(*parts),
        title=f"[bold]{history.run}[/] · {state.status}{attempt}{restarts} · {elapsed}{_cost(history, now)}",
        title_align="left",
        border_style={"failed": "red", "finished": "green", "stopped": "yellow"}.get(state.status, "cyan"),
        padding=(0, 1),
    )


def _cost(history: History, now: float) -> str:
    """What the machines have cost so far, and may cost; nothing where nobody asks for money."""
    cost = money.told(money.cost_so_far(history.state, history.handle, now), history.handle.hourly)
    limit = history.stack.limits.cost
    return f" · {cost}{f' of {money.dollars(limit)}' if limit else ''}" if cost else ""


def _progress(history: History, width: int) -> RenderableType:
    """Stage and run: bar, steps, time left."""
    grid = Table.grid(padding=(0, 2))
    bar = max(10, width - 56)
    stage_left, run_left = history.seconds_left()
    if history.steps:
        newest = history.steps[-1]
        names = [stage.name for stage in history.stack.stages]
        place = f"stage {names.index(newest['stage']) + 1} of {len(names)}: {newest['stage']}"
        done, steps = newest["stage_step"] + 1, newest["stage_steps"]
        grid.add_row(place, ProgressBar(steps, done, width=bar), f"{done}/{steps}", _left(stage_left))
    grid.add_row(
        "run",
        ProgressBar(history.total, history.done, width=bar),
        f"{history.done}/{history.total}",
        _left(run_left),
    )
    return grid


def _left(seconds: float | None) -> str:
    return "" if not seconds else f"{duration(seconds)} left"


def _curve(history: History, width: int) -> list[RenderableType]:
    """The reward of all RL steps so far, or, before the first of them, the loss."""
    rewards = history.values("reward", [record for record in history.steps if record["kind"] == "rl"])
    name, values = ("reward", rewards) if rewards else ("loss", history.values("trainer/loss"))
    if not values:
        return []
    lines = curve(values, max(10, width - 24), _CURVE_HEIGHT)
    labels = [""] * _CURVE_HEIGHT
    labels[0], labels[-1] = number(max(values)), number(min(values))
    grid = Table.grid(padding=(0, 1))
    for place, (label, line) in enumerate(zip(labels, lines, strict=True)):
        title = f"{name} {number(history.now('reward' if rewards else 'trainer/loss'))}" if place == 0 else ""
        grid.add_row(
            Text(f"{title:<13}", style="bold"), Text(f"{label:>6}", style="dim"), Text(line, style="green")
        )
    return [grid]


def _facts(history: History) -> RenderableType:
    """What a person looks at to see whether all is well; means over the newest steps of the stage."""
    now = history.now
    grid = Table.grid(padding=(0, 2))
    if history.steps[-1]["kind"] == "rl":
        gains = ", ".join(f"{stage} {before:.2f} → {after:.2f}" for stage, before, after in history.gains())
        grid.add_row("gain", f"{gains}   solved {share(now('solved'))}")
        grid.add_row(
            "staleness",
            f"{number(now('staleness_mean'), 2)} steps on average, "
            f"{number(history.steps[-1].get('staleness_max'), 0)} at most   "
            f"dropped {number(sum(history.values('dropped')), 0)}",
        )
        grid.add_row(
            "mismatch",
            f"KL {number(now('trainer/mismatch_kl'))} from engine to trainer, staleness included   "
            f"ratio ≤ {number(now('trainer/ratio_max'), 2)}   capped {share(now('trainer/capped'))}",
        )
        grid.add_row("waiting", "   ".join(waits(history)) or "–")
    grid.add_row(
        "trainer",
        f"loss {number(now('trainer/loss'))}{_held_out(history)}   "
        f"gradient {number(now('trainer/gradient_norm'), 2)}   entropy {number(now('trainer/entropy'), 2)}   "
        f"rate {number(now('trainer/learning_rate'), 4)}",
    )
    if skipped := sum(history.values("trainer/skipped")):
        grid.add_row("skipped", f"{skipped:.0f} steps whose gradient was not finite")
    if (imbalance := now("trainer/load_imbalance")) is not None:
        grid.add_row(
            "experts",
            f"the busiest has {number(imbalance, 2)} × the mean load   "
            f"router confidence {number(now('trainer/router_confidence'), 2)}   "
            f"replayed {share(now('trainer/routes_replayed'))}",
        )
    per_step = history.seconds_per_step(history.steps[-1]["kind"])
    grid.add_row(
        "speed",
        f"{count(now('tokens_per_second'))} tokens/s, generated and trained, over all devices   "
        f"{number(per_step, 2)} s a step",
    )
    return grid


def _held_out(history: History) -> str:
    """The newest loss of held-out rows in the current stage, where there are any."""
    values = history.values("trainer/validation_loss", history.of_stage(history.steps[-1]["stage"]))
    return f", of held-out rows {number(values[-1])}" if values else ""


def waits(history: History) -> list[str]:
    """Who waits for whom: shares of the time."""
    waited, step, busy = (
        history.now(key) for key in ("seconds_rollouts_wait", "seconds_step", "engine_busy")
    )
    found = []
    if waited is not None and step:
        found.append(f"trainer waits for rollouts {share(min(1.0, waited / step))}")
    if busy is not None:
        found.append(f"engines wait for the trainer {share(1 - busy)}")
    return found


def _roles(history: History) -> list[RenderableType]:
    """What each process does, while there is anything to tell: before the first step, where one does not
    run, and wherever they say it themselves."""
    states = history.state.roles
    ended = history.state.ended is not None
    if ended or (history.steps and not history.doings and set(states.values()) <= {"running", "done"}):
        return []
    return [Text(phrase, style="dim") for phrase in grouped(states, history.doings)]


def _event(at: float, text: str) -> Text:
    return Text.assemble(
        (time.strftime("%H:%M:%S  ", time.localtime(at)), "dim"), text, overflow="ellipsis", no_wrap=True
    )


def told(event: Record) -> str:
    """An event as a line; nothing for updates of weights and for drops, which come with the steps."""
    name = event["event"]
    if name == "weights_updated" or (name == "dropped" and event["reason"] != "failed"):
        return ""
    if name == "stage_started":
        return (
            f"stage {event['stage']} begins at step {event['step'] + 1} of {event['steps']} ({event['kind']})"
        )
    if name == "restarted":
        times = f" ({event['count']} in a row)" if event["count"] > 1 else ""
        return printable(f"{event['process']} started again{times}: {event['reason']}")
    if name == "scaled":
        names = [f"{one} joins" for one in event["joins"]] + [f"{one} leaves" for one in event["leaves"]]
        return f"{event['pool']} {event['before']} → {event['after']} engines: {', '.join(names)}"
    if name == "stopping":
        return printable(f"stopping: {event['reason']}{'; a checkpoint is made first' * event['saves']}")
    if name == "data_ready":
        held_out = "" if event["part"] == "learnt" else " to hold out"
        dropped = f", {event['dropped']} too long and dropped" if event["dropped"] else ""
        return (
            f"stage {event['stage']} has {event['rows']} rows{held_out} of {count(event['tokens'])} tokens, "
            f"{count(event['learnt'])} of them learnt{dropped}"
        )
    if name == "engines_awaited":
        return "waiting for the engines to start"
    if name == "resumed":
        where = _BEGINS_AGAIN
        if event["from"]:
            where = f"goes on at step {event['index'] + 1} from {event['from']}"
        damaged = f"; damaged: {', '.join(event['damaged'])}" if event["damaged"] else ""
        return printable(where + damaged)
    if name == "evaluated":
        return (
            f"evaluated {event['when']} {event['stage']}  reward {number(event['reward'])} "
            f"(greedy {number(event['greedy_reward'])}), exact {share(event['exact'])} "
            f"(greedy {share(event['greedy_exact'])})"
        )
    fields = [
        f"{key.replace('_', ' ')} {_field(value)}"
        for key, value in event.items()
        if key not in ("time", "event")
    ]
    return printable(f"{name.replace('_', ' ')}  {', '.join(fields)}").rstrip()


def told_change(evaluations: dict[str, Record]) -> str:
    """What a stage changed, from its evaluations before and after; nothing where one is missing."""
    if not {"before", "after"} <= evaluations.keys():
        return ""
    before, after = evaluations["before"], evaluations["after"]
    return ", ".join(
        f"{key.replace('_', ' ')} {before[key]:.3f} → {after[key]:.3f}"
        for key in ("reward", "greedy_reward", "exact", "greedy_exact")
    )


def _field(value: Any) -> str:
    return number(value) if isinstance(value, float) else str(value)

"""Recovery trials: a run with real orchestrator, agent, journal and trainer loop is killed at chosen calls.

The engine and the arithmetic of the trainer are light (engine_process.py, light_trainer.py), so that a whole
run takes seconds. A run whose agent was killed is started again as a person would start it.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import crashing
import pytest
from crashing import Crash
from fake_roles import wait_until
from forked import Started, Starter
from light_trainer import recompute
from small_runs import lines

from stackrl.runtime import checkpoints
from stackrl.runtime.launch.audit import Audit, audit
from stackrl.runtime.launch.planning.plan import Plan, Process
from stackrl.runtime.run import RunFolder, create_run
from stackrl.schemas.degrees import degrees_of
from stackrl.schemas.loader import LoadedStack
from stackrl.schemas.stack import Stack

HERE = Path(__file__).parent
TOKEN = "the-token-of-the-recovery-trials"
LIMIT = 240.0
"""Seconds for a whole trial."""
LIVES = 8
"""Starts of the node program, at most."""
SUPERVISED, RL = 2, 7
RANKS, ENGINES = 2, 2
PROGRAMS = (
    "engine_process",
    "light_trainer",
    "stackrl.runtime.node",
    "stackrl.runtime.orchestrator.loop",
    "transformers.tokenization_utils_tokenizers",
)
"""What the processes of a run import."""


def stages(rl: int = RL) -> list[dict[str, Any]]:
    """What a trial trains; ``rl``: its steps of reinforcement learning."""
    return [
        {"name": "warmup", "type": "supervised", "steps": SUPERVISED, "batch_size": 4},
        {"name": "main", "type": "rl", "steps": rl},
    ]


STACK: dict[str, Any] = {
    "version": 1,
    "seed": 5,
    "device": "cpu",
    "model": {"init": "random", "architecture": "qwen3"},
    "roles": {"trainer": {"processes": RANKS}, "inference": {"processes": ENGINES}},
    "trainer": {"sequence_length": 128},
    "inference": {"max_model_length": 128},
    "environments": [{"name": "reverse", "type": "reverse_text", "args": {"letters": [3, 6]}}],
    "sampling": {"max_tokens": 9, "timeout": 20.0},
    "algorithm": {"group_size": 3, "batch_size": 9, "max_staleness": 1},
    "evaluate": {"prompts": 4},
    "checkpoint": {"every": 3, "keep": 2},
    "limits": {"silence_seconds": 20, "restarts": 6, "stop_seconds": 20},
    "stages": stages(),
}

_JOURNAL = "stackrl.runtime.orchestrator.journal:Journal."
_CHECKPOINTS = "stackrl.runtime.checkpoints:"
_SERVER = "stackrl.runtime.transport.batches:BatchServer."
ORCHESTRATOR_CALLS = {
    _JOURNAL + "plan": 24,
    _JOURNAL + "finish": 60,
    _JOURNAL + "seal": SUPERVISED + RL,
    _JOURNAL + "apply": SUPERVISED + RL,
    _JOURNAL + "make_durable": 3,
    _JOURNAL + "snapshot": 3,
    _CHECKPOINTS + "write_manifest": 3,
    _CHECKPOINTS + "prune": 3,
    _SERVER + "offer": SUPERVISED + RL,
    _SERVER + "applied": SUPERVISED + RL,
}
"""Calls that change the books or hand something over, and how often a run makes them at least."""
TRAINER_CALLS = {
    "light_trainer:LightLearner.apply": SUPERVISED + RL,
    "light_trainer:LightLearner.publish": RL,
    "light_trainer:write_part": 3,
    "stackrl.runtime.transport.batch_client:BatchClient.fetch": SUPERVISED + RL,
    "stackrl.runtime.transport.batch_client:BatchClient.ack": SUPERVISED + RL,
}
ENGINE_CALLS = {
    "engine_process:EngineServer.generate": 40,
    "engine_process:EngineServer.update_weights": RL,
    "engine_process:EngineServer.finish_weight_update": RL,
}


def draw_crashes(rng: Random) -> list[Crash]:
    """One to three crashes of any roles, anywhere in the run."""
    return [_draw_crash(rng) for _ in range(rng.randint(1, 3))]


def _draw_crash(rng: Random) -> Crash:
    kind = rng.choice(["orchestrator", "orchestrator", "trainer", "engine", "node"])
    if kind == "trainer":
        process, calls = f"trainer-{rng.randrange(RANKS)}", TRAINER_CALLS
    elif kind == "engine":
        process, calls = f"engine-{rng.randrange(ENGINES)}", ENGINE_CALLS
    else:
        process, calls = "orchestrator", ORCHESTRATOR_CALLS
    function = rng.choice(list(calls))
    return Crash(
        process=process,
        function=function,
        when=rng.choice(["before", "after"]),
        count=rng.randint(1, calls[function]),
        victim=rng.choice(["agent", "guard"]) if kind == "node" else "itself",
    )


def planned(loaded: LoadedStack) -> Plan:
    """The light roles of these trials, as a planner gives them."""
    ranks = loaded.stack.roles.trainer.processes
    return Plan(
        name=loaded.name,
        device="cpu",
        nodes=1,
        gpus_per_node=0,
        accelerator="",
        parallel=degrees_of(loaded.stack, ranks),
        tensor_parallel=1,
        processes=processes_of(loaded.stack),
    )


def make_run(folder: Path, model: Path, crashes: list[Crash], **changes: Any) -> RunFolder:
    """A run in STACKRL_HOME whose roles are armed with ``crashes``. ``model``: a folder with a tokenizer."""
    source = folder / "trial.yaml"
    source.write_text("name: trial\n")
    stack = Stack.model_validate(STACK | changes)
    plan = {"processes": [asdict(process) for process in processes_of(stack)]}
    run = create_run("trial", source, "hash", stack, plan)
    run.model.symlink_to(model)
    crashing.write(run.path, crashes)
    return run


def processes_of(stack: Stack) -> list[Process]:
    def command(file: str, *arguments: str) -> tuple[str, ...]:
        return (str(HERE / file), *arguments)

    ranks, engines = stack.roles.trainer.processes, stack.roles.inference.processes
    trainers = [
        Process(
            role="trainer",
            index=rank,
            node=0,
            pool="trainer",
            command=command("light_trainer.py", "RUN"),
            environment={"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)},
        )
        for rank in range(ranks)
    ]
    servers = [
        Process(
            role="engine",
            index=index,
            node=0,
            pool="inference",
            command=command("engine_process.py", "RUN", "--engine", str(index)),
        )
        for index in range(engines)
    ]
    orchestrator = Process(
        role="orchestrator",
        index=0,
        node=0,
        pool="trainer",
        command=command("crashing.py", "orchestrator", "RUN"),
    )
    return [*trainers, *servers, orchestrator]


@cache
def _starter() -> Starter:
    return Starter(HERE, *PROGRAMS)


def start(run: RunFolder, **environment: str) -> Started:
    """The node program of ``run``, with the crashes of its own."""
    return _starter().start(
        [str(HERE / "crashing.py"), "node", str(run.path)],
        {**os.environ, "STACKRL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **environment},
        open(run.path / "node.out", "a+"),
    )


def live(run: RunFolder, **environment: str) -> int:
    """Start ``run``, and again while its agent was killed, until it ends by itself; how often."""
    for lives in range(1, LIVES + 1):
        node = start(run, **environment)
        try:
            node.wait(LIMIT)
        finally:
            node.terminate()
            node.wait(60)
        wait_until(lambda: run.keeper() is None, limit=LIMIT)  # an agent without its guard still saves
        if run.state().status == "finished":
            return lives
        assert _killed(run), f"the run {run.state().status}: {run.state().reason}\n{tail(run)}"
    raise AssertionError(f"the run did not end in {LIVES} lives\n{tail(run)}")


def _killed(run: RunFolder) -> bool:
    """Whether it was the agent or its guard that ended the last life."""
    state = run.state()
    return state.status in ("starting", "running") or "node program was killed" in state.reason


def reached(run: RunFolder, index: int) -> bool:
    return run.metrics.exists() and bool(found := lines(run.metrics)) and found[-1]["index"] >= index


def pid_of(run: RunFolder, process: str) -> int:
    """The process that beats as ``process``."""
    [file] = run.heartbeats.glob(f"{process}.*")
    return int(file.suffix[1:])


def events(run: RunFolder, name: str) -> list[dict]:
    return [event for event in lines(run.events) if event["event"] == name]


@contextmanager
def started(run: RunFolder) -> Iterator[Started]:
    node = start(run)
    try:
        yield node
    finally:
        node.terminate()
        node.wait(60)


@contextmanager
def mounted(folder: Path, *options: str) -> Iterator[None]:
    if subprocess.run(["mount", *options, str(folder)], check=False, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount anything")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def check(run: RunFolder) -> Audit:
    """The books are clean, every step was taken once, and the trainer's state is that of these very steps."""
    books = audit(run)
    assert books.clean, f"{books}\n{tail(run)}"
    told = books.as_json()
    warmup, main = run.stack().stages
    steps = warmup.steps + main.steps
    assert told["steps"] == {
        "all": steps,
        "rl": main.steps,
        "stages": {"warmup": warmup.steps, "main": main.steps},
    }
    assert not (told["lost"] or told["trained_twice"] or told["mixed_groups"] or told["wrong_steps"])
    last = checkpoints.newest(run.checkpoints(run.stack()))
    assert last is not None and checkpoints.index_of(last) == steps
    held, expected = recompute(last)
    assert held == expected, "the trainer holds a state that its ledger does not lead to"
    return books


def tail(run: RunFolder, count: int = 25) -> str:
    """The last lines of all logs, for a failed assertion."""
    files = [run.path / "node.out", *sorted(run.path.glob("logs/*/*.log"))]
    texts = []
    for file in files:
        if file.exists():
            lines = file.read_text(errors="replace").splitlines()[-count:]
            texts.append("\n".join([f"== {file.relative_to(run.path)}", *lines]))
    crashes = (run.path / crashing.FILE).read_text()
    reached = f"crashes {crashes}, happened {crashing.happened(run.path)}"
    return "\n".join([*texts, reached, json.dumps(asdict(run.state()))])

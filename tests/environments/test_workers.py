"""Worker processes: what they answer, and every way in which they are lost."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from fake_roles import gone, wait_until
from sandbox_traces import sandboxes_of

from stackrl.runtime.environments import make
from stackrl.runtime.environments.base import Answer, NoRoom
from stackrl.runtime.environments.sandboxes import docker, machine
from stackrl.runtime.environments.sandboxes.base import STOP_SECONDS
from stackrl.runtime.environments.workers import EnvironmentFailed, InWorkers, WorkerLost
from stackrl.runtime.environments.workers import pool as pools
from stackrl.runtime.environments.workers import worker as workers
from stackrl.runtime.environments.workers.parties import Program, WorkerRefused
from stackrl.runtime.environments.workers.pool import Pool, close_workers, pool_of
from stackrl.runtime.environments.workers.worker import Worker
from stackrl.schemas.environments import Environment

ADAPTER = Path(__file__).parents[1] / "fault_adapter.py"
LIMIT = 60.0
"""Seconds for anything here, on a machine that is busy with other things."""


class Model:
    """A policy that says what it was asked last, backwards."""

    def __init__(self, error: Exception | None = None, after: int = 99) -> None:
        self.asked, self._error, self._after = [], error, after

    async def answer(self, *messages):
        if len(self.asked) >= self._after:
            raise self._error
        self.asked.append([message["content"] for message in messages])
        return Answer(messages[-1]["content"][::-1])


def program(interpreter=sys.executable, start="", begun="", **does):
    """``does``: by task, as ``on_3="die"``."""
    faults = {name.removeprefix("on_"): what for name, what in does.items()}
    settings = {"start": start, "begun": str(begun), "does": faults}
    return Program("faulty", ADAPTER, settings, interpreter)


@asynccontextmanager
async def pool(size=1, **does):
    made = Pool(program(**does), size)
    try:
        async with asyncio.timeout(LIMIT):
            yield made
    finally:
        await made.close()


def pid_of(made):
    [worker] = made._workers
    return worker.pid


async def test_a_rollout_asks_and_is_judged():
    async with pool() as made:
        model = Model()
        outcome = await made.rollout(3, model)
        assert model.asked == [["task 3"], ["more"]]
        assert outcome["rewards"] == {"score": 10} and outcome["metrics"]["closed"]
        many = await asyncio.gather(*(made.rollout(number, Model()) for number in range(30)))
        assert [one["rewards"]["score"] for one in many] == [10] * 10 + [11] * 20
        pid = pid_of(made)
    assert gone(pid)


@pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
async def test_what_sandboxes_leave_to_us_is_waited_for(monkeypatch):
    """Each command leaves a process that has ended to whoever adopts orphans, as a worker's starter does."""
    monkeypatch.setattr(workers, "PING_EVERY", 0.5)
    async with pool() as made:
        await made.ready()
        await machine({"type": "bubblewrap"}).check()
        await until(lambda: not sandboxes_of(os.getpid()))
        child = subprocess.Popen(["false"])  # noqa: ASYNC220
        await asyncio.sleep(1.5)
        assert child.wait() == 1, "its exit code was taken by another"


async def test_it_needs_nothing_of_ours_and_gets_no_token(monkeypatch):
    monkeypatch.setenv("STACKRL_TOKEN", "a-token-of-these-tests")
    async with pool() as made:
        await made.ready()
        about = made._workers[0].about
        assert about["token"] == "" and about["stackrl"] == []


async def test_what_the_policy_says_of_room_reaches_the_environment():
    async with pool() as made:
        outcome = await made.rollout(0, Model(NoRoom("no room"), after=1))
        assert outcome["rewards"] == {"score": 6} and outcome["metrics"]["full"]


async def test_an_error_of_the_policy_ends_the_rollout_and_nothing_else():
    async with pool() as made:
        with pytest.raises(ConnectionError, match="the engine"):
            await made.rollout(0, Model(ConnectionError("the engine"), after=1))
        wait = made._workers[0]
        await until(lambda: wait.load == 0)
        assert (await made.rollout(1, Model()))["rewards"] == {"score": 10}


async def until(condition):
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 (what it waits for happens in another process)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("raise", "KeyError: 'no such task'"),
        ("nan", "reward 'score' is nan"),
        ("text", "reward 'score' is 'much'"),
        ("no json", "not JSON serializable"),
    ],
)
async def test_an_environment_that_fails_or_gives_no_number_is_no_reward(what, why):
    async with pool(on_0=what) as made:
        with pytest.raises(EnvironmentFailed, match=why):
            await made.rollout(0, Model())
        assert (await made.rollout(1, Model()))["rewards"] == {"score": 10}


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("die", "it was killed by SIGKILL; its last words: this is the end"),
        ("block", "it was silent for 1 s: it blocks or hangs"),
        ("garble", "it said what nobody understands"),
    ],
)
async def test_a_worker_that_is_lost_takes_all_its_rollouts_with_it_and_is_replaced(what, why, monkeypatch):
    if what == "block":
        monkeypatch.setattr(workers, "SILENCE_LIMIT", 1.0)
        monkeypatch.setattr(workers, "PING_EVERY", 0.1)
    async with pool(on_0=what, on_1="wait") as made:
        innocent = asyncio.create_task(made.rollout(1, Model()))
        await until(lambda: made._workers and made._workers[0].load == 1)
        first = pid_of(made)
        with pytest.raises(WorkerLost, match=why):
            await made.rollout(0, Model())
        with pytest.raises(WorkerLost):
            await innocent
        await until(lambda: gone(first))
        monkeypatch.undo()
        assert (await made.rollout(2, Model()))["rewards"] == {"score": 10}
        assert pid_of(made) != first


async def test_a_cancelled_rollout_lets_go_or_its_worker_is_lost(monkeypatch):
    monkeypatch.setattr(workers, "PING_EVERY", 0.1)
    async with pool(on_0="wait", on_1="hold on") as made:
        await made.ready()
        worker = made._workers[0]
        for number in (0, 1):
            rolling = asyncio.create_task(made.rollout(number, Model()))
            await until(lambda: worker.load == 1)
            if number:
                monkeypatch.setattr(workers, "LEAVE_LIMIT", 1.0)
            rolling.cancel()
            await until(lambda: worker.load == 0)
            assert worker.alive == (number == 0)
        await until(lambda: gone(worker.pid))


async def test_a_rollout_that_is_cancelled_before_it_began_has_let_go_too(monkeypatch):
    monkeypatch.setattr(workers, "PING_EVERY", 0.1)
    monkeypatch.setattr(workers, "LEAVE_LIMIT", 5.0)
    async with pool(on_0="wait") as made:
        await made.ready()
        worker = made._workers[0]
        os.kill(worker.pid, signal.SIGSTOP)
        rolling = asyncio.create_task(made.rollout(0, Model()))
        await until(lambda: worker.load == 1)
        rolling.cancel()
        await asyncio.sleep(0)
        os.kill(worker.pid, signal.SIGCONT)
        await until(lambda: worker.load == 0)
        assert worker.alive


async def test_a_worker_is_not_taken_for_silent_because_its_orchestrator_stood_still(monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_LIMIT", 2.0)
    monkeypatch.setattr(workers, "PING_EVERY", 1.0)  # within which a busy machine answers, too
    async with pool(on_0="wait", on_1="wait") as made:
        rolling = [asyncio.create_task(made.rollout(number, Model())) for number in (0, 1)]
        await until(lambda: made._workers and made._workers[0].load == 2)
        [worker] = made._workers
        last = worker._heard
        await until(lambda: worker._heard != last)  # it owes no answer to a ping
        time.sleep(2.5)  # noqa: ASYNC251 (as a function that holds the interpreter does)
        last = worker._heard
        await until(lambda: not worker.alive or worker._heard > last + 1)
        assert worker.alive and worker.load == 2
        for task in rolling:
            task.cancel()


async def test_a_worker_that_is_ended_lets_its_rollouts_tidy_up(tmp_path, monkeypatch):
    """Containers, for example, do not end with the process."""
    held = tmp_path / "held"
    monkeypatch.setenv("STACKRL_TEST_HELD", str(held))
    async with pool(on_0="tidy") as made:
        rolling = asyncio.create_task(made.rollout(0, Model()))
        await until(held.exists)
        pid = pid_of(made)
    assert gone(pid) and not held.exists()
    with pytest.raises(WorkerLost, match="was ended"):
        await rolling


def test_a_sandbox_can_be_left_before_its_worker_is_lost():
    assert workers.LEAVE_LIMIT > docker._ORDER_SECONDS + STOP_SECONDS + 10.0


async def test_an_answer_that_is_not_waited_for_any_more_is_cancelled():
    class Thinking:
        seconds, cancelled = 77.0, False

        async def answer(self, *messages):
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                self.cancelled = True
                raise

    async with pool(on_0="give up") as made:
        thinking = Thinking()
        assert (await made.rollout(0, thinking))["rewards"] == {"score": 77.0}, "what it may take, is known"
        assert thinking.cancelled


async def test_rollouts_wait_for_a_place():
    environment = InWorkers(program(), 2, True, at_once=1)
    other = InWorkers(program(), 2, True, at_once=1)
    async with environment.place(), environment.place():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2), other.place():
                pass
    async with asyncio.timeout(LIMIT), other.place():
        pass
    async with InWorkers(program(), 1, True).place():
        pass
    await close_workers()


async def test_nothing_is_left_of_what_rollouts_started():
    async with pool(on_0="leave") as made:
        left = (await made.rollout(0, Model()))["metrics"]
        assert not gone(left["child"]) and not gone(left["orphan"])
    assert gone(left["child"], left["orphan"])


async def test_several_workers_share_rollouts():
    async with pool(size=2, on_0="wait", on_1="wait") as made:
        rolling = [asyncio.create_task(made.rollout(number, Model())) for number in (0, 1)]
        await until(lambda: len(made._workers) == 2)
        assert (await made.rollout(2, Model()))["rewards"] == {"score": 10}
        assert sorted(worker.load for worker in made._workers) in ([0, 2], [1, 1])
        for task in rolling:
            task.cancel()


@pytest.mark.parametrize(
    ("start", "why"),
    [
        ("refuse", "it does not want to; ask another one"),
        ("raise", "KeyError: 'no such data'"),
        ("die", "it ended with exit code 7; its last words: so far so good"),
        ("hang", "was not ready within 0.5 s"),
    ],
)
async def test_a_worker_that_does_not_start_says_why(start, why):
    with pytest.raises(WorkerRefused, match=why) as caught:
        await Worker.start(program(start=start), within=0.5 if start == "hang" else LIMIT)
    assert (caught.value.key, caught.value.mend) == (
        ("args", "ask another one") if start == "refuse" else ("", "")
    )


async def test_an_interpreter_that_is_not_there(tmp_path):
    with pytest.raises(WorkerRefused, match=f"{tmp_path}/python cannot be started: No such file") as caught:
        await Worker.start(program(interpreter=f"{tmp_path}/python"))
    assert caught.value.key == "python"


async def test_starts_that_fail_are_tried_again_after_a_pause(monkeypatch):
    monkeypatch.setattr(pools, "FIRST_PAUSE", 0.5)
    async with pool(start="refuse") as made:
        began = time.monotonic()
        failures = await asyncio.gather(made.ready(), made.ready(), return_exceptions=True)
        assert all(isinstance(failure, WorkerRefused) for failure in failures), "who waits together, is told"
        with pytest.raises(WorkerRefused):
            await made.ready()
        assert time.monotonic() - began >= 0.5


async def test_whoever_waits_for_a_worker_waits_for_the_next_start_too(monkeypatch, tmp_path):
    monkeypatch.setattr(pools, "FIRST_PAUSE", 0.1)
    async with pool(start="raise once", begun=tmp_path / "begun") as made:
        await asyncio.gather(made.ready(), made.ready())
        assert (await made.rollout(0, Model()))["rewards"] == {"score": 10}


async def test_patience_with_starts_that_fail_has_an_end(monkeypatch):
    monkeypatch.setattr(pools, "FIRST_PAUSE", 0.1)
    monkeypatch.setattr(pools, "PATIENCE", 0.5)
    async with pool(start="raise") as made:
        with pytest.raises(WorkerRefused, match="no such data"):
            await made.ready()


OWN_AT_START = """
import asyncio
from stackrl.runtime.environments.base import AgentEnvironment, Outcome, Task

class Served(AgentEnvironment):
    def task(self, rng):
        return Task((), None)

    async def start(self):
        self.asked = asyncio.Queue()
        self.helper = asyncio.create_task(self.help())

    async def help(self):
        while True:
            (await self.asked.get()).set_result(1.0)

    async def rollout(self, task, policy):
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        return Outcome({"helped": await asyncio.wait_for(answer, 5)})

class Missing(Served):
    async def start(self):
        raise OSError("there is no helper here")

class Leaves(Served):
    async def rollout(self, task, policy):
        raise SystemExit("enough")
"""


@asynccontextmanager
async def pool_of_ones_own(folder, name):
    (folder / "own.py").write_text(OWN_AT_START)
    described = {"name": "mine", "type": "python", "args": {"path": f"{folder / 'own.py'}:{name}"}}
    made = make(Environment.model_validate(described))._pool()
    try:
        async with asyncio.timeout(LIMIT):
            yield made
    finally:
        await close_workers()


async def test_what_an_environment_starts_lives_in_the_event_loop_of_its_rollouts(tmp_path):
    async with pool_of_ones_own(tmp_path, "Served") as made:
        assert (await made.rollout(0, Model()))["rewards"] == {"helped": 1.0}


async def test_an_environment_that_does_not_start_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(pools, "PATIENCE", 0.0)
    async with pool_of_ones_own(tmp_path, "Missing") as made:
        with pytest.raises(WorkerRefused, match="OSError: there is no helper here"):
            await made.ready()


async def test_a_rollout_that_would_end_the_process_fails_alone(tmp_path):
    async with pool_of_ones_own(tmp_path, "Leaves") as made:
        await made.ready()
        with pytest.raises(EnvironmentFailed, match=r"SystemExit\('enough'\)"):
            await made.rollout(0, Model())
        assert made._workers[0].alive


async def test_a_program_has_one_pool_in_an_event_loop():
    first = pool_of(program(on_0="wait"), 1)
    assert pool_of(program(on_0="wait"), 1) is first
    assert pool_of(program(on_0="die"), 1) is not first and pool_of(program(on_0="wait"), 2) is not first
    await first.ready()
    pid = pid_of(first)
    await close_workers()
    assert gone(pid) and pool_of(program(on_0="wait"), 1) is not first


def test_a_worker_does_not_outlive_its_orchestrator(tmp_path):
    """Even where that is killed, and the worker is busy."""
    script = f"""
import asyncio, pathlib, sys
from stackrl.runtime.environments.workers.parties import Program
from stackrl.runtime.environments.workers.worker import Worker
async def main():
    adapter, settings = pathlib.Path({str(ADAPTER)!r}), {{"does": {{"0": "block"}}}}
    worker = await Worker.start(Program("it", adapter, settings, sys.executable))
    print(worker.pid, flush=True)
    await worker.rollout(0, None)
asyncio.run(main())
"""
    orchestrator = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        worker = int(orchestrator.stdout.readline())
        assert not gone(worker)
    finally:
        os.kill(orchestrator.pid, signal.SIGKILL)
        orchestrator.wait()
    wait_until(lambda: gone(worker), limit=LIMIT)

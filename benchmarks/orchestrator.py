"""How many rollouts one orchestrator keeps in flight, and how long its event loop makes others wait.

    python benchmarks/orchestrator.py [--rollouts 100 1000 10000] [--seconds 60] [--median 60] [--tokens 256]

The orchestrator is the real one, with its journal and its sockets, in this process. Beside it stand two
others: an engine without a model that answers after a delay, and a trainer that acknowledges batches at once.
Delays are log-normal with the given median and a deviation of 1 in the logarithm: the mean is 1.65 times the
median, one answer in a hundred takes ten times it. Rollouts that wait for a place on the engine, for others
of their group or for their batch come on top of those in flight.

The lag is what somebody who looks in every 5 ms waits until the loop takes notice; a loop that was away for
longer counts once for each look that was missed. It is measured while that many rollouts are in flight, and
apart from that while they are begun. Where more processes than cores want to run, the loop is late although
it has nothing to do: "own" is the part of the lag for which it had a processor. Ends with 1 where the lag's
p99, or on a machine with other work that of its own part, is over LIMIT.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

LIMIT = 0.05
"""Seconds."""
LOOK = 0.005
SIGMA = 1.0
GROUP = 8
TOKEN = "a-token-of-this-benchmark"
EVALUATED = 2
"""Prompts that are answered before the stage begins, at once."""
STARTED_WITHIN = 600.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, nargs="+", default=[100, 1000, 10_000], metavar="N")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--median", type=float, default=60.0, help="seconds of an answer")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--profile", type=Path, help="write a profile of the orchestrator to this file")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = max(options.rollouts) + 1000
    if hard < most:
        parser.error(f"that needs {most} open files, and this system allows {hard}: see `ulimit -Hn`")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, answers of {options.tokens} tokens after")
    print(
        f"{options.median:g} s in the median; rollouts per second: what was finished, and the most possible\n"
    )
    print("| in flight | rollouts/s | lag p50 ms | p99 | most | own p99 | p99, own: at first | processor |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    return int(not all([measured(rollouts, options) for rollouts in options.rollouts]))


def measured(rollouts: int, options: argparse.Namespace) -> bool:
    """Print a row of the table; whether it holds to the limit."""
    with tempfile.TemporaryDirectory() as folder, roles(Path(folder), rollouts, options) as (run, url):
        watch = asyncio.run(orchestrated(run, url, rollouts, options))
    late, own = (1000 * np.array(lags) for lags in zip(*watch.lags, strict=True))
    begun = 1000 * np.array(watch.lags_of_the_start)
    possible = rollouts / (options.median * np.exp(SIGMA**2 / 2))
    figures = [
        f"{fmean(watch.in_flight):.0f}",
        f"{watch.rate:.0f} of {possible:.0f}",
        *(f"{np.percentile(late, share):.1f}" for share in (50, 99, 100)),
        f"{np.percentile(own, 99):.1f}",
        " and ".join(f"{p99:.1f}" for p99 in np.percentile(begun, 99, axis=0)),
        f"{watch.processor:.0%}",
    ]
    print(f"| {' | '.join(figures)} |", flush=True)
    busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    return bool(np.percentile(own if busy else late, 99) <= 1000 * LIMIT)


class Watch:
    """Looks in every now and then."""

    def __init__(self, engines: list[CountingEngine], rollouts: int) -> None:
        self._engines, self._rollouts = engines, rollouts
        self.lags: list[Lag] = []
        self.lags_of_the_start: list[Lag] = []
        self.in_flight: list[int] = []
        self.rate = self.processor = 0.0

    async def look(self, seconds: float) -> None:
        """Wait until all are in flight, then measure for so long."""
        began = time.monotonic()
        while self._running < 0.95 * self._rollouts:
            self.lags_of_the_start += await _lag()
            assert time.monotonic() - began < STARTED_WITHIN, f"only {self._running} are in flight"
        began, used = time.monotonic(), time.process_time()
        finished = self._finished
        while time.monotonic() - began < seconds:
            self.lags += await _lag()
            self.in_flight.append(self._running)
        passed = time.monotonic() - began
        self.rate = (self._finished - finished) / passed
        self.processor = (time.process_time() - used) / passed

    @property
    def _running(self) -> int:
        return sum(engine.running for engine in self._engines)

    @property
    def _finished(self) -> int:
        return sum(engine.finished for engine in self._engines)


class Lag(NamedTuple):
    """Seconds that the loop was late: by the clock, and those in which it computed."""

    late: float
    own: float


async def _lag() -> list[Lag]:
    """That of one look, and those of the looks that were missed meanwhile."""
    due, used = time.monotonic() + LOOK, time.thread_time()
    await asyncio.sleep(LOOK)
    late = max(0.0, time.monotonic() - due)
    own = min(late, time.thread_time() - used)
    return [Lag(late - gone, max(0.0, own - gone)) for gone in np.arange(0.0, late + 1e-9, LOOK)]


async def orchestrated(run, url: str, rollouts: int, options: argparse.Namespace) -> Watch:
    """A run until it was measured."""
    from stackrl.runtime.orchestrator.loop import orchestrate
    from stackrl.runtime.orchestrator.stop import Stop
    from stackrl.runtime.orchestrator.turns import put_the_loop_first

    put_the_loop_first()
    stop, engine = Stop(), CountingEngine(url)
    watch = Watch([engine], rollouts)
    running = asyncio.create_task(orchestrate(run, TOKEN, [engine.client], stop))
    looking = asyncio.create_task(watch.look(options.seconds))
    with _profiled(options.profile):
        await asyncio.wait([running, looking], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
        raise RuntimeError("the run ended before it was measured")
    looking.result()
    running.cancel()
    await asyncio.wait([running])
    return watch


@contextlib.contextmanager
def _profiled(file: Path | None) -> Iterator[None]:
    if file is None:
        yield
        return
    import cProfile

    with cProfile.Profile() as profile:
        yield
    profile.dump_stats(file)


class CountingEngine:
    """A client of the engine that counts."""

    def __init__(self, url: str) -> None:
        from stackrl.runtime.inference.client import Engine

        self.client = Engine(url, TOKEN, timeout=3600)
        self.running = self.finished = 0
        self._generate, self.client.generate = self.client.generate, self.generate

    async def generate(self, *arguments, **named):
        self.running += 1
        try:
            return await self._generate(*arguments, **named)
        finally:
            self.running -= 1
            self.finished += 1


@contextlib.contextmanager
def roles(folder: Path, rollouts: int, options: argparse.Namespace) -> Iterator[tuple]:
    """A run's folder and the engine's address, with engine and trainer at work."""
    from stackrl.runtime.run import Endpoints, RunFolder, State
    from stackrl.runtime.trainer.models.byte_tokenizer import byte_tokenizer
    from stackrl.schemas.stack import Stack

    run = RunFolder(folder / "run")
    run.model.mkdir(parents=True)
    byte_tokenizer(256).save_pretrained(run.model)
    (run.model / "config.json").write_text(json.dumps({"model_type": "qwen3", "hidden_size": 1024}))
    stack = Stack.model_validate(_stack(rollouts, options.tokens))
    run.write("stack.json", stack.model_dump(mode="json"))
    run.write_state(State(status="running", attempt=1, incarnation=1))
    orchestrator, engine = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
    run.write(
        "endpoints.json", vars(Endpoints(orchestrator=orchestrator, weights="", engines=[], rendezvous=""))
    )
    me = [sys.executable, str(Path(__file__).resolve())]
    started = [
        subprocess.Popen([*me, "engine", engine, str(options.median), str(options.tokens)]),
        subprocess.Popen([*me, "trainer", orchestrator]),
    ]
    try:
        yield run, engine
    finally:
        for process in started:
            process.kill()
            process.wait()


def _stack(rollouts: int, tokens: int) -> dict:
    """As many rollouts in flight as the engine takes, and three times as many that wait."""
    batch = max(GROUP, rollouts // 4 // GROUP * GROUP)
    return {
        "version": 1,
        "model": {"init": "random", "architecture": "qwen3"},
        "roles": {"trainer": {"processes": 1}, "inference": {"processes": 1}},
        "trainer": {"sequence_length": tokens + 128},
        "inference": {"max_model_length": tokens + 128, "max_requests": rollouts, "concurrency": rollouts},
        "environments": [{"name": "reverse", "type": "reverse_text"}],
        "sampling": {"max_tokens": tokens, "timeout": 3600.0},
        "algorithm": {"group_size": GROUP, "batch_size": batch, "max_staleness": 15},
        "evaluate": {"prompts": EVALUATED},
        "guards": {"no_signal": {"action": "ignore"}},
        "checkpoint": {"every": 100_000},
        "stages": [{"name": "main", "type": "rl", "steps": 100_000}],
    }


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


# ---- the other processes


def engine(url: str, median: float, tokens: int) -> None:
    """Answer every request after a while, with the same tokens: the cores are for what is measured."""
    from aiohttp import web

    label, at_once = "default", 2 * EVALUATED
    ids = [random.Random(0).randrange(97, 123) for _ in range(tokens)]
    logprobs = {"content": [{"token_id": token, "logprob": -0.5, "token": ""} for token in ids]}

    def answer() -> bytes:
        spans = [{"start": 0, "end": tokens, "version": label}]
        choice = {"token_ids": ids, "logprobs": logprobs, "finish_reason": "length", "weight_versions": spans}
        return json.dumps({"choices": [choice], "usage": {}}).encode()

    content = answer()

    async def generate(request: web.Request) -> web.Response:
        nonlocal at_once
        await request.read()
        if at_once:
            at_once -= 1
        else:
            await asyncio.sleep(median * random.lognormvariate(0.0, SIGMA))
        return web.Response(body=content, content_type="application/json")

    async def order(request: web.Request) -> web.Response:
        nonlocal label, content
        body = await request.json() if request.can_read_body else {}
        if "weight_version" in body:
            label = body["weight_version"]
            content = answer()
        return web.json_response({"weight_version": label, "is_paused": False})

    application = web.Application()
    application.router.add_post("/inference/v1/generate", generate)
    application.router.add_route("*", "/{path:.*}", order)
    port = int(url.rpartition(":")[2])
    web.run_app(application, host="127.0.0.1", port=port, print=None, access_log=None, backlog=20_000)


def trainer(url: str) -> None:
    """One rank that has nothing to do."""
    from stackrl.runtime.transport.batch_client import BatchClient
    from stackrl.runtime.transport.messages import Hello, Version

    index = 0

    def greeting() -> Hello:
        weights, version = "http://weights.invalid", Version(1, index)
        return Hello(incarnation=1, rank=0, ranks=1, index=index, version=version, weights=weights, saved=-1)

    done = {"loss": 0.5, "gradient_norm": 1.0, "weights_finite": 1.0, "tokens_packed": 1.0}
    with BatchClient(url, TOKEN, greeting) as client:
        client.hello(timeout=60)
        while True:
            batch = client.fetch(index)
            index += 1
            step, version = batch.step, Version(1, index)
            client.ack(index=batch.index, step=step, state="applied", version=version, metrics=done)


if __name__ == "__main__":
    if sys.argv[1:2] == ["engine"]:
        engine(sys.argv[2], float(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["trainer"]:
        trainer(sys.argv[2])
    else:
        sys.exit(main())

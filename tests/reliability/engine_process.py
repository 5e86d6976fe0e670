"""``python engine_process.py RUN_DIR --engine I``: an engine without a model, behind the routes of vLLM.

Its replies depend on prompt and seed alone, so any engine gives the same one at any time. It starts with
vLLM's label for first weights, fetches every update that it is told of, and writes down what came.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import crashing
from aiohttp import web

from stackrl.runtime import heartbeat
from stackrl.runtime.run import RunFolder, run_token
from stackrl.runtime.transport.batches import token_required
from stackrl.runtime.transport.held_folder import HELD_VARIABLE, HeldFolder
from stackrl.runtime.transport.messages import Version
from stackrl.runtime.transport.weights import WeightError, receive

TOKEN_SECONDS = 0.003
FIRST_LABEL = "default"
"""What vLLM calls the weights that it started with."""


class EngineServer:
    """What the orchestrator's client asks of vLLM."""

    def __init__(self, run: RunFolder, name: str, token: str) -> None:
        self._run, self._name, self._token = run, name, token
        path = os.environ.get(HELD_VARIABLE)
        self._held = HeldFolder(Path(path)) if path else None
        self.label = FIRST_LABEL
        self.incoming = ""
        self.paused = asyncio.Event()
        self.going = asyncio.Event()
        self.going.set()

    def application(self, token: str) -> web.Application:
        application = web.Application(middlewares=[token_required(token)])
        application.add_routes(
            [
                web.get("/health", self.health),
                web.get("/weight_info", self.weight_info),
                web.get("/is_paused", self.is_paused),
                web.post("/inference/v1/generate", self.generate),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.post("/start_weight_update", self.start_weight_update),
                web.post("/update_weights", self.update_weights),
                web.post("/finish_weight_update", self.finish_weight_update),
                web.post("/update_weight_version", self.update_weight_version),
            ]
        )
        return application

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.going.is_set()})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling = body["sampling_params"]
        rng = Random(f"{sampling['seed']} {body['token_ids']}" if sampling["temperature"] else 0)
        tokens = reply(body["token_ids"], sampling["stop_token_ids"][0], rng)[: sampling["max_tokens"]]
        spans: list[dict[str, object]] = []
        for place in range(len(tokens)):
            await asyncio.sleep(TOKEN_SECONDS)
            await self.going.wait()
            if spans and spans[-1]["version"] == self.label:
                spans[-1]["end"] = place + 1
            else:
                spans.append({"start": place, "end": place + 1, "version": self.label})
        choice = {
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": t, "logprob": -rng.random()} for t in tokens]},
            "finish_reason": "stop" if tokens[-1] in sampling["stop_token_ids"] else "length",
            "weight_versions": spans,
        }
        return web.json_response({"choices": [choice], "usage": {}})

    async def pause(self, request: web.Request) -> web.Response:
        self.going.clear()
        return web.json_response({})

    async def resume(self, request: web.Request) -> web.Response:
        self.going.set()
        return web.json_response({})

    async def start_weight_update(self, request: web.Request) -> web.Response:
        return web.json_response({})

    async def update_weights(self, request: web.Request) -> web.Response:
        info = (await request.json())["update_info"]
        loading = self._run.path / f"loading-{self._name}"
        loading.touch()
        try:
            await asyncio.to_thread(self._fetch, info)
        except WeightError as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)
        finally:
            loading.unlink(missing_ok=True)
        self.incoming = info["version"]
        return web.json_response({})

    def _fetch(self, info: dict[str, Any]) -> None:
        version = Version.parse(info["version"])
        came = dict(receive(info["source"], version, self._token, info["timeout"], self._held))
        loaded = {"version": info["version"], "sum": came["sum"].tolist()}
        with open(self._run.path / f"loaded-{self._name}.jsonl", "a") as book:
            book.write(json.dumps(loaded) + "\n")

    async def finish_weight_update(self, request: web.Request) -> web.Response:
        self.label = (await request.json()).get("weight_version", self.label)
        return web.json_response({})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({})


def reply(prompt: list[int], stop: int, rng: Random) -> list[int]:
    """The letters at the end of ``prompt``'s task backwards, some of them wrong: a reward between 0 and 1."""
    letters = [token for token in prompt if 64 <= token <= 90][-6:]
    return [rng.choice(prompt) if rng.random() < 0.5 else letter for letter in reversed(letters)] + [stop]


async def serve(run: RunFolder, name: str, url: str, token: str) -> None:
    server = EngineServer(run, name, token)
    runner = web.AppRunner(server.application(token), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    address = urlsplit(url)
    await web.TCPSite(runner, address.hostname, address.port).start()
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=RunFolder)
    parser.add_argument("--engine", type=int, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    name = f"engine-{given.engine}"
    crashing.install(given.run.path, name)
    os.environ.setdefault("STACKRL_PROCESS", name)
    heartbeat.start()
    asyncio.run(serve(given.run, name, given.run.endpoints().engines[given.engine], run_token()))


if __name__ == "__main__":
    import engine_process  # the module that crashes are armed in, not this one

    engine_process.main()

"""The engine client against a server that answers as vLLM does, or worse."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web
from loopback import free_port

from stackrl.runtime.inference.client import Engine, EngineError, EngineLost
from stackrl.runtime.transport.messages import Span, Version

TOKEN = "secret"
UPDATE = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]


class Server:
    """Records the control calls and answers what a test has put in."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bodies: dict[str, dict] = {}
        self.answers: dict[str, Callable] = {}
        self.label = "default"
        self.paused = False
        self.running = self.most = 0

    async def handle(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"error": "no token"}, status=401)
        name = request.path.rsplit("/", 1)[-1]
        self.calls.append(request.path_qs.removeprefix("/"))
        self.bodies[name] = await request.json() if request.can_read_body else {}
        if name in ("pause", "resume"):
            self.paused = name == "pause"
        if name in self.answers:
            return await self.answers[name](self.bodies[name])
        if name == "is_paused":
            return web.json_response({"is_paused": self.paused})
        if name == "weight_info":
            return web.json_response({"weight_version": self.label})
        if name == "update_weight_version":
            self.label = self.bodies[name]["new_version"]
        if name == "finish_weight_update":
            self.label = self.bodies[name].get("weight_version", self.label)
        return web.json_response({"message": "done"})


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Server]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    server.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    yield server
    await runner.cleanup()


@pytest_asyncio.fixture
async def engine(server: Server) -> AsyncIterator[Engine]:
    engine = Engine(server.url, TOKEN, timeout=20)
    yield engine
    await engine.close()


def reply(tokens: list[int], **changes) -> dict:
    choice = {
        "token_ids": tokens,
        "logprobs": {"content": [{"token_id": token, "logprob": -0.5} for token in tokens]},
        "finish_reason": "stop",
        "weight_versions": [{"version": "1.4", "start": 0, "end": len(tokens)}],
    }
    return {"choices": [choice | changes], "usage": {"prompt_tokens_details": {"cached_tokens": 16}}}


def gives(answer: dict, status: int = 200) -> Callable:
    async def respond(body: dict) -> web.Response:
        return web.json_response(answer, status=status)

    return respond


async def ask(engine: Engine, request_id: str = "g1-r2-t0", **more):
    fixed = {"max_tokens": 8, "temperature": 0.7, "seed": 5, "salt": "1.4", "stop_token_ids": [263]}
    return await engine.generate([1, 2], request_id=request_id, **fixed, **more)


async def test_a_generation_is_read_whole(server: Server, engine: Engine) -> None:
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "1.4", "start": 1, "end": 3}]
    server.answers["generate"] = gives(reply([7, 8, 263], weight_versions=spans))
    found = await ask(engine)
    assert found.tokens == [7, 8, 263] and found.logprobs == [-0.5] * 3
    assert found.spans == [Span(0, 1, Version(0, 0)), Span(1, 3, Version(1, 4))]
    assert (found.finish_reason, found.cached) == ("stop", 16)
    body = server.bodies["generate"]
    assert (body["token_ids"], body["cache_salt"], body["request_id"]) == ([1, 2], "1.4", "g1-r2-t0")
    sampling = body["sampling_params"]
    assert (sampling["seed"], sampling["stop_token_ids"], sampling["ignore_eos"]) == (5, [263], True)


def written(array: np.ndarray) -> str:
    """As vLLM writes an array."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


@pytest.mark.parametrize(
    ("most", "told", "read"), [(127, "u1", "|i1"), (128, "u1", "<i2"), (300, "<u2", "<i2")]
)
async def test_routes_are_read_in_the_smallest_type(server, engine, most: int, told: str, read: str) -> None:
    routes = np.array([[[0, most], [7, 8]]], told)
    server.answers["generate"] = gives(reply([7, 8], routed_experts=written(routes)))
    found = (await ask(engine, routes_from=1)).routes
    assert found.dtype.str == read and found.tolist() == routes.tolist()
    assert server.bodies["generate"]["sampling_params"]["routed_experts_prompt_start"] == 1
    server.answers["generate"] = gives(reply([7, 8], routed_experts=None))
    assert (await ask(engine)).routes is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"routed_experts": written(np.zeros((1, 4), "u1"))}, r"its routes are uint8 \[1, 4\]"),
        ({"routed_experts": written(np.zeros((1, 2, 2)))}, "its routes are float64"),
        ({"routed_experts": "AAAA"}, ""),
        ({"routed_experts": "*"}, ""),
        ({"finish_reason": "abort"}, "ended by 'abort'"),
        ({"logprobs": None}, ""),
        (
            {"logprobs": {"content": [{"token_id": 9, "logprob": -1.0}] * 2}},
            "not those of the sampled tokens",
        ),
        ({"weight_versions": [{"version": "1.4", "start": 0, "end": 1}]}, "do not cover"),
        ({"weight_versions": None}, ""),
        ({"weight_versions": [{"version": "incomplete update", "start": 0, "end": 2}]}, "of no version"),
        (
            {
                "logprobs": {
                    "content": [{"token_id": 7, "logprob": -9999.0}, {"token_id": 8, "logprob": -1.0}]
                }
            },
            "not finite",
        ),
    ],
)
async def test_a_generation_that_is_not_whole_is_an_error(server, engine, changes, reason) -> None:
    server.answers["generate"] = gives(reply([7, 8], **changes))
    with pytest.raises(EngineError, match=rf"engine {server.url}: generate g1-r2-t0: .*{reason}"):
        await ask(engine)


async def test_errors_name_the_engine_and_the_operation(server: Server, engine: Engine) -> None:
    server.answers["generate"] = gives({"error": {"message": "the prompt is too long"}}, status=400)
    with pytest.raises(
        EngineError, match=rf"{server.url}: POST /inference/v1/generate answered 400: the prompt"
    ):
        await ask(engine)
    stranger = Engine(server.url, "wrong")
    with pytest.raises(EngineError, match="GET /weight_info answered 401"):
        await stranger.version()
    with pytest.raises(EngineError, match="answered 401"):
        await stranger.wait_ready(5)
    await stranger.close()
    nobody = Engine(f"http://127.0.0.1:{free_port()}", TOKEN)
    with pytest.raises(EngineError, match=r"not ready within 0.5 s .*[Cc]onnect"):
        await nobody.wait_ready(0.5)
    with pytest.raises(EngineLost, match="GET /weight_info failed"):
        await nobody.version()
    with pytest.raises(EngineLost, match="POST /pause failed"):
        await nobody.update(Version(2, 3), "http://trainer:1", "keep", timeout=9)
    await nobody.close()


async def test_a_reply_that_does_not_come_is_an_error(server: Server) -> None:
    async def never(body: dict) -> web.Response:
        await asyncio.sleep(60)

    server.answers["generate"] = never
    impatient = Engine(server.url, TOKEN, timeout=0.3)
    with pytest.raises(EngineLost, match=r"generate got no answer in 0\.3 s"):
        await ask(impatient)
    await impatient.close()


async def test_hundreds_of_requests_run_at_once(server: Server, engine: Engine) -> None:
    everybody = asyncio.Event()

    async def wait_for_all(body: dict) -> web.Response:
        server.running += 1
        if server.running == 300:
            everybody.set()
        await asyncio.wait_for(everybody.wait(), 20)
        return web.json_response(reply([7]))

    server.answers["generate"] = wait_for_all
    patient = Engine(server.url, TOKEN, timeout=30)
    found = await asyncio.gather(*(ask(patient, f"r{i}") for i in range(300)))
    assert [generation.tokens for generation in found] == [[7]] * 300
    await patient.close()


@pytest.mark.parametrize(("kv", "flag"), [("keep", "false"), ("recompute", "true")])
async def test_an_update_is_one_bracket(server: Server, engine: Engine, kv: str, flag: str) -> None:
    times = await engine.update(Version(2, 3), "http://trainer:1", kv, timeout=9)
    assert server.calls == [f"pause?mode=keep&clear_cache={flag}", *UPDATE[1:]]
    info = {"source": "http://trainer:1", "version": "2.3", "timeout": 9}
    assert server.bodies["update_weights"] == {"update_info": info}
    assert server.bodies["finish_weight_update"] == {"weight_version": "2.3"}
    assert 0 < times.pause < times.total and 0 < times.load < times.total


@pytest.mark.parametrize("failing", ["start_weight_update", "update_weights", "finish_weight_update"])
async def test_after_a_failed_update_the_engine_runs_without_a_version(server, engine, failing) -> None:
    server.answers[failing] = gives({"error": {"message": "no memory"}}, status=500)
    with pytest.raises(EngineError, match=rf"{failing} answered 500: no memory"):
        await engine.update(Version(2, 3), "http://trainer:1", "keep", timeout=9)
    assert server.calls[-3:] == ["update_weight_version", "finish_weight_update", "resume"]
    with pytest.raises(EngineError, match="of no version"):
        await engine.version()


async def test_a_failed_pause_ends_in_a_resume_and_keeps_the_version(server: Server, engine: Engine) -> None:
    server.label = "1.1"
    server.answers["pause"] = gives({"error": "engine is busy"}, status=500)
    with pytest.raises(EngineError, match="pause answered 500: engine is busy"):
        await engine.update(Version(2, 3), "http://trainer:1", "keep", timeout=9)
    assert server.calls[-1] == "resume"
    assert await engine.version() == Version(1, 1)


async def never(body: dict) -> web.Response:
    await asyncio.sleep(60)


async def test_an_update_that_is_cancelled_resumes_too(server: Server, engine: Engine) -> None:
    entered = asyncio.Event()

    async def enter(body: dict) -> web.Response:
        entered.set()
        await never(body)

    server.answers["update_weights"] = enter
    update = asyncio.create_task(engine.update(Version(2, 3), "http://trainer:1", "keep", timeout=60))
    await entered.wait()
    update.cancel()
    with pytest.raises(asyncio.CancelledError):
        await update
    assert server.calls[-3:] == ["update_weight_version", "finish_weight_update", "resume"]


@pytest.mark.parametrize("silent", UPDATE[:-1])
async def test_an_update_over_its_time_is_a_lost_engine_that_can_be_settled(server, engine, silent) -> None:
    """Nobody waits for a silent engine once more: what it left open is ended when it answers again."""
    server.label, server.answers[silent] = "1.1", never
    with pytest.raises(EngineLost, match=rf"engine {server.url}: POST /{silent} got no answer in 0\.\d+ s"):
        async with asyncio.timeout(20):
            await engine.update(Version(2, 3), "http://trainer:1", "keep", timeout=0.4)
    assert server.calls[-1].startswith(silent)
    del server.answers[silent]
    assert server.paused and await engine.settle() is None
    assert not server.paused and server.calls[-3:] == [
        "update_weight_version",
        "finish_weight_update",
        "resume",
    ]
    with pytest.raises(EngineError, match="of no version"):
        await engine.version()
    await engine.update(Version(2, 3), "http://trainer:1", "keep", timeout=9)
    assert await engine.version() == Version(2, 3)


@pytest.mark.parametrize(("label", "version"), [("default", Version(0, 0)), ("1.4", Version(1, 4))])
async def test_an_engine_that_nobody_left_in_an_update_is_left_alone(server, engine, label, version) -> None:
    server.label = label
    assert await engine.settle() == version
    assert server.calls == ["weight_info", "is_paused"]


async def test_what_is_settled_loses_its_label_before_its_bracket_ends(server, engine) -> None:
    """Between the two calls the settling client may die as well: the label must not be believed then."""
    server.label, server.paused = "1.4", True
    server.answers["finish_weight_update"] = gives({"error": "no update was started"}, status=500)
    assert await engine.settle() is None
    assert server.label == "incomplete update" and not server.paused


async def test_updates_follow_one_another(server: Server, engine: Engine) -> None:
    steps = [engine.update(Version(2, step), "/weights", "keep", timeout=9) for step in range(3)]
    await asyncio.gather(*steps)
    assert [call.partition("?")[0] for call in server.calls] == UPDATE * 3

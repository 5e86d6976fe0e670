"""References and teachers: what they read, and what becomes of their logprobs, answers and faults."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web
from engine_server import free_port
from fake_engine import FakeEngine, told_of
from fake_trainer import FakeTrainer
from small_runs import STACK, TOKEN, chat, lines, make_run, reversed_badly, reversed_well
from whole_runs import run_all

from stackrl.runtime.environments.base import user
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.errors import BadInput, OrchestratorError, first_cause
from stackrl.runtime.orchestrator.recipes import recipes
from stackrl.runtime.orchestrator.references import References, demonstrated
from stackrl.runtime.orchestrator.rollout import Assignment, Limits, RolloutError, roll_out
from stackrl.runtime.orchestrator.seeds import Seeds
from stackrl.runtime.orchestrator.tasks import Mix
from stackrl.runtime.transport.messages import CE, REF_KL
from stackrl.schemas.inference import PullWeights
from stackrl.schemas.stack import Stack, settings_of

pytestmark = pytest.mark.usefixtures("quick")

WORDS = STACK["environments"][0]
LIMITS = Limits(turn=9, sequence=400, seconds=20.0, temperature=1.0)
TRIES = {"name": "tries", "type": "reverse_text_tries", "args": {"tries": 3}}
COMPARED = STACK["algorithm"] | {"loss": {"kl": {}}}


def settings(environment=WORDS, **reference):
    stack = STACK | {"environments": [environment]}
    stack["algorithm"] = COMPARED | ({"reference": reference} if reference else {})
    stack = Stack.model_validate(stack)
    return settings_of(stack, stack.stages[-1])


@asynccontextmanager
async def serving(engine):
    """The engine, served while the context is open."""
    together = Engines([engine], 8, PullWeights())
    task = asyncio.create_task(together.serve(lambda name, **fields: None, 20))
    yield together
    task.cancel()


async def rolled(own, engines):
    """A rollout of the settings' environment, and what it was drawn as."""
    draw = Mix(own.environments, Seeds(0)).draw(0)
    what = Assignment(4, 2, draw.name, draw.environment, draw.task, Seeds(0))
    async with engines.serving(what.group) as generate:
        return await roll_out(what, chat(), generate, LIMITS), draw


@asynccontextmanager
async def teacher(answer=reversed_well, refuses=lambda body: None):
    """A server of vLLM with a model that answers by ``answer``; its address, and what it was asked."""
    asked = []

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        asked.append(body)
        if (fault := refuses(body)) is not None:
            return fault
        if "return_token_ids" in body:
            sampled = answer(body["prompt"], None)[: body["max_tokens"]]
            choice = {"token_ids": sampled, "logprobs": {"token_logprobs": [-0.25] * len(sampled)}}
        else:
            logprobs = zip(body["prompt"], told_of(body["prompt"]).tolist(), strict=True)
            told = [{str(token): {"logprob": logprob}} for token, logprob in logprobs]
            choice = {"prompt_logprobs": [None, *told[1:]]}
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}", asked
    finally:
        await runner.cleanup()


async def test_nobody_is_asked_where_nobody_is_named():
    engine = FakeEngine(reversed_badly)
    async with serving(engine) as engines:
        rollout, draw = await rolled(settings(), engines)
        references = References(settings(), chat(), engines)
        assert await references.told(rollout, draw) is rollout
        assert not engine.asked and not references.writes_for("reverse") and references.limit == 0
        await references.close()


async def test_a_reference_reads_the_very_tokens_of_a_rollout():
    own = settings(TRIES, endpoint="http://127.0.0.1:1", model="teacher")
    async with (
        serving(FakeEngine(lambda prompt, rng: chat().answer("abc"))) as engines,
        teacher() as (url, asked),
    ):
        own = settings(TRIES, endpoint=url, model="teacher")
        references = References(own, chat(), engines)
        rollout, draw = await rolled(own, engines)
        told = await references.told(rollout, draw)
        await references.close()
    [body], [before], [sample] = asked, rollout.samples, told.samples
    assert body["prompt"] == before.tokens.tolist() and before.reference is None
    assert rollout.turns == 3 and sample.loss_mask.sum() == 12
    expected = np.where(sample.loss_mask > 0, told_of(body["prompt"]), 0)
    assert sample.reference.dtype == np.float32 and sample.reference.tolist() == expected.tolist()
    assert sample.logprobs.tolist() == before.logprobs.tolist()


async def test_the_policy_teaches_itself_by_a_demonstration():
    """It reads the demonstration, then what it sampled without it; each logprob finds its token."""
    own = settings(TRIES, demonstration=True)
    engine = FakeEngine(lambda prompt, rng: chat().answer("abc"))
    async with serving(engine) as engines:
        references = References(own, chat(), engines)
        rollout, draw = await rolled(own, engines)
        [sample] = (await references.told(rollout, draw)).samples
    [asked] = engine.asked
    prompt, shown = chat().prompt(draw.task.messages), chat().prompt(demonstrated(draw))
    tokens = sample.tokens.tolist()
    assert tokens[: len(prompt)] == prompt and asked == shown + tokens[len(prompt) :]
    sampled = np.flatnonzero(sample.loss_mask)
    assert sample.reference[sampled].tolist() == told_of(asked)[sampled + len(shown) - len(prompt)].tolist()
    assert not sample.reference[sample.loss_mask == 0].any()


def test_a_demonstration_stands_beside_the_question():
    draw = Mix(settings().environments, Seeds(0)).draw(0)
    [question] = draw.task.messages
    [turn] = draw.environment.demonstration(draw.task, Seeds(0).rng(), 0.0)
    [shown] = demonstrated(draw)
    assert shown["role"] == "user" and shown["content"].startswith(question["content"])
    assert f"\n{turn.answer}\n" in shown["content"]


async def test_a_sequence_that_the_prompt_does_not_begin_cannot_be_demonstrated():
    own = settings(demonstration=True)
    async with serving(FakeEngine(reversed_badly)) as engines:
        rollout, draw = await rolled(own, engines)
        another = replace(draw, task=replace(draw.task, messages=(user("something else"),)))
        with pytest.raises(RolloutError, match="does not begin with the task's prompt"):
            await References(own, chat(), engines).told(rollout, another)


async def test_another_temperature_is_not_compared():
    own = settings(demonstration=True)
    async with serving(FakeEngine(reversed_badly)) as engines:
        rollout, draw = await rolled(own, engines)
        rollout.samples[0].temperature = 0.6
        with pytest.raises(BadInput, match=r"sampled at 0\.6"):
            await References(own, chat(), engines).told(rollout, draw)


async def test_a_secret_that_is_not_there(monkeypatch):
    monkeypatch.delenv("TEACHERS_KEY", raising=False)
    own = settings(endpoint="http://127.0.0.1:1", model="teacher", secret="TEACHERS_KEY")
    with pytest.raises(BadInput, match="TEACHERS_KEY is not set"):
        References(own, chat(), None)
    monkeypatch.setenv("TEACHERS_KEY", "a-key")
    await References(own, chat(), None).close()


def test_open_groups_do_not_mix_what_several_references_say():
    """A run that goes on with another one begins the rollouts anew that no batch has yet."""

    def recipe(environment=WORDS, loss=None, **reference):
        algorithm = STACK["algorithm"] | {"loss": loss or {"kl": {}}, "reference": reference or None}
        stack = STACK | {"environments": [environment], "algorithm": algorithm}
        return recipes(Stack.model_validate(stack))["main"]

    big = {"endpoint": "http://a:1", "model": "big"}
    assert recipe(**big) == recipe(**big | {"endpoint": "http://b:1", "timeout": 3.0, "requests": 1})
    others = [recipe(), recipe(**big), recipe(**big | {"model": "bigger"}), recipe(**big, demonstration=True)]
    assert len(set(others)) == 4
    unasked = {"loss": {"type": "aipo"}}
    assert recipe(**unasked) == recipe(**unasked, **big) != recipe(**big)


def micro_batches(trainer):
    return [m for batch in trainer.steps()[2:] for m in batch.micro_batches]


async def test_on_policy_distillation(tmp_path):
    """Every sampled token of every batch has the teacher's logprob, and is trained by it."""
    async with teacher() as (url, asked):
        algorithm = STACK["algorithm"] | {"reference": {"endpoint": url, "model": "t"}, "group_size": 1}
        run = make_run(tmp_path, algorithm=algorithm, environments=[WORDS | {"component": "ref_kl"}])
        trainer = FakeTrainer(run, TOKEN)
        await run_all(run, trainer, FakeEngine(reversed_badly))
    assert len(trainer.steps()) == 8 and len(asked) >= 6 * 16
    for micro in micro_batches(trainer):
        sampled = micro.loss_mask > 0
        assert sampled.any() and set(micro.loss_mask[sampled]) == {REF_KL}
        ends = np.cumsum(micro.lengths)
        told = [
            told_of(micro.tokens[end - n : end].tolist()) for end, n in zip(ends, micro.lengths, strict=True)
        ]
        assert micro.reference[sampled].tolist() == np.concatenate(told)[sampled].tolist()
    steps = trainer.steps()[2:]
    assert all(batch.ref_kl_tokens > 0 and batch.tokens == batch.ce_tokens == 0 for batch in steps)


async def test_distillation_from_a_teachers_answers(tmp_path):
    async with teacher() as (url, asked):
        algorithm = STACK["algorithm"] | {"reference": {"endpoint": url, "model": "t"}}
        own = WORDS | {"component": "ce", "sampled_by": "reference"}
        run = make_run(tmp_path, algorithm=algorithm, environments=[own])
        trainer, engine = FakeTrainer(run, TOKEN), FakeEngine(reversed_badly)
        await run_all(run, trainer, engine)
    assert all("return_token_ids" in body for body in asked) and len(asked) >= 6 * 16
    evaluated = 2 * 2 * STACK["evaluate"]["prompts"]
    assert len(engine.requests) == evaluated, "the policy was asked for what the teacher writes"
    for micro in micro_batches(trainer):
        assert set(micro.loss_mask) == {0, CE} and micro.reference is None
    assert all(m["reward"] == 1.0 and m["staleness_max"] <= 1 for m in lines(run.metrics)[2:])
    assert all(batch.ce_tokens > 0 and batch.tokens == 0 for batch in trainer.steps()[2:])


async def test_what_a_reference_refuses_is_dropped_and_counted(tmp_path):
    def refuses(body):
        long = len(body["prompt"]) % 5 == 0
        return web.Response(status=400, text="it is too long") if long else None

    async with teacher(refuses=refuses) as (url, _):
        algorithm = COMPARED | {"reference": {"endpoint": url, "model": "t"}}
        run = make_run(tmp_path, algorithm=algorithm)
        await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    dropped = [event for event in lines(run.events) if event["event"] == "dropped"]
    assert dropped and {event["reason"] for event in dropped} == {"failed"}
    assert "its reference" in dropped[0]["error"] and "it is too long" in dropped[0]["error"]


@pytest.mark.parametrize(
    ("status", "kind", "why"), [(404, BadInput, "it is unknown"), (503, OrchestratorError, "did not answer")]
)
async def test_a_teacher_that_does_not_write_ends_the_run(tmp_path, status, kind, why):
    """It is told, and not dropped group by group: beside another environment the run would go on without."""

    def refuses(body):
        return web.Response(status=status, text="it is unknown")

    async with teacher(refuses=refuses) as (url, _):
        reference = {"endpoint": url, "model": "t", "timeout": 0.5}
        taught = WORDS | {"name": "taught", "component": "ce", "sampled_by": "reference"}
        run = make_run(
            tmp_path,
            algorithm=STACK["algorithm"] | {"reference": reference},
            environments=[taught, WORDS | {"weight": 3}],
            sampling={"max_tokens": 9, "timeout": 0.3},
        )
        with pytest.raises(ExceptionGroup) as caught:
            await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    cause = first_cause(caught.value)
    assert isinstance(cause, kind) and url in str(cause) and why in str(cause)


async def test_what_a_teacher_refuses_to_write_is_a_failed_rollout():
    async with (
        serving(FakeEngine(reversed_badly)) as engines,
        teacher(refuses=lambda body: web.Response(status=400, text="too long")) as (url, _),
    ):
        own = settings(WORDS | {"component": "ce", "sampled_by": "reference"}, endpoint=url, model="t")
        references = References(own, chat(), engines)
        with pytest.raises(RolloutError, match=r"its reference: .* too long"):
            await rolled(own, references)
        await references.close()


async def test_sequences_leave_room_for_the_demonstration(tmp_path):
    """Those that would not fit into the engine with it are shorter, and none is lost."""
    tries = TRIES | {"component": "ref_kl"}
    algorithm = STACK["algorithm"] | {"reference": {"demonstration": True}}
    engine = FakeEngine(lambda prompt, rng: chat().answer("abc"))
    own = settings(TRIES, demonstration=True)
    references = References(own, chat(), None)
    draw = Mix(own.environments, Seeds(0)).draw(0)
    more = len(chat().prompt(demonstrated(draw))) - len(chat().prompt(draw.task.messages)) + 1
    assert references.reads_more(draw) == more > 1
    longest = len(chat().prompt(draw.task.messages)) + more + 20
    run = make_run(
        tmp_path,
        algorithm=algorithm,
        environments=[tries],
        inference={"max_model_length": longest},
        evaluate={"prompts": 2},
        stages=[{"name": "main", "type": "rl", "steps": 2}],
    )
    await run_all(run, FakeTrainer(run, TOKEN), engine)
    assert engine.asked and max(map(len, engine.asked)) < longest
    assert not [event for event in lines(run.events) if event["event"] == "dropped"]


def test_a_server_of_its_own_shortens_nothing():
    for own in (settings(TRIES), settings(TRIES, endpoint="http://a:1", model="t", demonstration=True)):
        draw = Mix(own.environments, Seeds(0)).draw(0)
        assert References(own, chat(), None).reads_more(draw) == 0


async def test_a_reference_that_is_not_there_ends_the_run(tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    reference = {"endpoint": url, "model": "t", "timeout": 0.2}
    run = make_run(tmp_path, algorithm=COMPARED | {"reference": reference})
    with pytest.raises(ExceptionGroup) as caught:
        await run_all(run, FakeTrainer(run, TOKEN), FakeEngine(reversed_badly))
    cause = first_cause(caught.value)
    assert isinstance(cause, OrchestratorError) and url in str(cause)

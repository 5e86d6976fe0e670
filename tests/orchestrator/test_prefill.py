"""Prompts that are prefilled on one engine and answered on another: which ones, with which weights."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from fake_engine import FakeEngine
from small_runs import reversed_well

from stackrl.runtime.inference.client import EngineError, EngineLost
from stackrl.runtime.orchestrator import prefill
from stackrl.runtime.orchestrator.engines import Engines
from stackrl.runtime.orchestrator.errors import OrchestratorError
from stackrl.runtime.transport.messages import Version
from stackrl.schemas.inference import PullWeights

LIFE = "stackrl.runtime.orchestrator.engine_life"
PROMPT = [1, 2, 3, 4]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(f"{LIFE}.RETRY_AFTER", 0.01)
    monkeypatch.setattr(f"{LIFE}.HEALTH_EVERY", 0.05)


def pool(name, count, **options):
    return [FakeEngine(reversed_well, url=f"http://{name}-{i}", pool=name, **options) for i in range(count)]


@asynccontextmanager
async def served(*fakes, kv="keep", silence=5.0):
    engines = Engines(fakes, 8, PullWeights(timeout=20.0, kv=kv), silence=silence)
    task = asyncio.create_task(engines.serve(lambda name, **fields: None, 30.0))
    yield engines
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def update(engines, step):
    engines.aim(Version(1, step), "http://weights")
    await engines.holding(Version(1, step), 30.0)


async def ask(engines, group=0, tokens=PROMPT, max_tokens=4):
    async with engines.serving(group) as generate:
        return await generate(
            tokens, max_tokens=max_tokens, temperature=1.0, seed=0, stop=[], request="it", routes_from=0
        )


async def until(condition, within=30.0):
    async with asyncio.timeout(within):
        while not condition():  # noqa: ASYNC110 (many kinds of things are waited for)
            await asyncio.sleep(0.005)


async def test_a_prompt_is_prefilled_and_answered_with_one_version():
    [first], [second] = pool("prefill", 1), pool("decode", 1)
    async with served(first, second) as engines:
        await update(engines, 1)
        reply = await ask(engines)
    assert reply.prefilled == Version(1, 1) == reply.spans[0].version
    [prompt], [request] = first.prefills, second.requests
    assert prompt["tokens"] == request["tokens"] == PROMPT
    assert prompt["salt"] == request["salt"] == "1.1"
    assert not first.requests and not second.prefills


async def test_a_group_goes_to_one_prefill_engine_until_that_has_much_more_to_do():
    prefills = pool("prefill", 2)
    [decode] = pool("decode", 1)
    decode.transfer_delay = 0.2
    async with served(*prefills, decode) as engines:
        await update(engines, 1)
        for group in (0, 1, 0, 1):
            await ask(engines, group)
        assert [len(engine.prefills) for engine in prefills] == [2, 2]
        await asyncio.gather(*(ask(engines, 0) for _ in range(prefill.HOME + 3)))
        assert len(prefills[0].prefills) > 3 and len(prefills[1].prefills) > 2


async def test_nothing_is_updated_while_a_prompt_is_on_its_way():
    """Two engines that are updated at once would otherwise wait for each other, and label keys wrongly."""
    [first], [second] = pool("prefill", 1), pool("decode", 1)
    second.transfer_delay = 0.3
    async with served(first, second) as engines:
        await update(engines, 1)
        asked = asyncio.create_task(ask(engines))
        await until(lambda: second.requests)
        await update(engines, 2)
        assert second.fetched, "the update waited for the keys"
        reply = await asked
        late = await ask(engines)
    assert reply.prefilled == Version(1, 1)
    assert late.prefilled == Version(1, 2) and late.spans[0].version == Version(1, 2)
    assert [request["salt"] for request in first.prefills] == ["1.1", "1.2"]


async def test_a_prompt_that_takes_too_long_is_given_up_for_the_update_and_prefilled_again(monkeypatch):
    monkeypatch.setattr(f"{LIFE}.TRANSFER_LIMIT", 0.1)
    [first], [second] = pool("prefill", 1), pool("decode", 1)
    second.transfer_delay = 3600
    async with served(first, second) as engines:
        await update(engines, 1)
        asked = asyncio.create_task(ask(engines))
        await until(lambda: second.requests)
        await asyncio.sleep(0.05)
        second.transfer_delay = 0.0
        engines.aim(Version(1, 2), "http://weights")
        reply = await asked
    assert reply.prefilled == Version(1, 2)
    assert [request["salt"] for request in first.prefills] == ["1.1", "1.2"]


async def test_a_prompt_that_was_prefilled_with_other_weights_is_not_answered():
    [first], [second] = pool("prefill", 1), pool("decode", 1)
    async with served(first, second) as engines:
        await update(engines, 1)

        def changes(request):
            first.held = Version(1, 2 if len(first.prefills) == 1 else 1)

        first.fault = changes
        reply = await ask(engines)
    assert reply.prefilled == Version(1, 1)
    assert len(first.prefills) == 2 and len(second.requests) == 1


async def test_the_answer_comes_from_another_prefill_engine_where_one_dies_with_the_keys():
    prefills, [decode] = pool("prefill", 2), pool("decode", 1)
    async with served(*prefills, decode) as engines:
        await update(engines, 1)

        def dies(prefilled):
            if prefilled.transfer["url"] == "http://prefill-0":
                prefills[0].die()
                raise EngineError("the keys did not come")

        decode.fault_of_transfer = dies
        reply = await ask(engines)
        assert reply.prefilled == Version(1, 1) and len(prefills[1].prefills) == 1
        assert "prefill-0 lost" in engines.states()


async def test_a_turn_does_not_wait_for_keys_from_an_engine_that_is_lost():
    prefills, [decode] = pool("prefill", 2), pool("decode", 1)
    decode.transfer_delay = 3600
    async with served(*prefills, decode) as engines:
        await update(engines, 1)
        asked = asyncio.create_task(ask(engines))
        await until(lambda: decode.requests)
        await asyncio.sleep(0.05)
        decode.transfer_delay = 0.0
        prefills[0].die()
        await asked
    assert [len(engine.prefills) for engine in prefills] == [1, 1]


async def test_a_prefill_engine_that_was_started_again_gets_its_weights_before_it_is_asked():
    [first], [second] = pool("prefill", 1), pool("decode", 1)
    async with served(first, second) as engines:
        await update(engines, 1)
        first.die()
        await until(lambda: "prefill-0 lost" in engines.states())
        asked = asyncio.create_task(ask(engines))
        await asyncio.sleep(0.05)
        first.come_back()
        reply = await asked
    assert reply.prefilled == Version(1, 1) and first.updates[-1][0] == Version(1, 1)


async def test_a_lost_decode_engine_ends_the_turn():
    [first], [second] = pool("prefill", 1), pool("decode", 1, token_delay=0.05)
    async with served(first, second) as engines:
        await update(engines, 1)

        async def asking():
            async with asyncio.timeout(20):
                await ask(engines)

        asked = asyncio.create_task(asking())
        await until(lambda: second.running)
        second.die()
        with pytest.raises(EngineLost):
            await asked


async def test_a_decode_engine_that_was_lost_forgets_prompts_that_it_may_have_read_too_late():
    [first], [second] = pool("prefill", 1), pool("decode", 1)
    async with served(first, second, silence=0.1) as engines:
        await update(engines, 1)
        second.hang()
        await until(lambda: "decode-0 lost" in engines.states())
        second.go_on()
        await until(lambda: second.forgot)
        assert (await ask(engines)).prefilled == Version(1, 1)
    assert not first.forgot


async def test_a_split_that_moves_nothing_is_an_error():
    [first], [second] = pool("prefill", 1), pool("decode", 1)

    async def none():
        return 0.0

    second.fetched_bytes = none
    async with served(first, second) as engines:
        await update(engines, 1)
        with pytest.raises(OrchestratorError, match=r"fetched none of their keys .* roles\.inference"):
            for _ in range(prefill.PROOF):
                await ask(engines)
    assert len(second.requests) == prefill.PROOF


async def test_a_prompt_that_no_engine_can_hand_over_is_given_up():
    [first], [second] = pool("prefill", 1), pool("decode", 1)

    def refuses(prefilled):
        raise EngineError("the keys did not come")

    second.fault_of_transfer = refuses
    async with served(first, second) as engines:
        await update(engines, 1)
        with pytest.raises(EngineError, match=f"{prefill.TRIES} times in vain: the keys did not come"):
            await ask(engines)
    assert Counter(len(engine.prefills) for engine in (first, second)) == {prefill.TRIES: 1, 0: 1}


async def test_a_prefill_engine_keeps_its_cache_at_an_update_whatever_the_others_do():
    """vLLM cannot empty it while somebody may fetch from it; the salt keeps versions apart."""
    [first], [second] = pool("prefill", 1), pool("decode", 1)
    said = {}
    for engine in (first, second):
        load = engine.update

        async def noted(version, source, kv, timeout, engine=engine, load=load):
            said[engine.pool] = kv
            return await load(version, source, kv, timeout)

        engine.update = noted
    async with served(first, second, kv="recompute") as engines:
        await update(engines, 1)
    assert said == {"prefill": "keep", "decode": "recompute"}


async def test_requests_wait_until_an_engine_of_each_pool_serves():
    [first], [second] = pool("prefill", 1, update_delay=0.2), pool("decode", 1)
    async with served(first, second) as engines:
        await until(lambda: engines.serving_now)
        engines.aim(Version(1, 1), "http://weights")
        await until(lambda: second.updates)
        assert not engines.serving_now
        await until(lambda: engines.serving_now)

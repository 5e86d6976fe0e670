"""What an engine tells of itself: read from a text as vLLM's, and of the real one while it works."""

from __future__ import annotations

import asyncio

import pytest

from stackrl.runtime.inference.engine_metrics import EngineMetrics, read_metrics

TEXT = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="policy"} 3.0
vllm:num_requests_running{engine="1",model_name="policy"} 2.0
vllm:num_requests_waiting{engine="0",model_name="policy"} 4.0
vllm:num_requests_waiting{engine="1",model_name="policy"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="capacity"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="policy",reason="deferred"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="policy"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="policy"} 0.5
vllm:num_preemptions_total{engine="0",model_name="policy"} 7.0
vllm:num_preemptions_created{engine="0",model_name="policy"} 1.7e+09
vllm:prefix_cache_queries_total{engine="0",model_name="policy"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="policy"} 64.0
vllm:external_prefix_cache_hits_total{engine="0",model_name="policy"} 32.0
vllm:nixl_bytes_transferred_bucket{engine="0",le="1e+06",model_name="policy"} 1.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="policy"} 1.31e+06
process_cpu_seconds_total 12.0
"""


def test_copies_in_one_server_are_taken_together():
    assert read_metrics(TEXT) == EngineMetrics(
        cache_use=0.5,
        running=5,
        queued=1,
        arriving=3,
        preemptions=7,
        prompt_tokens=100,
        prompt_hits=64,
        fetched_tokens=32,
        fetched_bytes=1.31e6,
    )


def test_another_servers_text_is_refused_with_what_it_lacks():
    with pytest.raises(ValueError, match="tells no vllm:num_requests_running"):
        read_metrics(TEXT.replace("vllm:num_requests_running", "other:num_requests_running"))


@pytest.mark.slow
async def test_the_real_engine_tells_how_busy_it_is(client):
    before = await client.metrics()
    assert before.running == before.queued == 0 and before.cache_use < 0.01
    prompt = list(range(5, 140))  # only whole blocks of the cache, 128 tokens, are found again

    async def ask(number):
        await client.generate(
            prompt,
            max_tokens=110,
            temperature=1.0,
            seed=number,
            salt="metrics",
            stop_token_ids=[],
            request_id=f"metrics-{number}",
        )

    asking = asyncio.gather(*map(ask, range(24)))
    seen = []
    async with asyncio.timeout(120):
        while not asking.done():
            seen.append(await client.metrics())
            await asyncio.sleep(0.02)
    await asking
    assert max(look.running for look in seen) == 16, "max_requests of the server"
    assert any(look.queued for look in seen) and 0 < max(look.cache_use for look in seen) <= 1
    after = await client.metrics()
    assert after.prompt_tokens - before.prompt_tokens == 24 * len(prompt)
    assert after.prompt_hits > before.prompt_hits and after.fetched_bytes == 0

"""The batch server and its client, over a real socket."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from small_runs import TOKEN, free_port

from stackrl.runtime.orchestrator.batching import Layout, Place, build
from stackrl.runtime.orchestrator.packing import causal_cost
from stackrl.runtime.transport import batches
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.batches import MAX_REQUEST_BYTES, BatchClient, BatchServer, TransportError
from stackrl.runtime.transport.messages import Ack, End, Hello, Sample, Version, encode


@pytest.fixture
def url():
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
async def server(url):
    server = BatchServer(url, TOKEN, incarnation=2, index=5)
    await server.start()
    yield server
    await server.close()


def greet(client, **changes):
    client.hello(
        **{"incarnation": 2, "index": 5, "version": Version(2, 3), "weights": "w", "timeout": 5} | changes
    )


def made(index=5, ranks=1, documents=4):
    samples = [
        Sample(
            rollout=f"0-{i}",
            group=0,
            environment="e",
            tokens=np.arange(3 + i, dtype="<i4"),
            loss_mask=np.array([0] + [1] * (2 + i), dtype="|u1"),
            logprobs=np.zeros(3 + i, dtype="<f4"),
        )
        for i in range(documents)
    ]
    place = Place(2, index, 3, "main", 0, checkpoint=False, last_of_stage=False)
    return build(samples, place, Layout(64, ranks, causal_cost(32)))


async def in_thread(function, *arguments, **options):
    return await asyncio.to_thread(function, *arguments, **options)


async def test_a_batch_from_hello_to_durable(server, url):
    with BatchClient(url, TOKEN, 0, 1) as client:
        await in_thread(greet, client)
        hello = await server.hello(5)
        assert (hello.version, hello.weights, hello.ranks) == (Version(2, 3), "w", 1)
        fetching = asyncio.create_task(in_thread(client.fetch, 5))
        await asyncio.sleep(0.05)
        assert not fetching.done(), "it waits for the batch"
        [batch] = made()
        await server.offer([batch])
        got = await fetching
        assert got.index == 5 and got.tokens == batch.tokens == 14
        assert got.micro_batches[0].tokens.tolist() == batch.micro_batches[0].tokens.tolist()

        again = await in_thread(client.fetch, 5)
        assert again.tokens == got.tokens, "until it is applied, it can be had again"

        said = {"index": 5, "step": 3, "version": Version(2, 4)}
        await in_thread(client.ack, **said, state="applied", metrics={"loss": 1.5})
        assert (await server.applied(fetch=5, step=5)).metrics == {"loss": 1.5}
        with pytest.raises(TransportError, match=r"409: batch 5 is applied; the next one is 6"):
            await in_thread(client.fetch, 5)
        await in_thread(client.ack, **said, state="durable")
        assert (await server.durable(5, 5)).state == "durable"

        ending = asyncio.create_task(server.end("finished", 5))
        assert await in_thread(client.fetch, 6) == End(reason="finished")
        await ending


async def test_a_long_poll_is_repeated(server, url, monkeypatch):
    monkeypatch.setattr(batches, "LONG_POLL", 0.1)
    with BatchClient(url, TOKEN, 0, 1) as client:
        await in_thread(greet, client)
        fetching = asyncio.create_task(in_thread(client.fetch, 5))
        await asyncio.sleep(0.35)
        await server.offer(made())
        assert (await fetching).index == 5


async def test_a_batch_is_waited_for_until_the_orchestrator_is_silent(server, url, monkeypatch):
    monkeypatch.setattr(batches, "LONG_POLL", 0.1)
    with BatchClient(url, TOKEN, 0, 1) as client:
        await in_thread(greet, client)
        fetching = asyncio.create_task(in_thread(client.fetch, 5, silence=0.6))
        await asyncio.sleep(1.5)
        assert not fetching.done(), "it is told all the time that there is none yet"
        await server.close()
        with pytest.raises(TransportError, match=r"did not answer GET /batches/5\?rank=0 within 1 s"):
            await asyncio.wait_for(fetching, 10)


async def test_all_ranks_are_waited_for_and_the_missing_one_is_named(server, url):
    with BatchClient(url, TOKEN, 0, 2) as first, BatchClient(url, TOKEN, 1, 2) as second:
        await in_thread(greet, first)
        with pytest.raises(TransportError, match=r"trainer rank 1 did not say hello within 0 s"):
            await server.hello(0.1)
        await in_thread(greet, second, weights="")
        assert (await server.hello(1)).rank == 0
        offered = made(ranks=2)
        await server.offer(offered)
        got = await in_thread(first.fetch, 5)
        with pytest.raises(TransportError, match=r"rank 1 did not fetch batch 5 .*last heard 0 s ago"):
            await server.applied(fetch=0.1, step=5)
        other = await in_thread(second.fetch, 5)
        assert {got.rank, other.rank} == {0, 1} and got.tokens == other.tokens
        with pytest.raises(TransportError, match=r"rank 0 did not acknowledge batch 5 as applied"):
            await server.applied(fetch=1, step=0.1)
        with pytest.raises(TransportError, match=r"ranks 0, 1 did not ask for more"):
            await server.end("finished", 0.1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"incarnation": 1}, "incarnation 1 of the trainer; this run is at 2"),
        ({"index": 4}, "resumes at optimizer step 4, the orchestrator at 5"),
    ],
)
async def test_a_trainer_of_another_life_is_refused(server, url, changes, reason):
    with BatchClient(url, TOKEN, 0, 1) as client, pytest.raises(TransportError, match=f"409: .*{reason}"):
        await in_thread(greet, client, **changes)


async def test_ranks_must_agree_on_their_number(server, url):
    with BatchClient(url, TOKEN, 0, 1) as client, BatchClient(url, TOKEN, 1, 2) as other:
        await in_thread(greet, client)
        with pytest.raises(TransportError, match="409"):
            await in_thread(greet, other)


@pytest.mark.parametrize(
    "header",
    [{}, bearer("wrong"), bearer(TOKEN + "x"), {"Authorization": TOKEN}, {b"Authorization": b"Bearer \xff"}],
)
@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/hello"), ("GET", "/batches/5?rank=0"), ("POST", "/acks"), ("GET", "/")]
)
async def test_every_route_needs_the_token(server, url, method, path, header):
    async with httpx.AsyncClient(base_url=url) as http:
        response = await http.request(method, path, headers=header)
    assert response.status_code == 401 and TOKEN not in response.text


async def test_garbage_and_oversized_messages_are_refused_and_change_nothing(server, url):
    async with httpx.AsyncClient(base_url=url, headers=bearer(TOKEN)) as http:
        garbage = await http.post("/hello", content=b"\x00garbage")
        wrong_kind = await http.post("/hello", content=encode(End(reason="x")))
        too_big = await http.post("/acks", content=b"x" * (MAX_REQUEST_BYTES + 1))
        outside = Hello(incarnation=2, rank=3, ranks=2, index=5, version=Version(2, 3))
        no_such_rank = await http.post("/hello", content=encode(outside))
        stranger = await http.get("/batches/5?rank=0")
        no_number = await http.get("/batches/x?rank=0")
    assert garbage.status_code == 400 and "not a Hello" in garbage.text
    assert wrong_kind.status_code == 400 and "'End' came where Hello" in wrong_kind.text
    assert too_big.status_code == 413
    assert no_such_rank.status_code == 400
    assert stranger.status_code == 409 and "has not said hello" in stranger.text
    assert no_number.status_code == 400
    with BatchClient(url, TOKEN, 0, 1) as client:
        await in_thread(greet, client)
    assert (await server.hello(1)).ranks == 1


async def test_what_was_never_served_cannot_be_acknowledged(server, url):
    with BatchClient(url, TOKEN, 0, 1) as client:
        await in_thread(greet, client)
        for index in (5, 9):
            with pytest.raises(TransportError, match=f"409: batch {index} was never served"):
                await in_thread(client.ack, index=index, step=3, state="applied", version=Version(2, 4))
    async with httpx.AsyncClient(base_url=url, headers=bearer(TOKEN)) as http:
        old = Ack(incarnation=1, index=5, step=3, rank=0, state="applied", version=Version(1, 4))
        response = await http.post("/acks", content=encode(old))
        assert response.status_code == 409 and "incarnation 1" in response.text


def test_a_client_names_an_orchestrator_that_is_not_there(url):
    silence = r"the orchestrator did not answer POST /hello within 1 s"
    with BatchClient(url, TOKEN, 0, 1) as client, pytest.raises(TransportError, match=silence):
        greet(client, timeout=1)

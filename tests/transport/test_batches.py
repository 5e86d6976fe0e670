"""The batch server and its client, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib

import httpx
import msgspec
import numpy as np
import pytest
from loopback import free_port
from small_runs import TOKEN

from stackrl.runtime.orchestrator.batching import Layout, Place, build
from stackrl.runtime.orchestrator.packing import causal_cost
from stackrl.runtime.transport import batch_client, batches
from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.batch_client import BatchClient
from stackrl.runtime.transport.batches import MAX_REQUEST_BYTES, BatchServer, TransportError
from stackrl.runtime.transport.messages import Ack, End, Hello, Logprobs, Sample, Version, encode


@pytest.fixture
def url():
    return f"http://127.0.0.1:{free_port()}"


@pytest.fixture
async def server(url):
    server = BatchServer(url, TOKEN, incarnation=2, index=5)
    await server.start()
    yield server
    await server.close()


class Client(BatchClient):
    """A rank that says of itself what ``hello`` says."""

    def __init__(self, url, rank, ranks, **changes):
        fields = {"incarnation": 2, "index": 5, "version": Version(2, 3), "weights": "" if rank else "w"}
        self.said = Hello(rank=rank, ranks=ranks, **fields | changes)
        super().__init__(url, TOKEN, lambda: self.said)

    def at(self, **changes):
        """The rank is somewhere else now."""
        self.said = msgspec.structs.replace(self.said, **changes)


def greet(client, timeout=20):
    client.hello(timeout)


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
    with Client(url, 0, 1) as client:
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
        await server.fetched(5)
        assert (await server.applied(5)).metrics == {"loss": 1.5}
        with pytest.raises(TransportError, match=r"409: batch 5 is applied; the next one is 6"):
            await in_thread(client.fetch, 5)
        await in_thread(client.ack, **said, state="durable")
        await server.durable(5, 5)

        ending = asyncio.create_task(server.end("finished", 5))
        assert await in_thread(client.fetch, 6) == End(reason="finished")
        await ending


async def test_a_long_poll_is_repeated(server, url, monkeypatch):
    monkeypatch.setattr(batches, "LONG_POLL", 0.1)
    with Client(url, 0, 1) as client:
        await in_thread(greet, client)
        fetching = asyncio.create_task(in_thread(client.fetch, 5))
        await asyncio.sleep(0.35)
        await server.offer(made())
        assert (await fetching).index == 5


@pytest.mark.slow
async def test_a_batch_is_waited_for_until_the_orchestrator_is_silent(server, url, monkeypatch):
    monkeypatch.setattr(batches, "LONG_POLL", 0.1)
    with Client(url, 0, 1) as client:
        await in_thread(greet, client)
        fetching = asyncio.create_task(in_thread(client.fetch, 5, silence=0.6))
        await asyncio.sleep(1.5)
        assert not fetching.done(), "it is told all the time that there is none yet"
        await server.close()
        with pytest.raises(TransportError, match=r"did not answer GET /batches/5\?rank=0 within 1 s"):
            await asyncio.wait_for(fetching, 30)


async def test_all_ranks_are_waited_for_and_the_missing_one_is_named(server, url):
    with Client(url, 0, 2) as first, Client(url, 1, 2) as second:
        await in_thread(greet, first)
        with pytest.raises(TransportError, match=r"trainer rank 1 did not say hello within 0 s"):
            await server.hello(0.1)
        await in_thread(greet, second)
        assert (await server.hello(1)).rank == 0
        offered = made(ranks=2)
        await server.offer(offered)
        got = await in_thread(first.fetch, 5)
        with pytest.raises(TransportError, match=r"rank 1 did not fetch batch 5 .*last heard 0 s ago"):
            await server.fetched(0.1)
        other = await in_thread(second.fetch, 5)
        assert {got.rank, other.rank} == {0, 1} and got.tokens == other.tokens
        with pytest.raises(TransportError, match=r"rank 0 did not acknowledge batch 5 as applied"):
            await server.applied(0.1)
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
    with (
        Client(url, 0, 1, **changes) as client,
        pytest.raises(TransportError, match=f"409: .*{reason}"),
    ):
        await in_thread(greet, client)


async def test_ranks_must_agree_on_their_number(server, url):
    with Client(url, 0, 1) as client, Client(url, 1, 2) as other:
        await in_thread(greet, client)
        with pytest.raises(TransportError, match="409"):
            await in_thread(greet, other)


@pytest.mark.parametrize(
    "header",
    [{}, bearer("wrong"), bearer(TOKEN + "x"), {"Authorization": TOKEN}, {b"Authorization": b"Bearer \xff"}],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/hello"),
        ("GET", "/batches/5?rank=0"),
        ("POST", "/acks"),
        ("POST", "/logprobs"),
        ("GET", "/"),
    ],
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
    assert stranger.status_code == 428 and "has not said hello" in stranger.text
    assert no_number.status_code == 400
    with Client(url, 0, 1) as client:
        await in_thread(greet, client)
    assert (await server.hello(1)).ranks == 1


async def test_what_is_no_http_is_a_line_in_the_log_and_no_traceback(server, url, caplog):
    host, port = url.removeprefix("http://").split(":")
    for garbage in (
        b"\x80\x04\x95pickle\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        await reader.read()
        writer.close()
    assert not [record for record in caplog.records if record.exc_info]
    assert [record.levelname for record in caplog.records if "127.0.0.1" in record.getMessage()]


async def test_what_was_never_served_cannot_be_acknowledged(server, url):
    with Client(url, 0, 1) as client:
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
    with Client(url, 0, 1) as client, pytest.raises(TransportError, match=silence):
        greet(client, timeout=1)


@contextlib.asynccontextmanager
async def restarted(url, **facts):
    """The server of an orchestrator that was killed and started again."""
    server = BatchServer(url, TOKEN, incarnation=2, resumed=True, **facts)
    await server.start()
    yield server
    await server.close()


async def killed(server):
    """Connections break; nothing is said."""
    await server.close()


@pytest.mark.slow
async def test_a_rank_that_waits_greets_a_restarted_orchestrator_by_itself(server, url):
    with Client(url, 0, 1) as client:
        await in_thread(greet, client)
        fetching = asyncio.create_task(in_thread(client.fetch, 5))
        await asyncio.sleep(0.1)
        await killed(server)
        async with restarted(url, index=5) as new:
            hello = await new.hello(5)
            assert (hello.index, hello.taken, hello.weights) == (5, False, "w")
            await new.offer(made())
            assert (await fetching).index == 5


async def test_a_batch_in_hand_counts_as_fetched_and_is_not_had_twice(server, url):
    """Rank 1 had not fetched it: it gets the same one from the restarted orchestrator."""
    with Client(url, 0, 2) as first, Client(url, 1, 2) as second:
        await in_thread(greet, first)
        await in_thread(greet, second)
        await server.offer(made(ranks=2))
        await in_thread(first.fetch, 5)
        await killed(server)
        async with restarted(url, index=5, sealed=True) as new:
            await in_thread(first.hello, 5)
            fetching = asyncio.create_task(in_thread(second.fetch, 5))
            assert (await new.hello(5)).taken
            await new.offer(made(ranks=2))
            assert (await fetching).rank == 1
            first.at(index=6, version=Version(2, 4))
            said = {"index": 5, "step": 3, "version": Version(2, 4), "state": "applied"}
            await in_thread(first.ack, **said, metrics={"loss": 0.25})
            await new.fetched(1)
            assert (await new.applied(1)).metrics == {"loss": 0.25}


async def test_a_step_that_was_acknowledged_to_the_dead_is_acknowledged_again(server, url):
    with Client(url, 0, 1) as client:
        await in_thread(greet, client)
        await server.offer(made())
        await in_thread(client.fetch, 5)
        client.at(index=6, version=Version(2, 4))
        said = {"index": 5, "step": 3, "version": Version(2, 4), "state": "applied"}
        await in_thread(client.ack, **said, metrics={"loss": 0.25})
        await killed(server)
        async with restarted(url, index=5, sealed=True) as new:
            fetching = asyncio.create_task(in_thread(client.fetch, 6))
            hello = await new.hello(5)
            assert (hello.index, hello.version) == (6, Version(2, 4))
            assert (await new.repeated(5, 5)).metrics == {"loss": 0.25}
            new.go_on()
            await new.offer(made(index=6))
            assert (await fetching).index == 6


async def test_an_acknowledgement_on_its_way_reaches_the_restarted_orchestrator(server, url):
    with Client(url, 0, 1) as client:
        await in_thread(greet, client)
        await server.offer(made())
        await in_thread(client.fetch, 5)
        await killed(server)
        said = {
            "index": 5,
            "step": 3,
            "version": Version(2, 4),
            "state": "applied",
            "metrics": {"loss": 0.25},
        }
        acknowledging = asyncio.create_task(in_thread(client.ack, **said))
        await asyncio.sleep(0.1)
        async with restarted(url, index=5, sealed=True) as new:
            await acknowledging
            assert (await new.hello(5)).taken, "its own greeting still says that it works on it"
            await new.offer(made())
            await new.fetched(1)
            assert (await new.applied(1)).metrics == {"loss": 0.25}


@pytest.mark.parametrize(
    ("rank", "index", "taken", "sealed", "fits"),
    [
        (0, 5, False, False, True),
        (0, 6, False, True, True),
        (0, 6, False, False, False),
        (0, 4, True, True, True),
        (0, 4, False, True, False),
        (1, 6, False, False, True),
        (1, 4, True, False, True),
        (1, 7, False, True, False),
    ],
)
async def test_which_ranks_fit_a_restarted_orchestrator(url, rank, index, taken, sealed, fits):
    hello = Hello(incarnation=2, rank=rank, ranks=2, index=index, version=Version(2, 3), taken=taken)
    async with (
        restarted(url, index=5, sealed=sealed),
        httpx.AsyncClient(base_url=url, headers=bearer(TOKEN)) as http,
    ):
        response = await http.post("/hello", content=encode(hello))
    assert response.status_code == (201 if fits else 409)


async def test_a_checkpoint_that_the_trainer_saved_before_is_known_from_its_greeting(url):
    async with restarted(url, index=6) as new:
        with Client(url, 0, 1, index=6, saved=6) as client:
            await in_thread(greet, client)
            await new.durable(5, 1)
            with pytest.raises(TransportError, match="did not acknowledge batch 6 as durable"):
                await new.durable(6, 0.1)


async def test_nobody_waits_for_long_for_an_orchestrator_that_has_ended_the_run(server, url, monkeypatch):
    """It may have known already what an acknowledgement on its way was to tell."""
    monkeypatch.setattr(batch_client, "PARTING", 1.0)
    with Client(url, 0, 1) as client:
        await in_thread(greet, client)
        await server.offer(made())
        await in_thread(client.fetch, 5)
        said = {"index": 5, "step": 3, "version": Version(2, 4)}
        await in_thread(client.ack, **said, state="applied")
        await server.applied(1)
        request = client._http.request

        def lost_on_the_way(method, path, **options):
            if path == "/acks":
                raise httpx.ConnectError("nobody is there")
            return request(method, path, **options)

        monkeypatch.setattr(client._http, "request", lost_on_the_way)
        acknowledging = asyncio.create_task(in_thread(client.ack, **said, state="durable"))
        await asyncio.sleep(0.1)
        ending = asyncio.create_task(server.end("finished", 5))
        assert await in_thread(client.fetch, 6) == End(reason="finished")
        await ending
        with pytest.raises(TransportError, match="did not answer POST /acks"):
            async with asyncio.timeout(30):
                await acknowledging


async def test_the_end_with_a_save_is_acknowledged_after_it(server, url):
    with Client(url, 0, 1) as client:
        await in_thread(greet, client)
        await server.offer(made())
        await in_thread(client.fetch, 5)
        said = {"index": 5, "step": 3, "version": Version(2, 4)}
        await in_thread(client.ack, **said, state="applied")
        await server.applied(1)
        ending = asyncio.create_task(server.end("stopped", 5, save=True))
        assert await in_thread(client.fetch, 6) == End(reason="stopped", save=True)
        await ending
        await in_thread(client.ack, **said, state="durable")
        await server.durable(5, 1)


async def test_logprobs_arrive_and_are_bounded(server, url, monkeypatch):
    came = []
    server.on_logprobs = came.append
    report = Logprobs(
        incarnation=2,
        index=5,
        rank=0,
        documents=["0-0", "0-1"],
        lengths=np.array([2, 1], dtype="<i4"),
        logprobs=np.array([-1, -2, -3], dtype="<f4"),
    )
    with Client(url, 0, 1) as client:
        await in_thread(client.logprobs, report)  # greets by itself
        monkeypatch.setattr(batches, "MAX_LOGPROBS_BYTES", 20)
        with pytest.raises(TransportError, match="413"):
            await in_thread(client.logprobs, report)
    [message] = came
    assert message.documents == ["0-0", "0-1"] and message.logprobs.tolist() == [-1, -2, -3]

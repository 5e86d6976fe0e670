"""A run whose roles are the real servers without a model: what a stranger on the network can reach.

`python attacked_run.py ROLE RUN` is a role's program; `start` begins a run of them under a real node program.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from urllib.parse import urlsplit

import fake_roles

from stackrl.runtime.run import RunFolder, run_token, write_durably

RANKS = 2


def start() -> RunFolder:
    """A run with every kind of server, under a node program of its own, once all of them serve."""
    roles = [("engine", 0), ("orchestrator", 0), *(("trainer", rank) for rank in range(RANKS))]
    run = fake_roles.make_run(*(_process(role, index) for role, index in roles))
    fake_roles.start_node(run)
    fake_roles.wait_until(lambda: steps(run) > 2, limit=90)
    return run


def steps(run: RunFolder) -> int:
    """Collectives that the trainer's ranks have done, as rank 0 says: it stands still when they do."""
    try:
        return int((run.path / "collectives").read_text() or 0)
    except FileNotFoundError:
        return 0


def _process(role: str, index: int) -> dict:
    process = fake_roles.process(role, "", index=index)
    rank = {"RANK": str(index), "WORLD_SIZE": str(RANKS)} if role == "trainer" else {}
    return process | {"command": [__file__, role, "RUN"], "environment": rank}


def trainer(run: RunFolder) -> None:
    """Two ranks that meet as the trainer's do, compute together for ever, and give out weights."""
    import torch

    from stackrl.runtime.trainer.ranks import Rank, join
    from stackrl.runtime.transport.batch_client import BatchClient
    from stackrl.runtime.transport.messages import Hello, Version
    from stackrl.runtime.transport.pull import PullPublisher

    torch.set_num_threads(1)
    me, ends, version = Rank.of(os.environ), run.endpoints(), Version(run.state().incarnation, 0)
    join(me, ends.rendezvous, "cpu")
    if me.rank == 0:
        address = urlsplit(ends.weights)
        publisher = PullPublisher(address.hostname, address.port, run_token())
        publisher.publish(version, [("weight", torch.ones(1 << 18))])

    def greeting() -> Hello:
        return Hello(
            incarnation=version.incarnation,
            rank=me.rank,
            ranks=me.ranks,
            index=0,
            version=version,
            weights="",
        )

    with BatchClient(ends.orchestrator, run_token(), greeting) as client:
        client.hello(60)
        done = 0
        while True:
            total = torch.ones(1)
            torch.distributed.all_reduce(total)
            done += int(total.item()) == RANKS
            if me.rank == 0:
                write_durably(run.path / "collectives", str(done).encode())
            time.sleep(0.1)


async def orchestrator(run: RunFolder) -> None:
    from stackrl.runtime.transport.batches import BatchServer

    server = BatchServer(
        run.endpoints().orchestrator, run_token(), incarnation=run.state().incarnation, index=0
    )
    await server.start()
    await server.hello(60)
    await asyncio.Event().wait()


def engine(run: RunFolder) -> None:
    """vLLM's server as far as strangers see it: uvicorn with the token middleware."""
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import JSONResponse
    from starlette.routing import Route

    from stackrl.runtime.inference.middleware import TokenMiddleware

    async def generate(request: Request) -> JSONResponse:
        return JSONResponse({"bytes": len(await request.body())})

    import uvicorn

    app = Starlette(routes=[Route("/inference/v1/generate", generate, methods=["POST"])])
    app.add_middleware(TokenMiddleware)
    address = urlsplit(run.endpoints().engines[0])
    uvicorn.run(app, host=address.hostname, port=address.port, log_level="warning", timeout_keep_alive=60)


def main() -> None:
    role, run = sys.argv[1], RunFolder(sys.argv[2])
    {"trainer": trainer, "engine": engine, "orchestrator": lambda run: asyncio.run(orchestrator(run))}[role](
        run
    )


if __name__ == "__main__":
    main()

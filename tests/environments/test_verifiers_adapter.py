"""What the adapter of packages for verifiers does itself; verifiers is not needed for that."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from stackrl.runtime.environments.verifiers.adapter import Shared


class Servers:
    """A context that counts, fails ``failures`` times, and belongs to the task that enters it."""

    def __init__(self, failures: int = 0) -> None:
        self.entered, self.tasks, self._failures = 0, [], failures

    @asynccontextmanager
    async def up(self):
        self.entered += 1
        self.tasks.append(asyncio.current_task())
        await asyncio.sleep(0.01)
        if self.entered <= self._failures:
            raise OSError(f"port {self.entered} is taken")
        yield


async def test_what_rollouts_share_is_brought_up_once_and_all_wait_for_it():
    servers = Servers()
    shared = Shared(servers.up)
    rollouts = [asyncio.create_task(shared.up()) for _ in range(3)]
    await asyncio.sleep(0)
    rollouts[0].cancel()
    await asyncio.gather(*rollouts, return_exceptions=True)
    await shared.up()
    assert servers.entered == 1 and rollouts[0].cancelled()
    assert servers.tasks[0] not in rollouts and not servers.tasks[0].done()


async def test_what_could_not_be_brought_up_is_tried_again():
    servers = Servers(failures=1)
    shared = Shared(servers.up)
    told = await asyncio.gather(shared.up(), shared.up(), return_exceptions=True)
    assert [str(error) for error in told] == ["port 1 is taken"] * 2
    await shared.up()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(servers.tasks[1]), 0.05)
    assert servers.entered == 2

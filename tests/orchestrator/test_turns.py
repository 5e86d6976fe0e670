"""Garbage is collected beside the event loop, what is new often and the rest now and then."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from stackrl.runtime.orchestrator import turns


class Loop:
    """Refers to itself, so that only the collector ends it."""

    def __init__(self) -> None:
        self.me = self


async def _gone(reference: weakref.ref) -> None:
    for _ in range(2000):
        if reference() is None:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nothing collected it within 20 s")


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_COLLECT_EVERY", 0.02)


async def _beside(work) -> None:
    collecting = asyncio.create_task(turns.collect_garbage())
    try:
        await work()
    finally:
        collecting.cancel()
        await asyncio.wait([collecting])


def test_what_is_new_goes_soon() -> None:
    async def work() -> None:
        await asyncio.sleep(0.01)
        await _gone(weakref.ref(Loop()))

    asyncio.run(_beside(work))
    assert gc.isenabled()
    assert not gc.get_freeze_count()


def test_what_is_old_goes_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_ALL_EVERY", 1.0)

    async def work() -> None:
        old = Loop()
        await asyncio.sleep(0.2)
        assert gc.get_freeze_count()
        reference = weakref.ref(old)
        del old
        await asyncio.sleep(0.2)
        assert reference() is not None, "nobody should have looked through what is old yet"
        await _gone(reference)

    asyncio.run(_beside(work))

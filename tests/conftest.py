"""Fixtures that tests of several folders share, the order of tests, and where their files lie."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from engine_server import client, engine_kind, real_engine

__all__ = ["client", "real_engine"]

MEMORY_DISK = Path("/dev/shm")
ROOM = 2 << 30
"""Bytes; the files of all tests take less."""


def pytest_configure() -> None:
    """Files of tests lie in memory where they can: runs wait for the disk at each of their steps."""
    if _is_roomy(MEMORY_DISK):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY_DISK))


def _is_roomy(disk: Path) -> bool:
    """Whether programs can be kept on a disk, and enough of them."""
    if not disk.is_dir():
        return False
    facts = os.statvfs(disk)
    return not facts.f_flag & os.ST_NOEXEC and facts.f_bavail * facts.f_frsize >= ROOM


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None]:
    """Tests of real engines come last, kind by kind: a server is started once and stands in nobody's way."""
    for item in items:
        if any(item.get_closest_marker(name) for name in ("nightly", "gpu", "cloud")):
            item.add_marker(pytest.mark.slow)  # `-m "not slow"` is without them, too
    yield
    items.sort(key=engine_kind)

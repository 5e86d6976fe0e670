"""Fixtures that tests of several folders share, the order of tests, and where their files lie."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from engine_server import client, engine_kind, real_engine

__all__ = ["client", "real_engine"]

REAL_RUNS = ("end_to_end/test_learning.py", "end_to_end/test_recovery.py")
"""Files with a whole run, which has a real engine of its own."""


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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None]:
    """Tests of real engines come last, kind by kind: a server is started once and stands in nobody's way.

    Where several workers share the tests (`pytest -n 2 --dist loadgroup --no-loadscope-reorder`), one of them
    begins with all that needs a real engine, and the others take the rest file by file.
    """
    shared = config.pluginmanager.hasplugin("xdist")
    for item in items:
        if any(item.get_closest_marker(name) for name in ("nightly", "gpu", "cloud")):
            item.add_marker(pytest.mark.slow)  # `-m "not slow"` is without them, too
        if shared:
            item.add_marker(pytest.mark.xdist_group(_group(item)))
    yield
    if shared and hasattr(config, "workerinput"):
        items.sort(key=lambda item: (_group(item) != "engines", engine_kind(item)))
    else:
        items.sort(key=engine_kind)


def _group(item: pytest.Item) -> str:
    """Tests of a group run one after the other on one worker."""
    whole_run = item.path.as_posix().endswith(REAL_RUNS)
    return "engines" if engine_kind(item) or whole_run else str(item.path)

"""Fixtures that tests of several folders share, and the order of tests."""

import pytest
from engine_server import client, engine_kind, real_engine

__all__ = ["client", "real_engine"]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of real engines come last, kind by kind: a server is started once and stands in nobody's way."""
    items.sort(key=engine_kind)

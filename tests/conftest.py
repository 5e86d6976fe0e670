"""Fixtures that tests of several folders share."""

from engine_server import client, real_engine

__all__ = ["client", "real_engine"]

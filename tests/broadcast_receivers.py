"""Receivers of broadcasts as processes of their own, which can be stopped and killed at a certain tensor."""

from __future__ import annotations

import logging
import os
import signal
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

import rank_processes  # noqa: F401 (one process that has imported torch serves for all forks of a session)
import torch

from stackrl.runtime.transport.messages import TensorInfo, Version
from stackrl.runtime.transport.weights import describe

_PROCESSES = get_context("forkserver")
WITHIN = 60.0
"""Seconds for whatever a receiver is asked."""


@dataclass
class Got:
    """What a receiver has of a version."""

    tensors: list[TensorInfo]
    alone: int
    """How many of them it fetched from the server."""
    warnings: list[str]
    group: str
    """The process group that it is in afterwards."""


class ReceiverProcess:
    """Takes one version after the other as an engine's worker does."""

    def __init__(self, source: str, token: str) -> None:
        self._ours, theirs = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_work, args=(theirs, source, token), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, version: Version, stop_at: str = "", timeout: float = 30.0) -> None:
        """Take ``version``; wait at the tensor ``stop_at`` for `go_on`."""
        self._ours.send((version, stop_at, timeout))

    def at_the_tensor(self) -> None:
        """Wait until it waits."""
        assert self._read() == "waiting"

    def go_on(self) -> None:
        self._ours.send("go on")

    def got(self) -> Got | str:
        """What it has, or the error that it got."""
        return self._read()

    def stand_still(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def wake_up(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join(20)

    def _read(self) -> Got | str:
        assert self._ours.poll(WITHIN), "the receiver does not answer"
        return self._ours.recv()


def _work(orders: Connection, source: str, token: str) -> None:
    from stackrl.runtime.transport import collective_receiver
    from stackrl.runtime.transport import source as sources

    torch.set_num_threads(1)
    warnings: list[str] = []
    alone: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())
    logging.getLogger("stackrl").addHandler(handler)
    receiver = collective_receiver.Receiver()
    fetch = sources.receive_whole

    def watched(*arguments):
        for name, tensor in fetch(*arguments):
            alone.append(name)
            yield name, tensor

    collective_receiver.receive_whole = watched
    while True:
        try:
            version, stop_at, timeout = orders.recv()
        except EOFError:
            return
        warnings.clear()
        alone.clear()
        found = []
        try:
            for name, tensor in receiver.receive(source, version, token, timeout):
                found.append(describe(name, tensor))
                if name == stop_at:
                    orders.send("waiting")
                    orders.recv()
        except Exception as error:
            orders.send(f"{type(error).__name__}: {error}")
            continue
        group = receiver._group.name if receiver._group else ""
        orders.send(Got(found, len(alone), list(warnings), group))

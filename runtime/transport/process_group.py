"""Process groups across programs: torch's collectives between the trainer's rank 0 and the engines' workers.

A group belongs to no program's own ranks. Its members find each other through a store that only holders of
the run's token can use, and listen at the run's own interface. What gloo and NCCL open there asks nobody for
anything, so each two members first prove to each other, over the very connection that they will use, that
they know the token.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

_PROOF = hashlib.sha256().digest_size
_LOOK_EVERY = 0.0005
_NEVER = timedelta(days=1)


class GroupError(RuntimeError):
    """A group that did not come together, or that broke."""


class Group:
    """This process as a rank of a group whose rank 0 broadcasts. Any GroupError breaks it for good."""

    def __init__(
        self,
        store: dist.Store,
        name: str,
        rank: int,
        ranks: int,
        *,
        backend: str,
        host: str,
        token: str,
        silence: float,
    ) -> None:
        """Meet the others in ``store``; ``host``: the address to listen at. Nothing takes longer than
        ``silence`` seconds. Raises GroupError where one does not come, or does not know ``token``."""
        self.name, self.rank, self.ranks = name, rank, ranks
        self.device = torch.device("cpu")
        self._silence = silence
        if backend == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        with _told(f"{ranks} processes did not come together"):
            self._group = _MAKERS[backend](store, rank, ranks, host, silence)
            _in_time(lambda: self._prove(token), self.device, silence)

    def broadcast(self, content: torch.Tensor, slice_bytes: int) -> Callable[[], None]:
        """Begin to send ``content``, uint8 on ``device``, from rank 0 to all, in slices of so many bytes.

        The returned function waits until it is there, and raises GroupError.
        """
        with _told("the broadcast could not begin"):
            works = [self._group.broadcast([part], _from_rank_0()) for part in content.split(slice_bytes)]

        def finish() -> None:
            for work in works:
                self._finish(work)

        return finish

    def close(self) -> None:
        """Let go of the connections: the others notice."""
        if self._group is not None and self.device.type == "cuda":
            self._group.abort()
        self._group = None

    def _prove(self, token: str) -> None:
        """Exchange proofs with each other rank. Raises GroupError where one is wrong."""
        mine = b"".join(self._proof(token, self.rank, other) for other in range(self.ranks))
        given = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self.device)
        got = torch.empty_like(given)
        self._finish(self._group.alltoall_base(got, given, [], []))
        shown = bytes(got.cpu().numpy())
        for other in range(self.ranks):
            proof = shown[other * _PROOF : (other + 1) * _PROOF]
            if not hmac.compare_digest(proof, self._proof(token, other, self.rank)):
                raise GroupError(f"what calls itself rank {other} does not know the run's token")

    def _proof(self, token: str, sender: int, receiver: int) -> bytes:
        return hmac.digest(token.encode(), f"{self.name}:{sender}:{receiver}".encode(), "sha256")

    def _finish(self, work: dist.Work) -> None:
        with _told("a process of the group broke off or stood still"):
            if self.device.type == "cuda":
                self._look_at(work)
            work.wait()

    def _look_at(self, work: dist.Work) -> None:
        """Wait as gloo does by itself: NCCL waits for ever, or ends the process."""
        deadline = time.monotonic() + self._silence
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise GroupError(f"no answer in {self._silence:g} s")
            time.sleep(_LOOK_EVERY)


def _gloo(store: dist.Store, rank: int, ranks: int, host: str, silence: float) -> dist.Backend:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=silence)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, ranks, options)


def _nccl(store: dist.Store, rank: int, ranks: int, host: str, silence: float) -> dist.Backend:
    """It takes its interface from NCCL_SOCKET_IFNAME."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = _NEVER
    return dist.ProcessGroupNCCL(store, rank, ranks, options)


_MAKERS = {"gloo": _gloo, "nccl": _nccl}


def _in_time(work: Callable[[], None], device: torch.device, limit: float) -> None:
    """Do ``work``, at which NCCL's members connect, with no limit of its own. Raises what it raises, and
    GroupError after ``limit`` seconds; then it is left to itself."""
    if device.type == "cpu":
        return work()
    outcome: list[Exception | None] = []

    def run() -> None:
        torch.cuda.set_device(device)  # each thread has its own current one
        try:
            work()
        except Exception as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run, name="meeting of a group", daemon=True)
    thread.start()
    thread.join(limit)
    if not outcome:
        raise GroupError(f"not all of them connected within {limit:g} s")
    if outcome[0]:
        raise outcome[0]
    return None


def _from_rank_0() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    return options


@contextmanager
def _told(what: str) -> Iterator[None]:
    """What torch raises, as GroupError."""
    try:
        yield
    except GroupError:
        raise
    except Exception as error:
        raise GroupError(f"{what}: {str(error) or repr(error)}") from error

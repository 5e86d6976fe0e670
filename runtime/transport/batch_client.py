"""A trainer rank's side of batches.py: it takes batches from the orchestrator and says how far they came."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

import httpx
import msgspec

from stackrl.runtime.transport.auth import bearer
from stackrl.runtime.transport.batches import LONG_POLL, NEW, UNKNOWN, TransportError
from stackrl.runtime.transport.messages import (
    Ack,
    Batch,
    End,
    Hello,
    Logprobs,
    MessageError,
    Version,
    decode,
    encode,
)

SILENCE = 300.0
"""Seconds without any answer after which a client gives the orchestrator up."""
PARTING = 60.0
"""Seconds in which an orchestrator that has ended the run must take the last acknowledgements."""
_REQUEST = 30.0
"""Seconds that a client gives one request beyond the long poll."""
_REPORT = 10.0
"""Seconds for a report that the run can do without."""
_RETRY = 0.5


class BatchClient:
    """A trainer rank's side: synchronous. Several threads may use it. Use as a context, or close it.

    It greets with what ``greeting`` says at that moment: when `hello` is called, and by itself whenever the
    orchestrator does not know the rank, because it was restarted. It then repeats its last acknowledgement
    of a step.
    """

    def __init__(self, url: str, token: str, greeting: Callable[[], Hello]) -> None:
        self._greeting = greeting
        self._taken = -1
        """The last batch that arrived here."""
        self._applied: bytes | None = None
        """The last acknowledgement of a step, which an orchestrator that was restarted may have missed."""
        self._over = math.inf
        """When the end arrived: the orchestrator may be gone for good since."""
        self._meeting = threading.RLock()
        self._http = httpx.Client(
            base_url=url,
            headers=bearer(token),
            timeout=httpx.Timeout(LONG_POLL + _REQUEST, connect=_REQUEST),
        )

    def hello(self, timeout: float) -> None:
        """Greet the orchestrator, which may still be starting. Raises TransportError where it refuses."""
        deadline = time.monotonic() + timeout
        with self._meeting:
            hello = self._greeting()
            hello = msgspec.structs.replace(hello, taken=self._taken == hello.index)
            answer = self._request("POST", "/hello", timeout, content=encode(hello))
            if answer.status_code == NEW and self._applied is not None:
                self._request("POST", "/acks", _left(deadline), content=self._applied)

    def keep_known(self, timeout: float) -> None:
        """Meet an orchestrator that may have been restarted; for a second thread while the first is busy.

        Raises TransportError where it refuses or does not answer.
        """
        if self._applied is None:
            self.hello(timeout)
        else:
            self._request("POST", "/acks", timeout, content=self._applied)

    def fetch(self, index: int, silence: float = SILENCE) -> Batch | End:
        """Batch ``index``, or the end. An arrived batch is acknowledged as accepted.

        Waits for as long as the orchestrator answers that there is none yet: it has limits of its own for
        all that a batch needs. Raises TransportError when it gives no answer for ``silence`` seconds,
        MessageError for a garbled batch.
        """
        me = self._greeting()
        path = f"/batches/{index}?rank={me.rank}"
        while (response := self._request("GET", path, silence)).status_code == 204:
            pass
        message = decode(response.content, Batch, End)
        if isinstance(message, Batch):
            _check(message, index, me)
            self._taken = index
            version = Version(me.incarnation, message.step)
            self.ack(index=index, step=message.step, state="accepted", version=version, timeout=silence)
        else:
            self._over = time.monotonic()
        return message

    def ack(
        self,
        *,
        index: int,
        step: int,
        state: str,
        version: Version,
        metrics: dict[str, float] | None = None,
        timeout: float = SILENCE,
    ) -> None:
        """Say how far a batch came; see Ack. Raises TransportError where that cannot be said."""
        me = self._greeting()
        ack = Ack(
            incarnation=me.incarnation,
            index=index,
            step=step,
            rank=me.rank,
            state=state,
            version=version,
            metrics=metrics or {},
        )
        content = encode(ack)
        if state == "applied":
            self._applied = content
        self._request("POST", "/acks", timeout, content=content)

    def logprobs(self, message: Logprobs, timeout: float = _REPORT) -> None:
        """Report what the trainer's own logprobs were. Raises TransportError where that cannot be said."""
        self._request("POST", "/logprobs", timeout, content=encode(message))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> BatchClient:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _request(
        self, method: str, path: str, timeout: float, content: bytes | None = None
    ) -> httpx.Response:
        """One request, repeated while nobody answers, for at most ``timeout`` seconds, and no longer than
        PARTING after the end, also where it was begun before.
        """
        began = time.monotonic()
        deadline = began + timeout
        while True:
            try:
                response = self._http.request(method, path, content=content)
            except httpx.TransportError as error:
                if time.monotonic() + _RETRY > min(deadline, max(began, self._over) + PARTING):
                    raise TransportError(
                        f"the orchestrator did not answer {method} {path} within {timeout:.0f} s: {error}"
                    ) from error
                time.sleep(_RETRY)
                continue
            if response.is_success:
                return response
            if response.status_code == UNKNOWN and path != "/hello" and time.monotonic() < deadline:
                self.hello(_left(deadline))
                continue
            raise TransportError(
                f"the orchestrator refused {method} {path} with {response.status_code}: {response.text[:500]}"
            )


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _check(batch: Batch, index: int, me: Hello) -> None:
    got = (batch.incarnation, batch.index, batch.rank, batch.ranks)
    if got != (me.incarnation, index, me.rank, me.ranks):
        raise MessageError(f"asked for batch {index} and got {got}: incarnation, index, rank, ranks")

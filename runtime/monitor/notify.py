"""Tells people of alarms and of the run's end: a command, a webhook, or both, as `guards.notify` says.

Calls are made one after the other in a thread of their own. One that is slow or fails is a line in the log;
it never holds up training, ends it, or keeps a process from leaving.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from stackrl.runtime.monitor.guards import Alarm, Record
from stackrl.runtime.monitor.records import Tail
from stackrl.runtime.run import TOKEN_VARIABLE, RunFolder
from stackrl.schemas.guards import VARIABLE, Notify

_WAITING = 100
"""Calls that may wait for the ones before them; further ones are dropped."""
_ENDS = None
"""In the queue: the thread is to leave."""

log = logging.getLogger(__name__)

Notice = dict[str, Any]


class Notifier:
    """Calls what `guards.notify` names. Methods return at once, but for `close`, and raise nothing."""

    def __init__(self, settings: Notify, run: str) -> None:
        self._run, self._timeout = run, settings.timeout
        self._ways = list(_ways(settings))
        self._notices: queue.Queue[Notice | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._work, name="notify", daemon=True)
        if self._ways:
            self._thread.start()

    def alarm(self, alarm: Alarm, record: Record) -> None:
        """A guard has something to say about the step of ``record``."""
        self._put(
            event="alarm",
            stage=record["stage"],
            step=record["index"],
            guard=alarm.name,
            action=alarm.action,
            status=None,
            text=f"run {self._run}: {alarm.name}: {alarm.text}" + " (stopping)" * (alarm.action == "stop"),
        )

    def ended(self, status: str, reason: str, newest: Record | None) -> None:
        """The run is over; ``newest`` is its last step, where it took one."""
        where = newest or {}
        self._put(
            event="ended",
            stage=where.get("stage"),
            step=where.get("index"),
            guard=None,
            action=None,
            status=status,
            text=f"run {self._run} {status}" + f": {reason}" * bool(reason),
        )

    def close(self) -> None:
        """Let the calls that wait be made, for at most three times as long as one may take."""
        if not self._thread.is_alive():
            return
        deadline = time.monotonic() + 3 * self._timeout
        try:
            self._notices.put(_ENDS, timeout=self._timeout)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            log.warning("not all of `guards.notify` was done within %.0f s", 3 * self._timeout)

    def _put(self, **notice: Any) -> None:
        if not self._ways:
            return
        try:
            self._notices.put_nowait({"run": self._run, **notice})
        except queue.Full:
            log.warning("`guards.notify` is too slow; nobody is told that %s", notice["text"])

    def _work(self) -> None:
        while (notice := self._notices.get()) is not _ENDS:
            for name, call in self._ways:
                try:
                    call(notice)
                except Exception as error:
                    log.warning("guards.notify.%s: %s", name, error)


def tell_end(run: RunFolder) -> None:
    """Make the calls for a run that has ended as its state says. Waits for them; raises nothing."""
    try:
        state = run.state()
        notifier = Notifier(run.stack().guards.notify, run.id)
        notifier.ended(state.status, state.reason, _newest(run))
        notifier.close()
    except Exception as error:  # a damaged run folder is no reason to hide how the run ended
        log.warning("guards.notify: %r", error)


def _newest(run: RunFolder) -> Record | None:
    records = Tail(run.metrics).read()
    return records[-1] if records else None


def _ways(settings: Notify):
    """Name and function of each call that is to be made."""
    if settings.command is not None:
        yield "command", lambda notice: _run(settings.command, notice, settings.timeout)
    if settings.webhook is not None:
        yield "webhook", lambda notice: _post(settings.webhook, notice, settings.timeout)


def _run(command: str | list[str], notice: Notice, timeout: float) -> None:
    """The command with the notice on its standard input. Raises RuntimeError or OSError.

    It does not see the run's token. Files instead of pipes: neither a command that does not read nor one
    that leaves children behind is waited for.
    """
    environment = {name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE}
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
        given.write(json.dumps(notice).encode() + b"\n")
        given.seek(0)
        process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=environment,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise RuntimeError(f"took longer than {timeout:g} s and was ended") from None
        said.seek(0)
        words = said.read()[-200:].decode(errors="replace").strip()
    if code:
        raise RuntimeError(f"ended with code {code}: {words or 'it said nothing'}")


def _post(webhook: str, notice: Notice, timeout: float) -> None:
    """The notice to the webhook. Raises RuntimeError, which does not name the URL: it may be a secret."""
    import httpx

    logging.getLogger("httpx").setLevel(logging.WARNING)  # else it writes every URL
    url = _address(webhook)
    host = urlsplit(url).hostname
    try:
        with httpx.stream("POST", url, json=notice, timeout=timeout) as answer:
            code = answer.status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise RuntimeError(f"{host} was not reached within {timeout:g} s ({type(error).__name__})") from None
    if not 200 <= code < 300:
        raise RuntimeError(f"{host} answered {code}")


def _address(webhook: str) -> str:
    if not (variable := VARIABLE.fullmatch(webhook)):
        return webhook
    if not (url := os.environ.get(variable[1])):
        raise RuntimeError(f"the environment variable {variable[1]} is not set; it holds the URL")
    return url

"""Alarms and ends reach a command and a webhook; neither can hold up, end or unmask a run."""

from __future__ import annotations

import json
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_roles import fresh_home, make_run, stack

from stackrl.runtime.monitor.alarms import Alarms
from stackrl.runtime.monitor.guards import Alarm
from stackrl.runtime.monitor.metrics import open_sinks
from stackrl.runtime.monitor.notify import Notifier, tell_end
from stackrl.runtime.run import RunFolder, State
from stackrl.schemas.guards import Notify

ALARM = Alarm("mismatch", "stage main, step 3: trainer and engine differ", "stop")
RECORD = {"stage": "main", "stage_step": 3, "index": 23, "step": 3, "kind": "rl"}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


class Hook:
    """A webhook that answers ``code`` after ``delay`` seconds."""

    def __init__(self, code: int = 200, delay: float = 0.0) -> None:
        self.posted: list[dict[str, Any]] = []
        hook = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                time.sleep(delay)
                self.send_response(code)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/very-secret-path"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def notifier(**settings: Any) -> Notifier:
    return Notifier(Notify.model_validate(settings), "run-1")


def test_an_alarm_reaches_command_and_webhook_as_one_json_object(tmp_path: Path) -> None:
    with Hook() as hook:
        telling = notifier(command=f"cat > {tmp_path}/told", webhook=hook.url)
        telling.alarm(ALARM, RECORD)
        telling.close()
        expected = {
            "run": "run-1",
            "event": "alarm",
            "stage": "main",
            "step": 23,
            "guard": "mismatch",
            "action": "stop",
            "status": None,
            "text": "run run-1: mismatch: stage main, step 3: trainer and engine differ (stopping)",
        }
        assert hook.posted == [expected]
        assert json.loads((tmp_path / "told").read_text()) == expected


def test_the_end_of_a_run_is_told_with_its_status_and_reason(tmp_path: Path) -> None:
    run = make_run()
    words = [
        sys.executable,
        "-c",
        f"import sys; open({str(tmp_path / 'told')!r}, 'w').write(sys.stdin.read())",
    ]
    run.write_plan(stack(guards={"notify": {"command": words}}), {})
    run.metrics.write_text(json.dumps(RECORD) + "\n" + '{"torn')
    run.write_state(State("failed", attempt=1, reason="trainer-0 was killed by SIGKILL"))
    tell_end(run)
    told = json.loads((tmp_path / "told").read_text())
    assert told["text"] == f"run {run.id} failed: trainer-0 was killed by SIGKILL"
    assert (told["event"], told["status"], told["stage"], told["step"]) == ("ended", "failed", "main", 23)


def test_an_end_without_a_run_folder_worth_the_name_raises_nothing(tmp_path: Path) -> None:
    tell_end(RunFolder(tmp_path / "nothing"))


def test_a_command_does_not_see_the_token_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STACKRL_TOKEN", "a-token-that-nobody-may-see")
    telling = notifier(command=f"env > {tmp_path}/environment")
    telling.alarm(ALARM, RECORD)
    telling.close()
    assert "PATH=" in (tmp_path / "environment").read_text()
    assert "a-token-that-nobody-may-see" not in (tmp_path / "environment").read_text()


@pytest.mark.slow
def test_a_slow_command_is_ended_with_its_children_and_holds_up_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    named = f"echo $! > {tmp_path}/new && mv {tmp_path}/new {tmp_path}/child"  # never empty
    telling = notifier(command=f"sleep 600 & {named}; sleep 600", timeout=2.0)
    began = time.monotonic()
    for _ in range(300):  # more than wait
        telling.alarm(ALARM, RECORD)
    assert time.monotonic() - began < 20, "alarms wait for the command"
    while "guards.notify.command: took longer than 2 s and was ended" not in caplog.text:
        assert time.monotonic() - began < 60, "the command goes on"
        time.sleep(0.05)
    telling.close()
    assert time.monotonic() - began < 80
    assert "`guards.notify` is too slow" in caplog.text
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    deadline = time.monotonic() + 30
    while child.exists() and ") Z" not in child.read_text():
        assert time.monotonic() < deadline, "the command's child lives on"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"command": "echo no such channel >&2; exit 3"}, "command: ended with code 3: no such channel"),
        ({"command": ["/no/such/program"]}, "command: [Errno 2] No such file"),
        ({"webhook": "${NO_SUCH_VARIABLE}"}, "webhook: the environment variable NO_SUCH_VARIABLE is not set"),
        (
            {"webhook": "http://127.0.0.1:1/very-secret-path"},
            "webhook: 127.0.0.1 was not reached within 10 s",
        ),
    ],
)
def test_a_call_that_fails_is_a_line_in_the_log(
    settings: dict[str, Any], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    telling = notifier(**settings)
    telling.alarm(ALARM, RECORD)
    telling.close()
    assert f"guards.notify.{told}" in caplog.text
    assert "secret" not in caplog.text


def test_the_url_may_be_in_the_environment_and_is_in_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with Hook(code=404) as hook:
        monkeypatch.setenv("HOOK", hook.url)
        telling = notifier(webhook="${HOOK}")
        telling.alarm(ALARM, RECORD)
        telling.close()
        assert len(hook.posted) == 1
    assert "guards.notify.webhook: 127.0.0.1 answered 404" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.slow
def test_a_webhook_that_says_nothing_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        telling = notifier(webhook=f"http://127.0.0.1:{silent.getsockname()[1]}/", timeout=2)
        telling.alarm(ALARM, RECORD)
        telling.close()
    assert "was not reached within 2 s (ReadTimeout)" in caplog.text


def test_an_alarm_is_an_event_and_the_worst_one_that_stops_is_returned(tmp_path: Path) -> None:
    run = make_run()
    guards = {
        "mismatch": {"steps": 1, "action": "stop"},
        "not_finite": {"steps": 2},
        "notify": {"command": f"cat >> {tmp_path}/told"},
    }
    settings = stack(guards=guards)
    with open_sinks(run, settings) as sink:
        alarms = Alarms(run, settings, sink, index=0)
        good = RECORD | {"trainer/loss": 0.1, "trainer/gradient_norm": 1.0}
        assert alarms.after(good) is None
        alarm = alarms.after(good | {"trainer/mismatch_kl": 1.0})
        assert alarm is not None and (alarm.name, alarm.save) == ("mismatch", True)
        alarm = alarms.after(good | {"trainer/weights_finite": 0.0})
        assert alarm is not None and (alarm.name, alarm.save) == ("not_finite", False)
        alarms.close()
    events = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [(event["event"], event["guard"], event["index"]) for event in events] == [
        ("alarm", "mismatch", 23),
        ("alarm", "not_finite", 23),
    ]
    told = [json.loads(line)["guard"] for line in (tmp_path / "told").read_text().splitlines()]
    assert told == ["mismatch", "not_finite"]


def test_what_was_normal_is_read_from_the_metrics_up_to_where_the_run_goes_on() -> None:
    run, settings = make_run(), stack(guards={"entropy_collapse": {"steps": 1, "window": 2}})

    def record(index: int, entropy: float) -> dict[str, Any]:
        numbers = {"trainer/loss": 0.1, "trainer/gradient_norm": 1.0, "trainer/entropy": entropy}
        return RECORD | {"index": index, "stage_step": index} | numbers

    with open_sinks(run, settings) as sink:
        for index, entropy in enumerate((1.0, 1.0, 0.01, 0.01)):
            sink.log(record(index, entropy))
        for index, expected in ((4, ["entropy_collapse"]), (1, [])):
            before = len(run.events.read_text().splitlines())
            alarms = Alarms(run, settings, sink, index)
            alarms.after(record(index, 0.01))
            alarms.close()
            told = [json.loads(line)["guard"] for line in run.events.read_text().splitlines()[before:]]
            assert told == expected

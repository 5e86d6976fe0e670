"""Notices of the three clouds, from a metadata service of our own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_roles import fresh_home, make_run, process, start_node, wait_until

from stackrl.runtime import preemption

Answer = Callable[[str, str, dict[str, str]], str | None]
"""Method, path, headers → the text, or None for 404."""


@contextmanager
def service(answer: Answer) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answer(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
            self.send_response(404 if text is None else 200)
            self.end_headers()
            self.wfile.write((text or "not found").encode())

        do_PUT = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def aws(action: str | None) -> Answer:
    def answer(method: str, path: str, headers: dict[str, str]) -> str | None:
        if (method, path) == ("PUT", "/latest/api/token"):
            return "secret" if headers["x-aws-ec2-metadata-token-ttl-seconds"] else None
        if path == "/latest/meta-data/spot/instance-action":
            assert headers["x-aws-ec2-metadata-token"] == "secret"
            return action
        return None

    return answer


def google(preempted: str) -> Answer:
    def answer(method: str, path: str, headers: dict[str, str]) -> str | None:
        here = path == "/computeMetadata/v1/instance/preempted" and headers.get("metadata-flavor") == "Google"
        return preempted if here else None

    return answer


def azure(*kinds: str) -> Answer:
    def answer(method: str, path: str, headers: dict[str, str]) -> str | None:
        here = path.startswith("/metadata/scheduledevents?api-version=") and headers.get("metadata") == "true"
        return json.dumps({"Events": [{"EventType": kind} for kind in kinds]}) if here else None

    return answer


@pytest.mark.parametrize(
    ("answer", "expected", "answered"),
    [
        (aws('{"action": "terminate"}'), 'AWS: {"action": "terminate"}', True),
        (aws(None), "", True),
        (google("TRUE\n"), "Google Cloud: the instance is being preempted", True),
        (google("FALSE"), "", True),
        (azure("Reboot", "Preempt"), 'Azure: {"EventType": "Preempt"}', True),
        (azure("Reboot"), "", True),
        (lambda *question: None, "", False),
        (lambda *question: "<html>another server</html>", "", True),
    ],
)
def test_what_each_cloud_says(answer: Answer, expected: str, answered: bool) -> None:
    with service(answer) as base:
        said, somebody = preemption.notice(base)
    assert (said, somebody) == (expected, answered)


def test_nobody_at_the_address_is_no_notice() -> None:
    assert preemption.notice("http://127.0.0.1:9") == ("", False)


def test_only_machines_of_skypilot_are_watched() -> None:
    assert preemption.watched({"SKYPILOT_TASK_ID": "7"}) and not preemption.watched({"PATH": "/bin"})


@pytest.mark.slow
def test_a_cloud_that_takes_the_machine_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    action: list[str] = []
    with (
        fresh_home(tmp_path, monkeypatch),
        service(lambda *question: aws(action[0] if action else None)(*question)) as base,
    ):
        run = make_run(process("orchestrator", "import time; time.sleep(600)"))
        node = start_node(run, SKYPILOT_TASK_ID="7", STACKRL_METADATA=base)
        wait_until(lambda: run.state().status == "running")
        action.append('{"action": "stop"}')
        node.communicate(timeout=40)
        assert node.returncode == 75 and "taken away" in run.state().reason
        assert run.state().roles == {"orchestrator": "ended"}
        assert 'AWS: {"action": "stop"}' in (run.logs(1) / "preemption.log").read_text()

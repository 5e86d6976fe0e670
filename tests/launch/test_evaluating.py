"""`stackrl eval` against a server that speaks chat completions: right answers, wrong ones, faults."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import stacks
from stackrl.cli import main
from stackrl.runtime.environments.base import Answer, Call, Task, Tool, tool, user
from stackrl.runtime.orchestrator.endpoint import Endpoint, EndpointPolicy

Reply = Callable[[dict[str, Any], int], tuple[int, dict[str, Any]]]
"""From a request and its number to a status and an answer."""


class Server(ThreadingHTTPServer):
    """An endpoint with one model, `right`; it wants the key `k`."""

    def __init__(self, reply: Reply) -> None:
        self.reply, self.asked = reply, []
        self.numbering = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        known = self.headers.get("Authorization") == "Bearer k"
        self._answer(200 if known else 401, {"data": [{"id": "right"}]} if known else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.numbering:
            number = len(self.server.asked)
            self.server.asked.append({"path": self.path, **body})
        self._answer(*self.server.reply(body, number))

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Reply], Server]]:
    monkeypatch.setenv("MY_KEY", "k")
    monkeypatch.setattr("stackrl.runtime.orchestrator.endpoint._LONGEST_PAUSE", 0.01)
    servers: list[Server] = []

    def serve(reply: Reply) -> Server:
        servers.append(Server(reply))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return servers[-1]

    yield serve
    for server in servers:
        server.shutdown()
        server.server_close()


def says(text: str, **choice: Any) -> tuple[int, dict[str, Any]]:
    message = {"role": "assistant", "content": text}
    return 200, {
        "choices": [{"message": message, "finish_reason": "stop"} | choice],
        "usage": {"completion_tokens": 7},
    }


def reversed_word(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"].removeprefix("reverse: ")[::-1]


@pytest.fixture
def file(tmp_path: Path) -> str:
    evaluated = "{samples: 4, prompts: 6, environments: [{name: held, type: reverse_text}]}"
    change = ("    sampling:", f"    evaluate: {evaluated}\n    sampling:")
    return str(stacks.write(tmp_path, change))


def evaluated(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["eval", *arguments, "--secret", "MY_KEY", "--model", "right"])
    return code, *capsys.readouterr()


def test_scores_of_held_out_environments(served, file, capsys):
    """Every prompt is solved by two of its four answers."""
    tried: dict[str, int] = {}
    counting = threading.Lock()

    def reply(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        right = reversed_word(body)
        with counting:
            tried[right] = tried.get(right, 0) + 1
            return says(right if tried[right] <= 2 else "?")

    server = served(reply)
    code, out, _ = evaluated(capsys, file, "--endpoint", server.url, "-o", "json")
    scores = json.loads(out)["environments"]["held"]
    assert code == 0 and len(server.asked) == 24 and set(tried.values()) == {4}
    assert (scores["prompts"], scores["samples"], scores["failed"], scores["tokens"]) == (6, 4, 0, 7.0)
    assert scores["exact"] == 0.5 and scores["pass@2"] == pytest.approx(5 / 6) and scores["pass@4"] == 1.0
    assert {(a["path"], a["model"]) for a in server.asked} == {("/v1/chat/completions", "right")}
    assert len({a["seed"] for a in server.asked}) == 24 and {a["temperature"] for a in server.asked} == {1.0}

    code, out, _ = evaluated(capsys, file, "--endpoint", server.url, "--greedy", "--prompts", "3")
    head, row = out.splitlines()
    assert code == 0 and re.fullmatch(r"environment  prompts  reward +solved +failed  tokens", head)
    assert row.split()[:2] == ["held", "3"] and {a["temperature"] for a in server.asked[24:]} == {0.0}


def several(tmp_path: Path, *environments: str) -> str:
    held = f"{{prompts: 6, environments: [{', '.join(environments)}]}}"
    return str(stacks.write(tmp_path, ("    sampling:", f"    evaluate: {held}\n    sampling:")))


def test_what_was_found_is_told_where_another_environment_fails(served, tmp_path, capsys):
    def reply(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        word = body["messages"][-1]["content"]
        return says(reversed_word(body)) if word.startswith("reverse") else (400, {"error": "broken"})

    server = served(reply)
    sums = "{name: sums, type: arithmetic}"
    file = several(tmp_path, sums, "{name: words, type: reverse_text}", sums.replace("sums", "more"))
    code, out, err = evaluated(capsys, file, "--endpoint", server.url, "-o", "json")
    assert code == 1 and len(server.asked) == 18
    [(name, scores)] = json.loads(out)["environments"].items()
    assert name == "words" and scores["exact"] == 1.0
    assert "sums: all 6 answers failed; the last: " in err and "more: all 6 answers failed" in err


def test_nothing_is_asked_where_an_environment_cannot_be_made(served, tmp_path, capsys):
    server = served(lambda body, number: says("7"))
    missing = "{name: rows, type: dataset, args: {dataset: nowhere.jsonl, reward: 'nowhere.py:f'}}"
    file = several(tmp_path, "{name: sums, type: arithmetic}", missing)
    code, out, err = evaluated(capsys, file, "--endpoint", server.url)
    assert code == 1 and not out and "environment 'rows': there is no file" in err and not server.asked


def test_only_answers_that_count_count_their_tokens(served, tmp_path, capsys):
    """In a game of several turns the first answer of a rollout that fails later is not among them."""

    def reply(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        fails = body["seed"] % 2 and len(body["messages"]) > 1
        return (400, {"error": "no such thing"}) if fails else says("0")

    server = served(reply)
    game = "{name: game, type: guess_number, args: {guesses: 3}}"
    code, out, _ = evaluated(capsys, several(tmp_path, game), "--endpoint", server.url, "-o", "json")
    scores = json.loads(out)["environments"]["game"]
    assert code == 0 and 0 < scores["failed"] < 6 and scores["tokens"] == 21


def test_what_passes_is_tried_again_and_failures_are_no_wrong_answers(served, file, capsys):
    busy: set[int] = set()

    def reply(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        if number < 3:
            busy.add(number)
            return 429, {"error": "slow down"}
        if body["seed"] % 2:
            return 400, {"error": "no such thing"}
        return says(reversed_word(body))

    server = served(reply)
    code, out, _ = evaluated(capsys, file, "--endpoint", server.url, "-o", "json")
    scores = json.loads(out)["environments"]["held"]
    assert code == 0 and len(busy) == 3 and scores["exact"] == 1.0
    assert scores["failed"] == len({a["seed"] for a in server.asked if a["seed"] % 2}) > 0
    assert len(server.asked) == 24 + 3


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--model", "wrong", "--secret", "MY_KEY"], 1, "has no model 'wrong'; it has right"),
        (["--model", "right"], 1, "wants a key: say --secret NAME"),
        (["--model", "right", "--secret", "NO_KEY"], 2, "say `export NO_KEY=…` first"),
        (["--model", "right", "--secret", "MY_KEY"], 1, "held: all 24 answers failed; the last: "),
    ],
)
def test_what_is_wrong_is_said(served, file, capsys, arguments, code, said):
    server = served(lambda body, number: (400, {"error": "broken"}))
    assert main(["eval", file, "--endpoint", server.url, *arguments]) == code
    assert said in capsys.readouterr().err


def test_nobody_there_and_no_environment(file, capsys):
    assert main(["eval", file, "--endpoint", "http://127.0.0.1:9/v1", "--model", "m"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert main(["eval", "no-such-run", "--endpoint", "http://127.0.0.1:9/v1", "--model", "m"]) == 2


ADD = Tool("add", "", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("add", '{"x": 1}', ""),
        ("add", {"x": 1}, ""),
        ("add", "{}", "'x' is a required property"),
        ("add", '{"x": "one"}', "argument 'x': 'one' is not of type 'integer'"),
        ("sum", '{"x": 1}', "there is no function 'sum'; there is add"),
        ("add", "[1]", "the arguments are no object"),
        ("add", '{"x": NaN}', "the arguments cannot be read: it is no JSON"),
        ("add", '{"x": %s}' % ("9" * 5000), "the arguments cannot be read: it is no JSON"),
        ("add", "[" * 100_000, "the arguments cannot be read: its JSON is nested too deeply"),
    ],
)
@pytest.mark.parametrize("whole", [False, True])
async def test_a_call_that_does_not_fit_its_tool_has_its_problem_as_in_a_run(
    served, name, arguments, problem, whole
):
    calls = [{"id": "a", "type": "function", "function": {"name": name, "arguments": arguments}}]
    server = served(lambda body, number: says("", message={"content": None, "tool_calls": calls}))
    async with Endpoint(server.url, "right", "k") as endpoint:
        policy = EndpointPolicy(endpoint, Task((user("add"),), None), (ADD,), {})
        if whole:
            answer = policy.said(await policy.complete([user("add")], [ADD.as_function()]))
        else:
            answer = await policy.answer()
    [call] = answer.calls
    assert call.problem.startswith(problem) and bool(call.problem) == bool(problem)
    assert server.asked[0]["tools"] == [ADD.as_function()]


async def test_calls_of_tools_and_their_results_name_each_other(served):
    def reply(body: dict[str, Any], number: int) -> tuple[int, dict[str, Any]]:
        calls = [
            {"id": "a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "add", "arguments": "{x"}},
        ]
        return (
            says("", message={"role": "assistant", "content": None, "tool_calls": calls})
            if not number
            else says("3")
        )

    server = served(reply)
    async with Endpoint(server.url, "right", "k") as endpoint:
        policy = EndpointPolicy(endpoint, Task((user("add"),), None), (ADD,), {"max_tokens": 5})
        first = await policy.answer()
        assert first.calls[0] == Call("add", {"x": 1}) and "no JSON" in first.calls[1].problem
        assert await policy.answer(tool("2"), tool("wrong")) == Answer("3")
    told = server.asked[1]["messages"]
    assert [message.get("tool_call_id") for message in told] == [None, None, "a", "b"]
    assert [call["id"] for call in told[1]["tool_calls"]] == ["a", "b"] and server.asked[1]["max_tokens"] == 5

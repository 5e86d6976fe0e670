"""A judge behind an OpenAI-compatible endpoint: what it is asked, what it may answer, and how it fails."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest
from aiohttp import web

from stackrl.runtime.environments import judge as judging
from stackrl.runtime.environments import make
from stackrl.runtime.environments.base import Answer
from stackrl.runtime.environments.judge import Judge, JudgeError, score_in
from stackrl.schemas.environments import Environment


class Endpoint:
    """Answers each request with the next of ``answers``: a text, a status, a response's JSON or a delay."""

    def __init__(self) -> None:
        self.answers: list = []
        self.requests: list[dict] = []
        self.keys: list[str | None] = []
        self.at_once = self.most_at_once = 0
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            answer = self.answers.pop(0) if self.answers else "score: 10"
            if isinstance(answer, float):
                await asyncio.sleep(answer)
                answer = "score: 10"
            if isinstance(answer, int):
                return web.json_response({"error": {"message": "no such key"}}, status=answer)
            if isinstance(answer, str):
                answer = {"choices": [{"message": {"content": answer}}]}
            return web.json_response(answer)
        finally:
            self.at_once -= 1


@pytest.fixture
async def endpoint(monkeypatch):
    monkeypatch.setattr(judging, "_LONGEST_PAUSE", 0.01)
    it = Endpoint()
    application = web.Application()
    application.router.add_post("/v1/chat/completions", it.complete)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    it.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    yield it
    await runner.cleanup()


async def test_the_judge_sees_task_reference_and_answer_and_its_score_is_scaled(endpoint, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    endpoint.answers = ["Good, though short. I thought of score: 3 first.\nScore: **7.5**"]
    judge = Judge(endpoint.url, "m", secret="JUDGE_KEY")
    assert await judge.score("1+1? {answer}", "score: 10 {reference}", "2") == 0.75
    [request] = endpoint.requests
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("m", 0, 1024)
    [message] = request["messages"]
    for part in (
        "1+1? {answer}",
        "score: 10 {reference}",
        "<reference>\n2\n</reference>",
        "from 0 (useless) to 10 (perfect)",
    ):
        assert part in message["content"], "what is filled in is not filled in again"
    assert endpoint.keys == ["Bearer sesame"]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("score: 7", 7),
        ("Fine.\n\nScore: **7.5**\n", 7.5),
        ("**Score:** 7/10.", 7),
        ("## Final score (0 to 10): 6", 6),
        ("Total score (scale: 0 to 10) = 6 out of 10", 6),
        ('{"score": 7}', 7),
        ("score: 7,5", 7.5),
        ("score: -3", -3),
        ("score: 0", 0),
        ("score: 3\nNo.\nscore: 4", 4),
        ("<think>score: 3</think>score: 4", 4),
        ("score: 3 would be too little\nscore: 8", 8),
        ("score: 1e1", None),
        ("score: −3", None),
        ("score: ~3", None),
        ("score: 3 or 4", None),
        ("score: 7-8", None),
        ("score: 70%", None),
        ("score: 4/5", None),
        ("score: 1,000", None),
        ("score: 3\nfinal score: seven", None),
        ("score: 3\nscore: 1e1", None),
        ("<think>score: 3", None),
        ("The scores are 3 and 4", None),
        ("underscore: 3", None),
        ("score 3", None),
        ("9" * 400, None),
        ("score: " + "9" * 400, None),
    ],
)
def test_a_score_is_a_line_that_says_nothing_else(text, score):
    assert score_in(text, highest=10) == score


async def test_a_score_that_may_have_been_cut_off_is_none(endpoint):
    def said(text, reason):
        return {"choices": [{"message": {"content": text}, "finish_reason": reason}]}

    endpoint.answers = [said("Good.\nscore: 1", "length"), said("score: 9\nFor it", "length")]
    assert await Judge(endpoint.url, "m").score("", "x") == 0.9
    assert len(endpoint.requests) == 2


async def test_its_prompt_scale_and_parameters_can_be_others(endpoint):
    endpoint.answers = ["score: 1"]
    prompt = "Rate {answer} from {lowest} to {highest}, written {like this}."
    judge = Judge(endpoint.url + "/", "m", prompt=prompt, lowest=1, highest=5, parameters={"top_p": 0.5})
    assert await judge.score("", "it") == 0.0
    [request] = endpoint.requests
    assert request.pop("messages")[0]["content"] == "Rate it from 1 to 5, written {like this}."
    assert request == {"model": "m", "top_p": 0.5} and endpoint.keys == [None]


@pytest.mark.parametrize(
    "trouble", [500, 429, 0.6, "no number here", "score: 11", "score: -3", {"choices": []}, {"choices": [[]]}]
)
async def test_a_judge_in_trouble_is_asked_again(endpoint, trouble):
    endpoint.answers = [trouble, trouble, "score: 4"]
    timeout = 0.3 if trouble == 0.6 else 20
    assert await Judge(endpoint.url, "m", timeout=timeout).score("", "x") == 0.4
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize(
    ("trouble", "why"),
    [
        (503, "asked 2 times: it answered 503"),
        (0.6, "asked 2 times: no answer within 0.3 s"),
        ("great!", "asked 2 times: it named no score from 0 to 10: 'great!'"),
        ({"choices": []}, "asked 2 times: its answer is no chat completion"),
        (401, r"answered 401: \{\"error\": \{\"message\": \"no such key\"\}\}"),
    ],
)
async def test_a_judge_without_a_score_fails_the_rollout(endpoint, trouble, why):
    endpoint.answers = [trouble] * 3
    with pytest.raises(JudgeError, match=f"judge m at http://127.0.0.1:.*{why}"):
        timeout = 0.3 if trouble == 0.6 else 20
        await Judge(endpoint.url, "m", timeout=timeout, tries=2).score("", "x")
    assert len(endpoint.requests) == (1 if trouble == 401 else 2)


async def test_a_judge_that_nobody_hears_and_a_key_that_is_not_there():
    with pytest.raises(JudgeError, match=r"asked 1 times: ConnectError"):
        await Judge("http://127.0.0.1:9", "m", tries=1).score("", "x")
    with pytest.raises(JudgeError, match="the environment variable NO_SUCH_KEY of judge m is not set"):
        await Judge("http://127.0.0.1:9", "m", secret="NO_SUCH_KEY").score("", "x")


async def test_no_more_requests_at_once_than_are_allowed(endpoint):
    endpoint.answers = [0.05] * 12
    judge = Judge(endpoint.url, "m", concurrent=3)
    assert await asyncio.gather(*(judge.score("", str(n)) for n in range(12))) == [1.0] * 12
    assert endpoint.most_at_once == 3


async def test_waiting_for_others_is_not_the_judges_time(endpoint):
    endpoint.answers = [0.4] * 5
    judge = Judge(endpoint.url, "m", concurrent=1, timeout=1.2, tries=1)
    assert await asyncio.gather(*(judge.score("", str(n)) for n in range(5))) == [1.0] * 5


async def test_one_judge_serves_several_event_loops(endpoint):
    judge = Judge(endpoint.url, "m")
    assert await judge.score("", "here") == 1.0
    assert await asyncio.to_thread(lambda: asyncio.run(judge.score("", "there"))) == 1.0


def test_what_cannot_be_right_is_refused():
    with pytest.raises(ValueError, match="judge: lowest, 5, must be less than highest, 5"):
        Judge("http://x", "m", lowest=5, highest=5)
    with pytest.raises(ValueError, match=r"judge: prompt has no \{answer\}"):
        Judge("http://x", "m", prompt="Good?")


async def test_a_judge_as_a_reward_beside_a_function(endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": "two"}) + "\n")
    (tmp_path / "rewards.py").write_text("def short(answer, row):\n    return len(answer) < 40\n")
    reward = {"good": {"judge": {"endpoint": endpoint.url, "model": "m"}}, "short": "rewards.py:short"}
    args = {"dataset": "rows.jsonl", "reward": reward}
    it = make(Environment(name="mine", type="dataset", args=args, rewards={"short": 0.1}))
    endpoint.answers = ["score: 8"]
    outcome = await it.reply(it.task(Random(0)), [Answer("<think>5?</think>2, I say")])
    assert outcome.rewards == {"good": 0.8, "short": 1.0} and outcome.metrics == {"solved": 0.0}
    asked = endpoint.requests[0]["messages"][0]["content"]
    assert "1+1?" in asked and "2, I say" in asked and "two" in asked
    assert "5?" not in asked, "what was only thought is not judged"


async def test_a_row_without_an_answer_has_no_reference(endpoint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+1?", "answer": None}) + "\n")
    args = {"dataset": "rows.jsonl", "reward": {"good": {"judge": {"endpoint": endpoint.url, "model": "m"}}}}
    it = make(Environment(name="mine", type="dataset", args=args))
    await it.reply(it.task(Random(0)), [Answer("2")])
    assert "<reference>\n(none)\n</reference>" in endpoint.requests[0]["messages"][0]["content"]


async def test_before_a_run_each_judge_is_asked_whether_it_is_there(endpoint):
    described = {"endpoint": endpoint.url, "model": "m", "tries": 2}
    endpoint.answers = [503, "yes", 401]
    it = Judge(**described)
    await it.check()
    assert len(endpoint.requests) == 2, "busy for a moment, then there, whatever it says"
    with pytest.raises(JudgeError, match="answered 401"):
        await it.check()

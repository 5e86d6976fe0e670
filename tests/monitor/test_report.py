"""The report as a file: whole, private, without secrets, and made of whatever a run has written so far."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import stat
from html.parser import HTMLParser
from pathlib import Path

import pytest
from written_runs import empty_run, written_run

from stackrl.runtime import checkpoints
from stackrl.runtime.monitor import report_rollouts
from stackrl.runtime.monitor.report import SCRIPTS, TEMPLATES, render, write_report
from stackrl.runtime.monitor.report_facts import MOST_POINTS, _curves, surviving
from stackrl.runtime.monitor.report_rollouts import embed
from stackrl.runtime.monitor.report_tokens import Pieces, as_json, text
from stackrl.runtime.run import TOKEN_VARIABLE, RunError, RunFolder, State
from stackrl.runtime.trainer.models.byte_tokenizer import byte_tokenizer

HOSTILE = (
    "</script><script>stolen=1</script><!-- "
    "\u2028 \u2029 <img src=x onerror=stolen=1> ]]> &amp; \x00 {{script}}"
)


class Elements(HTMLParser):
    """The elements of a page, and the text of its scripts by their ids."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.styles: list[str] = []
        self._open: tuple[str, dict[str, str | None]] = ("", {})
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self._open = (tag, dict(attrs))
        self.tags.append(self._open)

    def handle_endtag(self, tag):
        self._open = ("", {})

    def handle_data(self, data):
        tag, attributes = self._open
        if tag == "script":
            name = attributes.get("id") or ""
            self.scripts[name] = self.scripts.get(name, "") + data
        if tag == "style":
            self.styles.append(data)


def overview_of(run: RunFolder) -> dict:
    return json.loads(Elements(render(run)).scripts["overview"])


def test_it_is_one_private_file_in_the_folder_of_the_run(tmp_path):
    run = written_run(tmp_path, 16, 8)
    before = set(run.path.iterdir())
    file = write_report(run)
    assert file == run.path / "report.html"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert set(run.path.iterdir()) - before == {file}
    assert write_report(run, tmp_path / "elsewhere.html") == tmp_path / "elsewhere.html"
    with pytest.raises(RunError, match=r"nowhere/r\.html.*-o FILE"):
        write_report(run, tmp_path / "nowhere" / "r.html")


def test_what_a_run_says_cannot_leave_its_place(tmp_path):
    harmless = Elements(render(written_run(tmp_path / "harmless", 8, 8)))
    run = written_run(tmp_path / "hostile", 8, 8, answer=lambda *_: HOSTILE)
    about = run.read("run.json")
    run.write("run.json", about | {"name": HOSTILE, "environment": {HOSTILE: ""}})
    run.write_state(State(status="failed", reason=HOSTILE, roles={"trainer-0": "failed"}))
    run.logs(0).mkdir(parents=True)
    (run.logs(0) / "trainer-0.log").write_text(HOSTILE)
    plan = run.read("plan.json")
    plan["processes"][0]["command"] = [HOSTILE]
    run.write("plan.json", plan)
    stack = run.read("stack.json")
    stack["environments"][0]["args"]["letters"] = HOSTILE
    run.write("stack.json", stack)
    with open(run.events, "a") as events:
        events.write(json.dumps({"time": 1.0, "event": HOSTILE, HOSTILE: HOSTILE}) + "\n")

    page = Elements(render(run))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in harmless.tags]
    overview = json.loads(page.scripts["overview"])
    assert overview["run"]["name"] == overview["run"]["reason"] == HOSTILE
    assert overview["events"][-1] == [1.0, HOSTILE, [[HOSTILE, HOSTILE]]]
    assert HOSTILE in overview["plan"][0]["command"]
    assert overview["run"]["words"][0][1], "the log is not told"


def test_only_its_own_code_may_run_and_nothing_may_be_loaded(tmp_path):
    page = Elements(render(written_run(tmp_path, 8, 8)))
    (policy,) = [a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    allowed = {part.split()[0]: part.split()[1:] for part in policy.split("; ")}

    def hashed(content: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    assert allowed == {
        "default-src": ["'none'"],
        "script-src": [hashed(page.scripts[""])],
        "style-src": [hashed("".join(page.styles))],
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert not [a for _, a in page.tags if {"src", "style"} & a.keys() or any(k.startswith("on") for k in a)]
    assert not [a["href"] for _, a in page.tags if not (a.get("href") or "#").startswith("#")]


def test_its_code_makes_no_markup_of_text_and_asks_nobody():
    forbidden = (
        r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function|fetch\(|XMLHttp|import\("
    )
    for name in SCRIPTS:
        code = (TEMPLATES / name).read_text()
        assert not re.search(forbidden, code), name
        assert "</script" not in code and "<!--" not in code, name
        assert re.findall(r"https?://\S+?(?=\")", code) in ([], ["http://www.w3.org/2000/svg"]), name
    assert {file.name for file in TEMPLATES.glob("*.js")} == set(SCRIPTS)


def test_nothing_secret_is_in_it(tmp_path, monkeypatch):
    run = written_run(tmp_path, 8, 8)
    monkeypatch.setenv(TOKEN_VARIABLE, "token-of-the-run-1234")
    run.write("run.json", run.read("run.json") | {"environment": {"API_KEY": "key-5678-key"}})
    (run.path / "source.yaml").write_text("envs: {PLACE: /a/private/place}\nsecrets: {PASS: pass-word-9}\n")
    stack = run.read("stack.json")
    stack["guards"]["notify"] = {
        "command": ["tell", "--password", "secret-argument"],
        "webhook": "https://hooks.example/secret-path",
    }
    stack["model"]["path"] = "/a/private/place/model"
    run.write("stack.json", stack)
    said = "token-of-the-run-1234 key-5678-key pass-word-9"
    run.write_state(State(status="failed", reason=said))
    with open(run.events, "a") as events:
        events.write(
            json.dumps({"time": 1.0, "event": "dropped", "error": said, "more": {"a": [said]}}) + "\n"
        )

    page = render(run)
    for secret in (*said.split(), "/a/private/place", "secret-argument", "secret-path"):
        assert secret not in page
    overview = overview_of(run)
    assert overview["environment"] == ["API_KEY", "PASS", "PLACE"]
    assert overview["run"]["reason"] == f"${{{TOKEN_VARIABLE}}} ${{API_KEY}} ${{PASS}}"
    assert "path: ${PLACE}/model" in overview["stack"]
    stack["guards"]["notify"]["webhook"] = "${HOOK}"
    run.write("stack.json", stack)
    assert "webhook: ${HOOK}" in overview_of(run)["stack"]


def test_a_run_that_has_done_nothing_yet(tmp_path):
    overview = overview_of(empty_run(tmp_path))
    assert overview["run"]["status"] == "created"
    assert overview["rollouts"] == {"shown": 0, "left_out": 0, "chunks": 0}
    assert overview["audit"]["problem"]
    assert overview["curves"] == {"from": [], "to": [], "columns": {}}


def test_a_run_that_failed_before_its_first_step(tmp_path):
    run = empty_run(tmp_path)
    run.write_state(State(status="failed", attempt=1, reason="engine-0 failed", roles={"engine-0": "failed"}))
    run.logs(1).mkdir(parents=True)
    (run.logs(1) / "engine-0.log").write_text("starting\nValueError: no such model\n")
    overview = overview_of(run)
    assert (overview["run"]["status"], overview["run"]["reason"]) == ("failed", "engine-0 failed")
    assert overview["run"]["words"] == [["engine-0", ["starting", "ValueError: no such model"]]]


def test_a_report_does_not_read_all_of_the_checkpoints(tmp_path, monkeypatch):
    run = written_run(tmp_path, 16, 8, books=True)
    checkpoint = checkpoints.folder(run.checkpoints(run.stack()), 6)
    (checkpoint / "trainer").mkdir(parents=True)
    (checkpoint / "trainer" / "weights.distcp").write_bytes(b"very many bytes")
    checkpoints.write_manifest(checkpoint, {"index": 6})
    monkeypatch.setattr(checkpoints, "_hash", None)
    audit = overview_of(run)["audit"]
    assert [(known["name"], known["problem"]) for known in audit["checkpoints"]] == [("step-000006", "")]
    assert any("only names and sizes were compared" in note for note in audit["notes"])


@pytest.mark.slow
def test_any_file_may_be_missing_or_torn(tmp_path):
    run = written_run(tmp_path / "whole", 16, 8, books=True)
    assert overview_of(run)["audit"]["clean"] is True
    names = [file.relative_to(run.path) for file in run.path.rglob("*") if file.is_file()]
    assert len(names) > 8
    for place, name in enumerate(names):
        folder = tmp_path / f"{place}" / "run"
        shutil.copytree(run.path, folder)
        (folder / name).write_bytes((run.path / name).read_bytes()[:-30])
        render(RunFolder(folder))
        (folder / name).unlink()
        render(RunFolder(folder))


def test_a_killed_run_tells_what_it_wrote(tmp_path):
    run = written_run(tmp_path, 24, 8)
    with open(run.metrics, "a") as metrics:
        metrics.write('{"kind": "rl", "index": 5, "rew')
    run.write_state(State(status="running", attempt=1, began=1.0))
    overview = overview_of(run)
    assert overview["run"]["status"] == "died"
    assert overview["run"]["done"] == 5


def test_steps_that_were_undone_are_not_drawn():
    steps = [{"index": n, "time": float(n)} for n in (0, 1, 2, 3)]
    assert [r["time"] for r in surviving([*steps, {"index": 2, "time": 9.0}])] == [0.0, 1.0, 9.0]
    resumed = {"event": "resumed", "index": 2, "time": 5.0}
    assert [r["index"] for r in surviving(steps, [resumed])] == [0, 1]
    assert [r["index"] for r in surviving([*steps, {"index": 2, "time": 9.0}], [resumed])] == [0, 1, 2]


def test_long_curves_are_means_of_stretches_and_keep_their_extremes():
    steps = [
        {"index": n, "reward": n % 2, "staleness_max": n % 7, "reward_min": -n, "trainer/loss": None}
        for n in range(4 * MOST_POINTS)
    ]
    curves = _curves(steps)
    assert len(curves["from"]) == MOST_POINTS
    assert (curves["from"][1], curves["to"][1]) == (4, 7)
    assert curves["columns"]["reward"][:2] == [0.5, 0.5]
    assert curves["columns"]["staleness_max"][1] == 6
    assert curves["columns"]["reward_min"][1] == -7
    assert "trainer/loss" not in curves["columns"]


def test_the_worst_load_of_experts_is_drawn_and_not_that_of_each_layer():
    steps = [{"index": 0, "trainer/load_imbalance": 1.5, "trainer/load_imbalance/3": 1.5}]
    assert _curves(steps)["columns"] == {"trainer/load_imbalance": [1.5]}


def test_older_rollouts_are_counted_where_there_are_too_many(tmp_path, monkeypatch):
    run = written_run(tmp_path, 40, 8)
    monkeypatch.setattr(report_rollouts, "MOST_ROLLOUTS", 20)
    embedded = embed(run.path / "rollouts", run.model)
    assert (len(embedded.table["id"]), embedded.left_out) == (24, 16)
    assert embedded.table["step"] == sorted(embedded.table["step"], reverse=True)
    monkeypatch.setattr(report_rollouts, "MOST_TOKENS", 2000)
    embedded = embed(run.path / "rollouts", run.model)
    assert 0 < len(embedded.table["id"]) < 24
    assert len(embedded.table["id"]) + embedded.left_out == 40


def test_chunks_are_cut_by_rollouts_and_by_tokens(tmp_path, monkeypatch):
    run = written_run(tmp_path, 40, 8)
    assert embed(run.path / "rollouts", run.model).table["chunk"] == [0] * 40
    monkeypatch.setattr(report_rollouts, "_CHUNK_ROLLOUTS", 16)
    table = embed(run.path / "rollouts", run.model).table
    assert table["chunk"] == [0] * 16 + [1] * 16 + [2] * 8
    assert table["place"] == [*range(16), *range(16), *range(8)]
    monkeypatch.setattr(report_rollouts, "_CHUNK_TOKENS", 1)
    assert embed(run.path / "rollouts", run.model).table["chunk"] == list(range(40))


def test_tokens_are_their_bytes(tmp_path):
    tokenizer = byte_tokenizer(256)
    tokenizer.save_pretrained(tmp_path)
    pieces = Pieces(tmp_path)
    wanted = "naïve ✓ 你好\n\t<|im_end|>user"
    numbers = tokenizer.encode(wanted)
    assert text(pieces.of(numbers)) == wanted
    assert [195] in map(as_json, pieces.of(numbers)), "the first byte of ï is only a part of a character"
    assert [pieces.special(n) for n in tokenizer.encode("a<|im_end|>user")] == [False, True, False]
    assert text(pieces.of([263, -1])) == "⟨263⟩⟨-1⟩"


def test_tokens_of_sentencepiece_are_text_too(tmp_path):
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"<unk>": 0, "▁the": 1, "▁en": 2, "gine": 3, "<0xE2>": 4, "<0x9C>": 5, "<0x93>": 6}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    pieces = Pieces(tmp_path).of([1, 2, 3, 4, 5, 6])
    assert [as_json(piece) for piece in pieces] == [" the", " en", "gine", [0xE2], [0x9C], [0x93]]
    assert text(pieces) == " the engine✓"


@pytest.mark.parametrize("content", [None, "{not a tokenizer"])
def test_without_a_tokenizer_tokens_are_numbers(tmp_path: Path, content):
    if content:
        (tmp_path / "tokenizer.json").write_text(content)
    assert text(Pieces(tmp_path).of([7, 12])) == "⟨7⟩⟨12⟩"


def test_the_list_shows_what_was_asked_and_answered(tmp_path):
    run = written_run(tmp_path, 8, 8, answer=lambda group, number: f"my answer\nto {group}-{number}")
    table = embed(run.path / "rollouts", run.model).table
    assert table["answer"][0] == "my answer to 0-0"
    assert re.fullmatch(r"reverse: \w+ \w+", table["prompt"][0])

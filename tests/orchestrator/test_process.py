"""The orchestrator as a process: its exit codes and its last line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from small_runs import STACK, TOKEN, make_run

from stackrl.runtime.orchestrator import __main__ as process_of_the_orchestrator

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "stackrl.runtime.orchestrator"]


def start(run, **environment):
    env = {**os.environ, "STACKRL_TOKEN": TOKEN, **environment}
    return subprocess.Popen([*COMMAND, str(run.path)], stderr=subprocess.PIPE, text=True, env=env)


def begun(run, process):
    """Wait until the orchestrator has opened its sinks."""
    deadline = time.monotonic() + 60
    while not run.events.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)


def test_engines_have_as_long_for_a_reply_as_its_rollout(tmp_path, monkeypatch):
    long = STACK["stages"][1] | {"sampling": {"timeout": 3600.0}}
    run = make_run(tmp_path, stages=[STACK["stages"][0], long])
    monkeypatch.setattr(process_of_the_orchestrator, "Engine", lambda url, token, **more: (url, more))
    url, more = process_of_the_orchestrator._connector(run, TOKEN)("http://one", "decode")
    assert url == "http://one" and more["pool"] == "decode" and more["timeout"] > 3600


def test_ends_cleanly_at_sigterm(tmp_path):
    run = make_run(tmp_path)
    process = start(run)
    begun(run, process)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    assert "Traceback" not in process.stderr.read()


def test_without_a_trainer_sigusr2_ends_it_with_nothing_to_save(tmp_path):
    run = make_run(tmp_path)
    process = start(run)
    begun(run, process)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=20) == 0, process.stderr.read()
    assert not run.checkpoints(run.stack()).exists()


def test_bad_input_is_the_last_line_and_not_tried_again(tmp_path):
    run = make_run(tmp_path)
    config = json.loads((run.model / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (run.model / "tokenizer_config.json").write_text(json.dumps(config))
    (run.model / "chat_template.jinja").unlink(missing_ok=True)
    process = start(run)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 2
    assert stderr.splitlines()[-1].startswith("error: ") and "has no chat template" in stderr.splitlines()[-1]
    assert "Traceback" not in stderr


def test_a_disk_that_refuses_the_journal_is_the_last_line(tmp_path):
    run = make_run(tmp_path)
    run.journal.write_text("no folder can be made here")
    process = start(run)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1 and "Traceback" not in stderr
    last = stderr.splitlines()[-1]
    assert last.startswith(f"error: the journal {run.journal}/journal.sqlite could not be opened: ")


def test_says_in_its_heartbeat_what_it_waits_for(tmp_path):
    run = make_run(tmp_path)
    beats = tmp_path / "heartbeats"
    beats.mkdir()
    process = start(run, STACKRL_HEARTBEATS=str(beats), STACKRL_PROCESS="orchestrator")
    try:
        deadline = time.monotonic() + 60
        while "trainer" not in (said := said_by(beats / f"orchestrator.{process.pid}"))["doing"]:
            assert process.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate()
    assert said["doing"] == "waiting for the trainer to start"
    assert (said["index"], said["finished"], said["checkpoint"]) == (0, 0, 0)


def said_by(file):
    return json.loads(file.read_text()) if file.exists() else {"doing": ""}


@pytest.mark.parametrize("token", ["", None])
def test_needs_the_token(tmp_path, token):
    run = make_run(tmp_path)
    env = {key: value for key, value in os.environ.items() if key != "STACKRL_TOKEN"}
    env |= {"STACKRL_TOKEN": token} if token is not None else {}
    result = subprocess.run([*COMMAND, str(run.path)], capture_output=True, text=True, env=env, timeout=60)
    assert result.returncode == 1 and "STACKRL_TOKEN is not set" in result.stderr

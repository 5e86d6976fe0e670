"""What `plan` says of machines: prices, memory, the time of a step, and the run that is at work."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import pytest
from price_catalogs import write_catalogs

import stacks
from stackrl.cli import main
from stackrl.runtime.launch.planning.forecast import forecasts
from stackrl.runtime.launch.planning.forecast_table import forecast_table
from stackrl.runtime.launch.planning.plan import make_plan
from stackrl.runtime.run import RunFolder, State, create_run
from stackrl.schemas.loader import load

CHOICES = """\
num_nodes: 1
resources:
  accelerators: "H100:8"
  any_of:
    - {infra: slurm/lab}
    - {infra: aws, use_spot: true}
    - {infra: k8s}
    - {infra: aws, accelerators: "B200:8"}
"""
QWEN = (
    ("num_nodes: 1\n", CHOICES),
    (
        "{init: random, architecture: qwen3, config: {hidden_size: 64, num_hidden_layers: 2}}",
        "{id: Qwen/Qwen3-4B}",
    ),
    (
        "trainer: {processes: 1}\n      inference: {processes: 1}\n",
        "trainer: {gpus: 1}\n      inference: {gpus: 7}\n    trainer: {activation_checkpointing: full}\n",
    ),
    ("sampling: {max_tokens: 9}", "sampling: {max_tokens: 2000}"),
    ("batch_size: 64", "batch_size: 2048"),
)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder with catalogs, and no runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "stackrl"))
    write_catalogs(tmp_path)
    return tmp_path


@pytest.fixture
def plan(home, capsys):
    """Runs the verb on small.yaml: (exit code, what it prints)."""

    def run(*arguments: str):
        code = main(["plan", "small.yaml", *arguments])
        return code, capsys.readouterr().out

    return run


def test_every_candidate_has_a_price_memory_and_a_time(home):
    found = forecasts(load(stacks.write(home, *QWEN)))
    assert [one.hourly for one in found] == [0.0, 24.80, None, 113.93]
    assert [one.candidate.kind_of("trainer").accelerator for one in found] == ["H100", "H100", "H100", "B200"]
    slurm, spot, _, blackwell = found
    assert slurm.memory == spot.memory and slurm.estimate == spot.estimate
    assert [role.role for role in slurm.memory] == ["trainer", "inference"]
    assert blackwell.memory[1].cache.tokens > slurm.memory[1].cache.tokens
    assert blackwell.estimate.step.seconds < slurm.estimate.step.seconds


def test_the_table(home):
    text = forecast_table(forecasts(load(stacks.write(home, *QWEN))))
    rows = {line.split("  ")[0]: line for line in text.splitlines()}
    assert rows["slurm/lab H100:8"].count("not billed") == 3
    assert re.search(r"\$55\.04 +\$24\.80 +\$24\.80 +about", rows["aws H100:8 spot"])
    assert rows["k8s H100:8"].count("unknown") == 3
    assert re.search(r"\$113\.93 +\$56\.20 +\$113\.93 +about .* +engines \d+%", rows["aws B200:8"])
    assert "GiB OF A GPU, H100" in text and "GiB OF A GPU, B200" in text
    assert re.search(r"trainer +\d+\.\d of 78\.6 +[a-z ]+: .*optimizer \d+\.\d", text)
    assert "requests of the longest; 147,456 bytes a token" in text
    better = next(line for line in text.splitlines() if line.startswith("better"))
    told = re.search(
        r"aws H100:8 spot; k8s H100:8: with trainer: {gpus: (\d)}, inference: {gpus: \d}", better
    )
    assert int(told[1]) > 1
    assert "512 tokens read and 1,000 sampled in a rollout (`--reply TOKENS`" in text
    assert "prices " not in text  # all are known, but that of somebody's cluster, which no catalog tells


def test_what_no_split_can_help_is_said(home):
    """A trainer on one GPU cannot give up any; and short steps wait for the way of the weights."""
    one = (QWEN[2][0], QWEN[2][1].replace("gpus: 7", "gpus: 1"))
    machine = (QWEN[0][0], QWEN[0][1].replace(":8", ":2"))
    text = forecast_table(forecasts(load(stacks.write(home, machine, QWEN[1], one, *QWEN[3:])), reply=50_000))
    assert re.search(r"better .*; the engines need \d+\.\d times as long: more GPUs for the engines", text)
    text = forecast_table(forecasts(load(stacks.write(home, machine, QWEN[1], one)), reply=5))
    assert re.search(r"better .*; the engines need \d+\.\d times as long: a faster weights.transport", text)


def test_a_small_stack_for_cores_is_told_in_few_words(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home / "elsewhere"))
    monkeypatch.chdir(stacks.ROOT)
    text = forecast_table(forecasts(load("stacks/reverse-text-cpu.yaml")))
    assert text.startswith("GiB OF A PROCESS") and "MiB" in text
    assert "unknown" not in text and "MACHINES" not in text


def test_without_catalogs_prices_are_unknown(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home / "elsewhere"))
    text = forecast_table(forecasts(load(stacks.write(home, *QWEN))))
    assert "$" not in text and "`sky gpus list` fetches them" in text


def test_what_is_not_known_of_a_model_is_said(home):
    unknown = (QWEN[0], (QWEN[1][0], "{id: nobody/nothing}"), *QWEN[2:])
    text = forecast_table(forecasts(load(stacks.write(home, *unknown))))
    assert "GiB" not in text
    assert text.count("step      unknown, nothing here says what the model is made of") == 1


def test_roles_of_different_kinds_are_priced_together(home):
    changes = (
        ("num_nodes: 1\n", "num_nodes: 3\nsecrets: {STACKRL_TOKEN: null}\nresources: {infra: aws}\n"),
        QWEN[1],
        (
            "trainer: {processes: 1}\n      inference: {processes: 1}\n",
            "trainer: {nodes: 1, resources: {accelerators: 'B200:8'}}\n"
            "      inference: {nodes: 2, resources: {accelerators: 'H100:8', use_spot: true}}\n"
            "    trainer: {activation_checkpointing: full}\n",
        ),
    )
    (found,) = forecasts(load(stacks.write(home, *changes)))
    assert found.hourly == pytest.approx(113.93 + 2 * 24.80)
    assert [role.accelerator for role in found.memory] == ["B200", "H100"]
    assert found.estimate.step.seconds > 0 and found.estimate.better is None
    text = forecast_table([found])
    assert "1 × aws B200:8 + 2 × aws H100:8 spot  $113.93 + $55.04" in text
    assert "GiB OF A GPU, B200 and H100" in text


def test_json(home, plan):
    stacks.write(home, *QWEN)
    code, out = plan("-o", "json", "--reply", "100")
    told = json.loads(out)
    assert code == 0 and told["running"] is None
    assert [pool["processes"] for pool in told["pools"]] == [1, 7]
    slurm, spot, _, blackwell = told["candidates"]
    assert (slurm["name"], slurm["hourly"], slurm["groups"][0]["billed"]) == ("slurm/lab H100:8", 0.0, False)
    assert spot["groups"][0]["spot"] == {
        "dollars": 24.80, "cloud": "aws", "region": "us-west-2", "instance_type": "p5.48xlarge",
    }  # fmt: skip
    assert spot["step"]["tokens"]["reply"] == 100 and spot["step"]["seconds"] > 0
    trainer, inference = blackwell["memory"]
    assert trainer["phases"][0]["parts"]["optimizer"] > 0 and trainer["lacking"] == 0
    assert inference["cache"]["tokens"] > 0 and inference["peak"] <= inference["capacity"]


def running(home, *changes: tuple[str, str]) -> RunFolder:
    """A run of small.yaml that was launched before, as its folder says."""
    loaded = load(stacks.write(home, *changes))
    made = make_plan(loaded)
    stack = loaded.stack.model_copy(update={"device": made.device})
    run = create_run(loaded.name, loaded.path, loaded.hash, stack, asdict(made))
    run.write_state(State(status="running", attempt=1))
    return run


def test_a_plan_is_compared_with_the_run_at_work(home, plan):
    run = running(home)
    code, out = plan("--exit-code")
    assert (code, out.splitlines()[-1]) == (1, "running   no run called small is at work")
    assert plan()[0] == 0

    with run.kept():  # as its node program does
        code, out = plan("--exit-code")
        assert (code, out.splitlines()[-1]) == (0, f"running   {run.id} is at work with this very plan")

        code, out = plan("--exit-code", "--set", "roles.trainer.processes=2", "--set", "seed=7")
        assert code == 1
        differs = out.split(f"RUNNING {run.id}")[1].splitlines()
        assert [line.split() for line in differs if line.startswith("seed")] == [["seed", "0", "7"]]
        assert [line.split() for line in differs if "pools.trainer.processes" in line] == [
            ["plan.pools.trainer.processes", "1", "2"]
        ]
        told = json.loads(plan("-o", "json", "--set", "seed=7")[1])["running"]
        assert told == {"run": run.id, "differs": [{"key": "seed", "left": 0, "right": 7}]}


def test_runs_of_other_names_do_not_matter(home, plan):
    with running(home, ("name: small", "name: other")).kept():
        stacks.write(home)
        assert plan("--exit-code")[0] == 1


@pytest.mark.parametrize("reply", ["0", "-1", "many"])
def test_a_reply_has_tokens(plan, capsys, reply):
    assert main(["plan", "small.yaml", "--reply", reply]) == 2
    assert "usage" in capsys.readouterr().err

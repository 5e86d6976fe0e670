"""The command line: exit codes, what goes where, and how little it loads."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

import stacks
from stackrl.cli import FIRST, main
from stackrl.runtime.launch import front

SERVICE = ("run:", "service: {replicas: 1}\nrun:")
"""A change to a good stack: a part of SkyPilot that the runtime does not know."""
HEAVY = ("torch", "vllm", "transformers", "sky", "numpy", "aiohttp", "httpx", "msgspec", "rich")


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Runs a command line in an empty folder with a home of its own: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "home"))

    def run(*arguments):
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("template", front.templates())
def test_a_new_stack_is_valid_and_can_be_planned(cli, tmp_path, template):
    code, out, err = cli("init", "mine", "--template", template)
    assert (code, out) == (0, "mine.yaml\n") and "stackrl launch mine.yaml" in err
    assert cli("validate", "mine.yaml") == (0, "mine.yaml: fine\n", "")
    assert cli("plan", "mine.yaml")[0] == 0
    text = (tmp_path / "mine.yaml").read_text()
    assert "@" not in text and yaml.safe_load(text)["name"] == "mine"


def test_the_parser_offers_every_template(cli):
    assert f"{{{','.join(front.templates())}}}" in cli("init", "--help")[1]


def test_init_replaces_nothing_unasked(cli):
    assert cli("init", "mine")[0] == 0
    code, out, err = cli("init", "mine")
    assert (code, out) == (2, "") and "--force" in err
    assert cli("init", "mine", "--force")[0] == 0


def test_init_below_a_folder(cli, tmp_path):
    assert "mkdir -p deep" in cli("init", "deep/mine.yaml")[2]
    (tmp_path / "deep").mkdir()
    assert cli("init", "deep/mine.yaml")[1] == "deep/mine.yaml\n"
    assert cli("validate", "deep/mine.yaml")[0] == 0


def test_init_refuses_a_name_that_cannot_be_one(cli):
    code, _, err = cli("init", "my: run")
    assert code == 2 and "my: run" in err


def test_warnings_do_not_fail_but_on_a_node_they_do(cli, tmp_path):
    stacks.write(tmp_path, SERVICE)
    code, out, err = cli("validate", "small.yaml")
    assert (code, out) == (0, "small.yaml: fine (with warnings)\n")
    assert "small.yaml:5:1: warning: service: this part of SkyPilot is not used by a run; remove it" in err
    code, out, err = cli("validate", "--on-node", "small.yaml")
    assert (code, out) == (2, "") and "warning" not in err


def test_launch_and_node_refuse_what_cannot_run(cli, tmp_path, monkeypatch):
    stacks.write(tmp_path, SERVICE)
    for verb in ("launch", "up", "node"):
        if verb == "node":
            monkeypatch.setenv("SKYPILOT_NODE_RANK", "0")
            monkeypatch.setenv("SKYPILOT_NUM_NODES", "1")
            monkeypatch.setenv("SKYPILOT_NODE_IPS", "10.0.0.1")
            monkeypatch.setenv("STACKRL_TOKEN", "a-token-of-these-tests")
        code, out, err = cli(verb, "small.yaml")
        assert (code, out) == (2, "") and "service: this part of SkyPilot is not used" in err


def test_several_files_as_json(cli, tmp_path):
    stacks.write(tmp_path)
    (tmp_path / "bad.yaml").write_text(stacks.GOOD.replace("seed", "sed").replace("version: 1", "version: 2"))
    code, out, _ = cli("validate", "-o", "json", "small.yaml", "bad.yaml")
    good, bad = json.loads(out)
    assert code == 2 and good == {"file": "small.yaml", "errors": [], "warnings": []}
    assert {error["key"] for error in bad["errors"]} == {"version", "envs.STACK"} - {"envs.STACK"}
    assert bad["errors"][0]["line"] == 9


@pytest.mark.parametrize("output", ["yaml", "json"])
def test_what_show_prints_is_the_same_stack_again(cli, tmp_path, output):
    from stackrl.schemas.loader import load

    file = stacks.write(tmp_path)
    code, out, err = cli("show", "small.yaml", "-o", output, "--set", "algorithm.group_size=4")
    assert (code, err) == (0, "")
    shown = load(file, ["algorithm.group_size=4"]).stack
    file.write_text(out)
    assert load(file).stack == shown and shown.algorithm.group_size == 4


def test_show_keeps_secrets_to_itself(cli, tmp_path):
    stacks.write(tmp_path, ("run:", "secrets: {HF_TOKEN: hush, WANDB_API_KEY: null}\nrun:"))
    code, out, err = cli("show", "small.yaml")
    assert code == 2 and "secrets.HF_TOKEN" in err and "hush" not in out + err


def test_plan_as_table_and_json(cli, tmp_path):
    stacks.write(tmp_path)
    code, out, err = cli("plan", "small.yaml")
    assert (code, err) == (0, "") and "trainer-0" in out and "engine-0" in out and "orchestrator" in out
    code, out, err = cli("plan", "small.yaml", "-o", "json")
    assert [process["role"] for process in json.loads(out)["processes"]] == [
        "trainer",
        "engine",
        "orchestrator",
    ]


def test_schema(cli):
    assert json.loads(cli("schema")[1])["required"] == ["_metadata"]
    assert cli("schema", "-o", "markdown")[1].startswith("<!-- Generated")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "First steps"),
        (["fly"], "how it is used: `stackrl --help`"),
        (["validate"], "how it is used: `stackrl validate --help`"),
        (["plan", "small.yaml", "-o", "xml"], "how it is used"),
        (["logs", "-n", "-1"], "is not a whole number from 0"),
        (["plan", "nothing.yaml"], "there is no such file"),
        (["show", "."], "is a folder"),
        (["launch"], "--resume RUN"),
        (["down", "nobody"], "stackrl launch"),
        (["logs", "nobody"], "stackrl launch"),
        (["status", "nobody"], "stackrl launch"),
        (["launch", "--resume", "nobody"], "stackrl launch"),
        (["launch", "--resume", "nobody", "--from", "nobody@3"], "resumed or forked"),
        (["audit", "nobody"], "stackrl launch"),
        (["watch", "nobody"], "stackrl launch"),
        (["ports", "nobody"], "stackrl launch"),
        (["report", "nobody"], "stackrl launch"),
        (["export", "nobody"], "stackrl launch"),
        (["export", "nobody", "there", "--dtype", "int8"], "how it is used: `stackrl export --help`"),
        (["diff", "nobody", "latest"], "stackrl launch"),
        (["exec", "nobody", "--", "true"], "stackrl launch"),
        (["exec", "nobody"], "how it is used: `stackrl exec --help`"),
        (["launch", "nothing.yaml", "--infra", "slurm"], "there is no such file"),
    ],
)
def test_bad_usage_is_2_and_says_what_to_do(cli, arguments, words):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "") and words in err and "Traceback" not in err


def test_changes_of_a_resumed_run_need_a_file_to_change(cli):
    code, out, err = cli("launch", "--resume", "latest", "--set", "seed=1", "--set", "a=[1, 2]")
    assert (code, out) == (2, "")
    assert "`stackrl launch FILE --resume latest --set seed=1 --set 'a=[1, 2]'`" in err


def test_the_example_of_the_help_works_on_the_demo(cli, monkeypatch):
    help = " ".join(cli("validate", "--help")[1].split())
    example = re.search(r"as in --set (\S+)", help)[1]
    assert f"--set {example}" in (stacks.ROOT / "docs" / "stack.md").read_text()
    monkeypatch.chdir(stacks.ROOT)
    assert cli("validate", FIRST, "--set", example)[0] == 0


def test_version(cli):
    declared = tomllib.loads((stacks.ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert cli("--version") == (0, f"stackrl {declared}\n", "")


def test_help_is_fine(cli):
    code, out, err = cli("--help")
    assert code == 0 and "launch" in out and err == ""


def test_a_reader_that_goes_away_is_no_failure():
    command = f"{sys.executable} -m stackrl schema | head -c 10; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=stacks.ROOT, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_ctrl_c_is_130(cli, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(front, "plan", interrupted)
    assert cli("plan", "small.yaml")[0] == 130


@pytest.mark.slow
@pytest.mark.parametrize("verb", [["validate"], ["show"], ["plan"]])
def test_the_front_is_light(verb):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "stackrl", *verb, "stacks/glm5.yaml"],
        capture_output=True,
        text=True,
        cwd=stacks.ROOT,
        timeout=60,
    )
    assert done.returncode == 0
    loaded = {
        line.rpartition("|")[2].strip().partition(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "stackrl" in loaded and not loaded & set(HEAVY)


def test_validate_works_without_network():
    """Any use of a socket ends the process."""
    program = (
        "import sys, runpy\n"
        "def refuse(event, arguments):\n"
        "    if event.startswith('socket.'): raise SystemExit(f'used {event}')\n"
        "sys.addaudithook(refuse)\n"
        "sys.argv = ['stackrl', 'validate', 'stacks/glm5.yaml']\n"
        "runpy.run_module('stackrl', run_name='__main__', alter_sys=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=stacks.ROOT,
        timeout=60,
        env=os.environ,
    )
    assert (done.returncode, done.stdout) == (0, "stacks/glm5.yaml: fine (with warnings)\n")

"""docs/launching.md: every command in its console blocks is run as it stands there, in its order.

Three things are not as on the page: launches are shortened (a few steps instead of minutes), homes are empty
folders, and what begins a run on a cloud ends where SkyPilot has chosen the machine (a dry run). A block
below ``<!-- not run by tests: why -->`` is only read.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
import sys

import pytest
import skypilot_server
import slurm_cluster

import stacks
from stackrl.cli import _parser

PAGE = stacks.ROOT / "docs" / "launching.md"
BLOCK = re.compile(r"(<!-- not run by tests: [^>]+ -->\n)?```console\n(.*?)```", re.DOTALL)
SHORT = {
    "stacks/reverse-text-cpu.yaml": [
        *("stages.warmup.steps=4", "stages.warmup.clean_steps=2", "stages.short.steps=2"),
        *("stages.long.steps=1", "algorithm.batch_size=16", "checkpoint.every=2"),
        *(f"stages.{stage}.optimizer.warmup_steps=0" for stage in ("warmup", "short", "long")),
    ]
}
"""What is changed in a launch of a stack, that it takes a minute at most once its engines are there."""
STACKRL = f"""#!{sys.executable}
import os, sys

words, short = sys.argv[1:], {SHORT!r}
if words[:1] == ["launch"]:
    words += [word for file in words if file in short for change in short[file] for word in ("--set", change)]
os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "stackrl", *words])
"""
LOOKING = ("plan", "validate", "show")
LIMIT = 900


def sections() -> dict[str, list[str]]:
    """The commands of each section, without those that are only read."""
    parts = re.split(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    parts = ["Opening", *parts]
    return {
        title: [command for mark, block in BLOCK.findall(text) if not mark for command in commands(block)]
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def commands(block: str) -> list[str]:
    """Those after ``$``; lines that end with a backslash go on."""
    return [line[2:] for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]


def all_commands() -> list[str]:
    return [command for _, block in BLOCK.findall(PAGE.read_text()) for command in commands(block)]


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """Runs the commands of a section in one shell, from the repository's root. Each must succeed."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "stackrl").write_text(STACKRL)
    (programs / "stackrl").chmod(stat.S_IRWXU)
    monkeypatch.setenv("STACKRL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("STACKRL_TOKEN", raising=False)

    def run(title: str, **environment: str) -> str:
        script = tmp_path / "commands.sh"
        script.write_text("set -eu -o pipefail\n" + "\n".join(sections()[title]) + "\n")
        done = subprocess.run(
            ["bash", "-v", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            cwd=stacks.ROOT,
            env={
                **os.environ,
                **environment,
                "PATH": f"{programs}:{environment.get('PATH', os.environ['PATH'])}",
            },
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


def test_every_command_is_one_that_there_is():
    parser = _parser()
    for command in all_commands():
        words = shlex.split(command, comments=True)
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        for file in (word for word in words if word.startswith("stacks/")):
            assert (stacks.ROOT / file).exists(), command
        if words[0] == "stackrl":
            parser.parse_args(words[1:])
        else:
            assert words[0] in ("sky", "export", "docker", "ssh", "scancel", "squeue"), command


def test_every_section_with_commands_is_run_below():
    ran = {"Opening", "This machine", "A Slurm cluster", "A cloud", "Runs: status, logs, exec, down, money"}
    assert {title for title, found in sections().items() if found} <= ran


@pytest.mark.slow
def test_what_only_looks(shell, tmp_path):
    for command in dict.fromkeys(all_commands()):
        words = shlex.split(command, comments=True)
        if words[0] == "stackrl" and words[1] in LOOKING:
            done = subprocess.run(
                [sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=60,
                cwd=stacks.ROOT,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.nightly
def test_this_machine(shell):
    assert " finished in " in shell("This machine")


@pytest.mark.nightly
def test_runs(shell):
    said = shell("Runs: status, logs, exec, down, money")
    assert "reverse-text-cpu-" in said and "plan.json" in said


@pytest.mark.nightly
def test_a_cloud(shell, tmp_path):
    with skypilot_server.server(tmp_path) as environment:
        assert "Dryrun finished." in shell("A cloud", **environment)


@pytest.mark.nightly
def test_a_slurm_cluster(shell):
    if why := slurm_cluster.lacking():
        pytest.skip(f"no Slurm here: {why}")
    with slurm_cluster.cluster() as tower:
        said = shell("A Slurm cluster", **tower.environment)
        assert " finished in " in said
        assert not tower.command("squeue", "-h")

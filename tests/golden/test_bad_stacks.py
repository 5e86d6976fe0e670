"""What `stackrl validate` says of bad stacks (tests/wrong_stacks.py), word by word, in errors.txt.

After a wanted change: ``STACKRL_WRITE_GOLDEN=1 .venv/bin/pytest tests/golden``, and read the difference.
"""

import os
import re
from pathlib import Path

import pytest
from wrong_stacks import BAD

import stacks
from stackrl.cli import main

GOLDEN = Path(__file__).with_name("errors.txt")
SAID = re.compile(r"(small\.yaml:\d+:\d+: .*(; .+|must (be|hold|not be) .+)\n)+\d+ to mend; .+\nexit 2\n$")
"""Each error has a line and column, and says what to write instead."""


@pytest.fixture
def said(tmp_path, monkeypatch, capsys):
    """What the command line says of a file called small.yaml, and its exit code."""
    monkeypatch.chdir(tmp_path)

    def run(content, *more):
        file = tmp_path / "small.yaml"
        if content is not None:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())
        code = main(["validate", "small.yaml", *more])
        out, err = capsys.readouterr()
        assert out == ""
        return f"{err}exit {code}\n"

    return run


@pytest.mark.slow
def test_bad_stacks_say_what_the_golden_file_says(said, tmp_path):
    told = {name: said(content) for name, content in BAD.items()}
    (tmp_path / "small.yaml").unlink()
    told["a file that is not there"] = said(None)
    (tmp_path / "small.yaml").mkdir()
    told["a folder"] = said(None)
    (tmp_path / "small.yaml").rmdir()
    os.mkfifo(tmp_path / "small.yaml")
    told["a named pipe"] = said(None)
    assert all("Traceback" not in text and text.endswith("exit 2\n") for text in told.values())
    nowhere = {"a file that is not there", "a folder", "a named pipe"}
    for name, said_of_it in told.items():
        assert name in nowhere or SAID.match(said_of_it), said_of_it
    text = "\n".join(f"# {name}\n{message}" for name, message in told.items())
    if os.environ.get("STACKRL_WRITE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_a_bad_override_says_so(said):
    assert said(stacks.GOOD, "--set", "algorithm.group_siz=4", "--set", "stages.late.steps=1") == (
        "--set algorithm.group_siz: there is no such key; did you mean group_size?\n"
        "--set stages.late.steps: the list has no entry late: it has 2 (warmup, main); "
        "`stackrl show` prints the stack as it is\n"
        "2 to mend; all keys: docs/stack.md, examples: stacks/\n"
        "exit 2\n"
    )

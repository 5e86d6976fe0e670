"""What `stackrl validate` says of bad stacks, word by word, in errors.txt.

After a wanted change: ``STACKRL_WRITE_GOLDEN=1 .venv/bin/pytest tests/golden``, and read the difference.
"""

import os
from pathlib import Path

import pytest

import stacks
from stackrl.cli import main

GOLDEN = Path(__file__).with_name("errors.txt")


def changed(*changes):
    text = stacks.GOOD
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]"
    for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

BAD = {
    "typo in a key of SkyPilot": changed(("num_nodes: 1", "num_node: 1")),
    "typo in resources": changed(("workdir: .", "resources: {acelerators: 'H100:8'}")),
    "typo in a cloud": changed(("workdir: .", "resources: {infra: asw}")),
    "a key of the stack at the top": changed(("workdir: .", "seed: 1")),
    "typo in the stack's own name": changed(("  stack:", "  stak:")),
    "typo in a section": changed(("algorithm:", "algoritm:")),
    "typo in a section's key": changed(("batch_size: 64", "batchsize: 64")),
    "typo inside a variant": changed(("ratio_cap: 2.0", "ratio_cup: 2.0")),
    "typo in the model's shape": changed(("hidden_size: 64", "hidden: 64")),
    "typo in an argument of an environment": changed(("letters: [3, 6]", "leters: [3, 6]")),
    "typo in a stage": changed(("clean_steps: 10", "cleansteps: 10")),
    "a key of another variant": changed(("type: rl, steps: 5", "type: rl, steps: 5, noise: 0.5")),
    "unknown loss": changed(("type: aipo", "type: ppo")),
    "unknown environment": changed(("type: reverse_text", "type: reverse-text")),
    "unknown architecture": changed(("qwen3", "qwen2")),
    "stage without a type": changed(("type: rl, ", "")),
    "text for a number": changed(("group_size: 8", "group_size: eight")),
    "a number in quotes": changed(("group_size: 8", 'group_size: "8"')),
    "a fraction for a count": changed(("group_size: 8", "group_size: 8.5")),
    "out of range": changed(("ratio_cap: 2.0", "ratio_cap: 0.5")),
    "a list for a mapping": changed(("sampling: {max_tokens: 9}", "sampling: [9]")),
    "nothing for a section": changed(("sampling: {max_tokens: 9}", "sampling:")),
    "missing keys": changed(("    version: 1\n", ""), ("      trainer: {processes: 1}\n", "")),
    "split that does not add up": changed(
        *stacks.gpus(8, "{trainer: {gpus: 4}, inference: {gpus: 2}}"),
    ),
    "GPUs without resources": changed(("trainer: {processes: 1}", "trainer: {gpus: 1}")),
    "batches that are not whole groups": changed(("batch_size: 64", "batch_size: 60")),
    "supervised after rl": changed(
        ("supervised, steps: 20, clean_steps: 10", "rl, steps: 20"),
        ("type: rl, steps: 5", "type: supervised, steps: 5"),
    ),
    "replies that do not fit": changed(("max_tokens: 9", "max_tokens: 9000")),
    "another file is named": changed(("STACK: small.yaml", "STACK: other.yaml")),
    "several nodes without a token": changed(
        ("num_nodes: 1", "num_nodes: 2"),
        ("trainer: {processes: 1}", "trainer: {nodes: 1}"),
        ("inference: {processes: 1}", "inference: {nodes: 1}"),
    ),
    "many things at once": changed(
        ("workdir: .", "work_dir: ."),
        ("version: 1", "version: 2"),
        ("max_tokens: 9", "max_token: 9"),
        ("steps: 5", "steps: -5"),
    ),
    "data and environments": changed(
        ("steps: 20, clean_steps: 10", "steps: 20, noise: 0.5, data: {path: chats.jsonl}")
    ),
    "typo in a section of data": changed(
        ("steps: 20, clean_steps: 10", "data: {path: a.jsonl, too_lng: drop}")
    ),
    "a role that is none": changed(("steps: 20, clean_steps: 10", "data: {path: a.jsonl, learn: [human]}")),
    "steps and epochs": changed(
        ("steps: 20, clean_steps: 10", "steps: 20, epochs: 2, data: {path: a.jsonl}")
    ),
    "a stage without a length": changed(("steps: 20, clean_steps: 10", "epochs: 2")),
    "held-out rows of nowhere": changed(
        ("steps: 20, clean_steps: 10", "data: {path: a.jsonl}, validation: {every: 5}"),
    ),
    "rl without engines or environments": changed(
        ("      inference: {processes: 1}\n", ""),
        ("    environments:\n      - {name: reverse, type: reverse_text, args: {letters: [3, 6]}}\n", ""),
    ),
    "a key twice": changed(("    version: 1\n", "    version: 1\n    version: 1\n")),
    "a tab": changed(("    version: 1", "\tversion: 1")),
    "an unquoted date": changed(("name: small", "name: 2026-01-31")),
    "a key that is not text": changed(("workdir: .", "on: 1")),
    "empty": "",
    "only comments": "# nothing\n",
    "not YAML": "name: [1, 2\nnum_nodes: 1\n",
    "a colon too many": "name: a: b\n",
    "plain text": "hello\n",
    "two documents": changed(("_metadata:", "---\n_metadata:")),
    "a tag": changed(("name: small", "name: !stack small")),
    "an alias to nowhere": changed(("name: small", "name: *nowhere")),
    "anchor bomb": BOMB,
    "over 1 MiB": "#" * (1 << 20) + "\n" + stacks.GOOD,
    "not UTF-8": b"name: \xff\n",
    "a control character": "name: \x07\n",
}


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
    assert all("Traceback" not in text and text.endswith("exit 2\n") for text in told.values())
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

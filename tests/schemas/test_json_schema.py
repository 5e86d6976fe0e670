"""The generated schema and reference are fresh, complete, and agree with the loader."""

import json

import jsonschema
import pytest

import stacks
from stackrl.schemas.json_schema import CHANGE, file_schema
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError
from stackrl.schemas.reference import reference
from stackrl.schemas.source import parse

SCHEMA = stacks.ROOT / "schemas" / "stack.schema.json"
STALE = "run `make schema`"


@pytest.fixture(scope="module")
def validator():
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def test_the_committed_schema_is_fresh():
    assert json.loads(SCHEMA.read_text()) == file_schema(), STALE


def test_the_committed_reference_is_fresh():
    assert (stacks.ROOT / "docs" / "stack.md").read_text() == reference(), STALE


def test_every_key_is_described():
    silent = [
        f"{name}.{key}"
        for name, model in file_schema()["$defs"].items()
        if not name.endswith(CHANGE)
        for key, field in model.get("properties", {}).items()
        if not field.get("markdownDescription")
    ]
    assert silent == []


def test_every_key_stands_in_the_reference():
    text = reference()
    for name, model in file_schema()["$defs"].items():
        if name.endswith(CHANGE) or "properties" not in model:
            continue
        section = text.split(f"\n## {name}\n")[1].split("\n## ")[0]
        for key in model["properties"]:
            assert f"| `{key}` |" in section


@pytest.mark.parametrize("file", stacks.STACKS, ids=lambda file: file.stem)
def test_stacks_pass(validator, file):
    validator.validate(parse(str(file), file.read_text()).data)


def test_every_stack_names_the_schema():
    for file in stacks.STACKS:
        first = file.read_text().splitlines()[0]
        assert first == "# yaml-language-server: $schema=../schemas/stack.schema.json"


@pytest.mark.parametrize(
    "change",
    [
        ("num_nodes: 1", "num_node: 1"),
        ("num_nodes: 1", "num_nodes: one"),
        ("workdir: .", "resources: {acelerators: 'H100:8'}"),
        ("workdir: .", "resources: {infra: asw}"),
        ("  stack:", "  stak:"),
        ("    version: 1\n", ""),
        ("    version: 1", "    version: 2"),
        ("    version: 1", "    version: 1\n    sed: 0"),
        ("qwen3", "qwen4"),
        ("init: random", "init: randm"),
        ("hidden_size: 64", "hiden_size: 64"),
        ("hidden_size: 64", "hidden_size: 0"),
        ("trainer: {processes: 1}", "trainer: {process: 1}"),
        ("trainer: {processes: 1}", "trainer: {processes: 1.5}"),
        ("trainer: {processes: 1}", "trainer: 1"),
        ("type: reverse_text", "type: reverse_txt"),
        ("letters: [3, 6]", "leters: [3, 6]"),
        ("letters: [3, 6]", "letters: [3]"),
        ("name: reverse,", "name: a b,"),
        ("max_tokens: 9", "max_tokens: nine"),
        ("max_tokens: 9", "temperature: 0"),
        ("type: aipo", "type: apio"),
        ("type: aipo, ratio_cap: 2.0", "type: grpo, ratio_cap: 2.0"),
        ("ratio_cap: 2.0", "ratio_cap: 0.5"),
        ("group_size: 8", "group_size: true"),
        ("type: rl, ", ""),
        ("type: rl, steps: 5", "type: rl, steps: 5, noise: 0.5"),
        ("type: rl, steps: 5", "type: rl, steps: 5, sampling: {max_token: 3}"),
        ("type: rl, steps: 5", "type: rl, steps: 5, optimizer: {betas: [0.9]}"),
        ("type: rl, steps: 5", "type: rl, steps: 5, optimizer: {betas: [0.9, 1.0]}"),
        ("type: rl, steps: 5", "type: rl, steps: 5, optimizer: {type: adam}"),
        ("type: rl, steps: 5", "type: rl, steps: 5, optimizer: {schedule: {type: step}}"),
        ("    roles:", "    trainer: {optimizer: {type: sgd, betas: [0.9, 0.9]}}\n    roles:"),
        ("    roles:", "    trainer: {optimizer: {schedule: {type: constant, final_rate: 0.1}}}\n    roles:"),
    ],
    ids=lambda change: change[1].strip()[:40],
)
def test_bad_stacks_fail_in_schema_and_loader_alike(validator, tmp_path, change):
    file = stacks.write(tmp_path, change)
    with pytest.raises(StackError):
        load(file)
    assert not validator.is_valid(parse("x", file.read_text()).data)


def test_variants_without_their_type_take_the_default_in_both(validator, tmp_path):
    file = stacks.write(
        tmp_path,
        ("loss: {type: aipo, ratio_cap: 2.0}", "loss: {ratio_cap: 2.0}"),
        ("    roles", "    weights: {}\n    roles"),
    )
    load(file)
    validator.validate(parse("x", file.read_text()).data)


def test_patterns_have_no_inline_flags():
    assert "(?i" not in SCHEMA.read_text()

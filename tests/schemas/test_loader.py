"""Loading a stack: what is read, and how everything that is wrong is told at once, with its place."""

import pytest

import stacks
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError


def problems(folder, *changes, overrides=()):
    with pytest.raises(StackError) as error:
        load(stacks.write(folder, *changes), overrides)
    file = folder / "small.yaml"
    return [str(problem).replace(str(file), "small.yaml") for problem in error.value.problems]


@pytest.mark.parametrize("file", stacks.STACKS, ids=lambda file: file.stem)
def test_every_stack_loads(file, monkeypatch):
    monkeypatch.chdir(stacks.ROOT)
    loaded = load(file.relative_to(stacks.ROOT))
    assert loaded.name and len(loaded.hash) == 64
    assert loaded.stack.stages


def test_defaults_are_filled_in(tmp_path):
    loaded = load(stacks.write(tmp_path))
    assert loaded.stack.algorithm.max_staleness == 1
    assert loaded.stack.weights.transport == "pull"
    assert loaded.stack.model.config == {"hidden_size": 64, "num_hidden_layers": 2}
    assert loaded.task["num_nodes"] == 1


def test_all_problems_at_once_in_the_order_of_the_file(tmp_path):
    found = problems(
        tmp_path,
        ("num_nodes: 1", "num_node: 1"),
        ("ratio_cap: 2.0", "ratio_cup: 2.0"),
        ("steps: 5", "steps: five"),
    )
    assert found == [
        "small.yaml:2:1: num_node: there is no such key; did you mean num_nodes?",
        "small.yaml:18:26: algorithm.loss.ratio_cup: there is no such key; did you mean ratio_cap?",
        "small.yaml:23:39: stages.1.steps: must be a whole number, is the text 'five'",
    ]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        (
            "type: aipo",
            "type: aipoo",
            "algorithm.loss.type: the text 'aipoo' is not one of aipo, grpo, dapo, dr_grpo, gspo, gmpo, "
            "cispo, decoupled_ppo, dppo, ipo, icepop, topr, sapo, reinforce, python; did you mean aipo?",
        ),
        ("type: aipo", "type: [aipo]", "algorithm.loss.type: a list is not one of aipo, grpo"),
        ("type: rl, ", "", "stages.1.type: the key type is missing; say type: supervised or rl"),
        ("    version: 1\n", "", "version: the key version is missing; say version: 1"),
        ("letters: [3, 6]", "letters: [3]", "environments.0.args.letters: must hold at least 2, holds 1"),
        (
            "letters: [3, 6]",
            "leters: [3, 6]",
            "environments.0.args.leters: there is no such key; did you mean letters?",
        ),
        (
            "hidden_size",
            "hiden_size",
            "model.config.hiden_size: there is no such key; did you mean hidden_size?",
        ),
        ("group_size: 8", "group_size: 0", "algorithm.group_size: must be at least 1, is 0"),
        ("group_size: 8", "group_size: true", "algorithm.group_size: must be a whole number, is true"),
        (
            "group_size: 8",
            'group_size: "8"',
            "algorithm.group_size: must be a whole number, is the text '8'; write it",
        ),
        ("name: reverse,", "name: 5,", 'environments.0.name: must be text, is 5; put it in quotes: "5"'),
        (
            "name: reverse,",
            "name: a b,",
            "environments.0.name: 'a b' is not written as it must be; for example main",
        ),
        ("{processes: 1}\n    env", "3\n    env", "roles.inference: must be a mapping of keys, is 3"),
        ("sampling: {max_tokens: 9}", "sampling: [9]", "sampling: must be a mapping of keys, is a list"),
        ("workdir: .", "workdir: 3", "workdir: must be text or a mapping of keys, is 3"),
        (
            "workdir: .",
            "resources: {acelerators: 'H100:8'}",
            "resources.acelerators: there is no such key; did you mean",
        ),
        ("workdir: .", "resources: {infra: asw}", "resources.infra: 'asw' is not written as it must be"),
        ("workdir: .", "seed: 3", "seed: a key of the stack, not of SkyPilot; put it under _metadata.stack"),
    ],
)
def test_wrong_values_in_plain_words(tmp_path, old, new, expected):
    found = problems(tmp_path, (old, new))
    assert any(f": {expected}" in problem for problem in found), found


def test_a_choice_between_kinds_names_them_all(tmp_path):
    found = problems(tmp_path, *stacks.gpus(4, "{trainer: {gpus: 2}, inference: {gpus: all}}"))
    assert found == [
        "small.yaml:12:51: roles.inference.gpus: must be a whole number or rest, is the text 'all'"
    ]


def test_a_rate_without_a_point_is_a_number(tmp_path):
    loaded = load(stacks.write(tmp_path, ("ratio_cap: 2.0", "ratio_cap: 1e1")))
    assert loaded.stack.algorithm.loss.ratio_cap == 10


def test_anchors_and_merges_keep_their_places(tmp_path):
    base = stacks.GOOD.replace(
        "{name: main, type: rl, steps: 5}", "{<<: *shape, name: main, type: rl, stepz: 5}"
    )
    base = base.replace("_metadata:\n", "_metadata:\n  shape: &shape {steps: 9}\n")
    file = stacks.write(tmp_path, base=base)
    with pytest.raises(StackError) as error:
        load(file)
    assert [(p.place.line, p.path[-1]) for p in error.value.problems] == [(24, "stepz")]
    file.write_text(base.replace(", stepz: 5", ""))
    assert load(file).stack.stages[1].steps == 9


def test_numbers_among_envs_are_text_to_skypilot(tmp_path):
    load(stacks.write(tmp_path, ("STACK: small.yaml", "STACK: small.yaml, PORT: 8080, DEBUG: true")))


def test_a_file_with_a_byte_order_mark_loads(tmp_path):
    file = stacks.write(tmp_path)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    load(file)


def test_where_a_problem_found_later_is(tmp_path):
    from stackrl.schemas.problems import STACK, Problem

    loaded = load(stacks.write(tmp_path), ["algorithm.group_size=4"])
    inside = loaded.locate([Problem((*STACK, "sampling", "max_tokens"), "x")])[0]
    assert (inside.place.line, inside.place.column) == (16, 28)
    default = loaded.locate([Problem((*STACK, "trainer", "parallel", "expert"), "x")])[0]
    assert default.place.line == 8
    changed = loaded.locate([Problem((*STACK, "algorithm", "group_size"), "x")])[0]
    assert str(changed) == "--set algorithm.group_size: x"

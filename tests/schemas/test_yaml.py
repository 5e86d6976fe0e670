"""What is refused before any key is looked at: text that is not YAML, or not plain enough."""

import os

import pytest

import stacks
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError
from stackrl.schemas.source import MAX_BYTES, parse, parse_value


def refusal(folder, text):
    file = folder / "small.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(StackError) as error:
        load(file)
    (problem,) = error.value.problems
    return str(problem).replace(str(file), "small.yaml")


def bomb(levels=9, width=9):
    lines = ["a0: &a0 [lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "small.yaml:1:1: the file is empty"),
        ("# only a comment\n", "small.yaml:1:1: the file is empty"),
        ("hello", "small.yaml:1:1: this is not a stack: the file must be a mapping of keys"),
        ("- a\n- b\n", "small.yaml:1:1: this is not a stack"),
        ("a: [1\nb: 2", "small.yaml:2:2: not YAML: while parsing a flow sequence"),
        ("a:\n\tb: 1\n", "small.yaml:2:1: a tab: YAML indents with spaces only"),
        ("a: b: c\n", "small.yaml:1:5: not YAML: a second `:` in one line"),
        ("a: 1\n---\nb: 2\n", "small.yaml:2:1: a second YAML document begins here"),
        ("a: 1\nb: {c: 1, d: 2, c: 3}\n", "small.yaml:2:17: b.c: the key stands twice, first in line 2"),
        ("a: 1\na: 2\n", "small.yaml:2:1: a: the key stands twice, first in line 1; remove one of them"),
        ("on: 1\n", 'small.yaml:1:1: the key on is not text; put it in quotes: "on"'),
        ("1: 1\n", "small.yaml:1:1: the key 1 is not text"),
        ("? [a]\n: 1\n", "small.yaml:1:3: a list or mapping stands as a key; put text"),
        ("a: !stack x\n", "small.yaml:1:4: the tag !stack means nothing here"),
        ("a: !!python/object:os.system x\n", "small.yaml:1:4: the tag"),
        ("a: *b\n", "small.yaml:1:4: not YAML: found undefined alias"),
        ("a: &a [*a]\n", "small.yaml:1:4: this anchor contains itself"),
        (
            "a: {b: 2026-01-01}\n",
            "small.yaml:1:8: a.b: YAML reads this as a date, which JSON does not know; put it in",
        ),
        (
            "a: 2026-13-01\n",
            "small.yaml:1:4: this is no number and no date: month must be in 1..12; put it in quotes",
        ),
        ("a: .nan\n", "small.yaml:1:4: a: nan is not a number that JSON knows"),
        ("a: !!set {b}\n", "small.yaml:1:4: a: YAML reads this as a set"),
        ("a: !!binary aGk=\n", "small.yaml:1:4: a: YAML reads this as binary data"),
        ("a: \x00\n", "small.yaml:1:4: the character U+0000 may not stand in YAML"),
        (b"a: \xff\n", "small.yaml:1:1: byte 3 is not UTF-8; save the file as UTF-8 text"),
        ("[" * 1500, "small.yaml:1:1: values are nested too deeply"),
        ("b: 1\na: " + "9" * 5000 + "\n", "small.yaml:2:4: this is no number and no date: Exceeds"),
        ("a:\n - " + "[" * 70 + "]" * 70 + "\n", "small.yaml:2:67: values are nested too deeply"),
        (bomb(), "small.yaml:1:1: the file holds"),
        ("# " + "x" * MAX_BYTES, "small.yaml:1:1: a stack holds at most 1048576 bytes"),
    ],
)
def test_refused(tmp_path, text, expected):
    assert refusal(tmp_path, text).startswith(expected)


def test_a_folder_and_a_missing_file(tmp_path):
    for path, words in ((tmp_path, "is a folder"), (tmp_path / "no.yaml", "there is no such file")):
        with pytest.raises(StackError, match=words):
            load(path)


def test_a_named_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "small.yaml")
    with pytest.raises(StackError, match="is a named pipe, which nobody may ever write to; name a file"):
        load(tmp_path / "small.yaml")


def test_a_name_that_no_file_can_have(tmp_path):
    with pytest.raises(StackError, match="there is no such file"):
        load(tmp_path / ("x" * 300))


def test_several_double_keys_at_once():
    with pytest.raises(StackError) as error:
        parse("x", "a: 1\na: 2\nb: {c: 1, c: 2}\n")
    assert [problem.path for problem in error.value.problems] == [("a",), ("b", "c")]


def test_an_anchor_bomb_is_refused_quickly(tmp_path):
    # 9**40 values: counting them one by one would never end
    assert "once its anchors are expanded" in refusal(tmp_path, bomb(levels=40))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("-2E3", -2000.0),
        ("3", 3),
        ("true", True),
        ("{a: [1, x]}", {"a": [1, "x"]}),
        ("", None),
    ],
)
def test_values_of_the_command_line(text, value):
    assert parse_value(text) == value


def test_places_of_a_task_without_a_stack(tmp_path):
    assert "there is no _metadata.stack: this is a SkyPilot task without a stack" in refusal(
        tmp_path, "name: x\nrun: echo hi\nenvs: {STACK: small.yaml}\n"
    )


def test_the_good_stack_is_good(tmp_path):
    load(stacks.write(tmp_path))

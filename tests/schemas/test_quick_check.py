"""What the quick check lets through, jsonschema lets through; and it lets through what people write."""

import copy

import jsonschema
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

import stacks
from stackrl.runtime.environments import schema_of
from stackrl.schemas import skypilot
from stackrl.schemas.quick_check import _WORDS, surely_fits

FILES = sorted((stacks.ROOT / "stacks").glob("*.yaml"))
TASK = skypilot.task_schema()
WHOLE = jsonschema.Draft202012Validator(TASK)

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-2, 4)
    | st.sampled_from([0.0, 1.0, 2.5, float("nan"), "", "a", "ab"])
)
keys = st.sampled_from(["a", "ab", "b", "type", 1])
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=6,
)
kinds = st.sampled_from(["object", "array", "string", "integer", "number", "boolean", "null"])
patterns = st.sampled_from(["^a", "b$", "^$", "."])
names = st.sampled_from(["a", "ab", "b", "type"])


tells = st.builds(
    lambda key, text: {"properties": {key: {"const": text}}}, names, st.sampled_from(["a", "ab"])
)


def _words(inner):
    """Schemas of every word that the check knows, and some that it does not."""
    count = st.integers(0, 2)
    forms = st.lists(inner, min_size=1, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            "type": kinds | st.lists(kinds, min_size=1, max_size=2, unique=True),
            "enum": st.lists(scalars, min_size=1, max_size=3),
            "anyOf": forms,
            "oneOf": forms,
            "allOf": forms,
            "const": scalars,
            "if": inner | tells,
            "then": inner,
            "else": inner,
            "required": st.lists(names, max_size=2, unique=True),
            "properties": st.dictionaries(names, inner, max_size=2),
            "patternProperties": st.dictionaries(patterns, inner, max_size=2),
            "additionalProperties": st.booleans() | inner,
            "items": inner,
            "pattern": patterns,
            **dict.fromkeys(
                ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"], st.integers(-1, 3)
            ),
            **dict.fromkeys(["minLength", "maxLength", "minItems", "maxItems"], count),
            **dict.fromkeys(["minProperties", "maxProperties"], count),
            "not": inner,
            "uniqueItems": st.just(True),
            "description": st.just("says nothing"),
        },
    )


schemas = st.recursive(_words(st.just({})), _words, max_leaves=4)


def fits(value, schema) -> bool:
    try:
        return jsonschema.Draft202012Validator(schema).is_valid(value)
    except TypeError:  # a pattern and a key that is no text
        return False


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(schemas, values)
@example({"type": "integer"}, 1.0)
@example({"oneOf": [{"type": "number", "minimum": 2}, {"type": "integer"}]}, 1.0)
@example({"minimum": 0}, float("nan"))
@example({"patternProperties": {"^a": {"type": "null"}}, "additionalProperties": False}, {1: None})
def test_what_passes_is_right(schema, value):
    if surely_fits(value, schema):
        assert fits(value, schema)


WRONG = {
    "type": [("integer", True), ("number", False), ("object", []), (["string", "null"], 1)],
    "enum": [([1], True), (["a"], "b")],
    "anyOf": [([{"type": "string"}, {"type": "null"}], 1)],
    "oneOf": [([{"type": "integer"}, {"type": "number"}], 1), ([{"type": "string"}], 1)],
    "allOf": [([{"type": "null"}, {"type": "string"}], None)],
    "const": [("a", "b"), (1, True)],
    "required": [(["a"], {"b": 1})],
    "properties": [({"a": {"type": "null"}}, {"a": 1})],
    "patternProperties": [({"^a": {"type": "null"}}, {"ab": 1})],
    "additionalProperties": [(False, {"a": 1}), ({"type": "null"}, {"a": 1})],
    "items": [({"type": "null"}, [None, 1])],
    "pattern": [("^a", "ba")],
    "minimum": [(1, 0)],
    "maximum": [(1, 2)],
    "exclusiveMinimum": [(1, 1)],
    "exclusiveMaximum": [(1, 1)],
    "minLength": [(1, "")],
    "maxLength": [(1, "ab")],
    "minItems": [(1, [])],
    "maxItems": [(1, [1, 2])],
    "minProperties": [(1, {})],
    "maxProperties": [(0, {"a": 1})],
    "not": [({}, 1)],
    "uniqueItems": [(True, [1, 1])],
}


SAID = {"properties": {"type": {"const": "a"}}, "required": ["type"]}


@pytest.mark.parametrize(
    ("branches", "value"),
    [
        ({"then": False}, {"type": "a"}),
        ({"then": {"required": ["b"]}}, {"type": "a"}),
        ({"else": False}, {"type": "b"}),
        ({"else": False, "then": False}, 1),
    ],
)
def test_the_wrong_branch_does_not_pass(branches, value):
    schema = {"if": SAID, **branches}
    assert not fits(value, schema) and not surely_fits(value, schema)
    assert surely_fits({"type": "b"}, {"if": SAID, "then": False}), "a text that differs tells the branch"
    assert not surely_fits({"type": 1}, {"if": SAID, "then": False}), "which no number does"


@pytest.mark.parametrize("word", sorted((_WORDS.keys() | WRONG.keys()) - {"if"}))
def test_what_is_wrong_does_not_pass(word):
    for wanted, value in WRONG[word]:
        assert not fits(value, {word: wanted}) and not surely_fits(value, {word: wanted})


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_stacks_pass_without_jsonschema(file):
    task = yaml.safe_load(file.read_text())
    checked = skypilot.as_checked({key: value for key, value in task.items() if key != "_metadata"})
    assert surely_fits(checked, TASK) and WHOLE.is_valid(checked)
    for environment in task["_metadata"]["stack"].get("environments", []):
        assert surely_fits(environment.get("args", {}), schema_of(environment["type"]))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_changed_tasks_that_pass_are_right(data):
    task = copy.deepcopy(data.draw(st.sampled_from(TASKS)))
    holder = data.draw(st.sampled_from([holder for holder in _holders(task) if holder]))
    key = data.draw(st.sampled_from(list(holder) if isinstance(holder, dict) else range(len(holder))))
    holder[key] = data.draw(values)
    if surely_fits(task, TASK):
        assert WHOLE.is_valid(task)


def _holders(value):
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _holders(inner)


TASKS = [
    {key: part for key, part in yaml.safe_load(file.read_text()).items() if key != "_metadata"}
    for file in FILES
]

"""Whatever stands in a stack, the loader says what is wrong in plain words, and the JSON Schema agrees."""

import copy
import json

import jsonschema
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stacks
from stackrl.schemas.json_schema import file_schema
from stackrl.schemas.loader import load_text
from stackrl.schemas.problems import StackError

RICH = (stacks.ROOT / "stacks" / "glm5.yaml", stacks.ROOT / "stacks" / "reverse-text-cpu.yaml")
TASKS = [yaml.safe_load(file.read_text()) for file in RICH]
VALIDATOR = jsonschema.Draft202012Validator(file_schema())

words = st.sampled_from(
    ["rest", "trainer", "cpu", "grpo", "aipo", "rl", "swe", "1e5", "", "a b", "8GiB", "x" * 70]
)
numbers = st.integers(-3, 70000) | st.sampled_from([0.5, -1.5, 1e-6, 1e300])
leaves = st.none() | st.booleans() | numbers | words
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "name", "steps", "gpus", "nodes", "odd"]), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def places(value, path=()):
    """Every path in a task."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


@st.composite
def changed_tasks(draw):
    task = copy.deepcopy(draw(st.sampled_from(TASKS)))
    for _ in range(draw(st.integers(1, 2))):
        path = draw(st.sampled_from([path for path in places(task) if path]))
        holder = task
        for key in path[:-1]:
            holder = holder[key]
        if draw(st.booleans()):
            holder[path[-1]] = draw(values)
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from(["odd", "type", "nodes", "steps", "share"]))] = draw(values)
        else:
            del holder[path[-1]]
    return task


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(changed_tasks())
def test_loader_and_schema_agree(task):
    envs = task.get("envs")
    named = envs.get("STACK") if isinstance(envs, dict) else None
    try:
        load_text(
            json.dumps(task), stacks.ROOT / (named if isinstance(named, str) else "x"), "x"
        )  # JSON is YAML
        problems = []
    except StackError as error:
        problems = error.problems
    for problem in problems:
        assert not problem.what.startswith("does not fit:"), str(problem)
        assert str(problem).startswith("x:1:"), str(problem)
    assert VALIDATOR.is_valid(task) or problems

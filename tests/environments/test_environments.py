"""The environments: their tasks, rewards, demonstrations and the schemas of their arguments."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from random import Random

import jsonschema
import pytest

from stackrl.runtime.environments import RUNNABLE, EnvironmentRefused, make, schema_of
from stackrl.runtime.environments.base import Answer, Call, TurnEnvironment
from stackrl.runtime.orchestrator.rollout import worth
from stackrl.schemas.environments import Environment, EnvironmentType

DRAWN = [
    type
    for type, kind in RUNNABLE.items()
    if issubclass(kind, TurnEnvironment) and not kind.schema.get("required")
]
"""Types that make their tasks themselves, so that they need no arguments."""


def environment(type, **args):
    return make(Environment(name="it", type=type, args=args))


def answered(text):
    """A demonstrated answer as the environment gets it, with the calls in it."""
    found = re.findall(r"<tool_call>\n(.*)\n</tool_call>", text)
    return Answer(text, tuple(Call(**json.loads(call)) for call in found))


async def replied(it, task, *answers):
    """What the environment makes of answers that the model closed."""
    return await it.reply(task, [Answer(answer) for answer in answers])


def worth_of(it, outcome):
    """As a rollout of ``it`` would be worth."""
    return worth(outcome, it)


def test_every_type_of_the_language_has_a_valid_schema():
    types = EnvironmentType.__args__
    assert set(types) == set(RUNNABLE)
    for type in types:
        schema = schema_of(type)
        jsonschema.Draft202012Validator.check_schema(schema)
        if type != "verifiers":  # whose arguments are those of a package
            with pytest.raises(jsonschema.ValidationError):
                jsonschema.validate({"no_such_argument": 1}, schema)


def test_schemas_accept_what_the_stacks_say():
    jsonschema.validate({"letters": [4, 10]}, schema_of("reverse_text"))
    jsonschema.validate({"letters": [3, 6], "tries": 2, "penalty": 0.2}, schema_of("reverse_text_tries"))
    jsonschema.validate({"dataset": "swe-rebench", "sandbox": {"type": "docker"}}, schema_of("swe"))
    for bad in ({"letters": [4]}, {"letters": ["a", "b"]}, {"letters": 4}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema_of("reverse_text"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"dataset": "r2e-gym", "sandbox": {"type": "none"}}, schema_of("swe"))


def test_what_cannot_be_made_is_refused_by_name():
    with pytest.raises(EnvironmentRefused, match=r"'it': letters: \[6, 3\] names the longer word first"):
        environment("reverse_text", letters=[6, 3])


@pytest.mark.parametrize("type", DRAWN)
async def test_a_clean_demonstration_is_worth_the_most_and_ends_the_rollout(type):
    it = environment(type)
    for seed in range(50):
        task = it.task(Random(seed))
        assert task == it.task(Random(seed)), "the same state of the generator gives the same task"
        turns = it.demonstration(task, Random(seed), 0.0)
        answers = [answered(turn.answer) for turn in turns]
        for count in range(1, len(answers)):
            outcome = await it.reply(task, answers[:count])
            assert not outcome.done and tuple(outcome.messages) == tuple(turns[count - 1].messages)
        last = await it.reply(task, answers)
        assert set(last.rewards) == set(it.reward_names({}))
        assert last.done and not last.messages and not turns[-1].messages
        assert last.metrics["solved"] == 1.0 and turns[-1].trained
        assert type in ("wordle", "guess_number", "reverse_text_tries") or worth_of(it, last) == 1.0


async def test_rewards_of_reverse_text():
    it = environment("reverse_text", letters=[3, 3], alphabet="ab")
    task = it.task(Random(0))
    assert len(task.data) == 3 and set(task.data) <= {"a", "b"}
    assert task.messages[-1]["content"] == f"reverse: {task.data[::-1]}"
    assert worth_of(it, await replied(it, task, task.data)) == 1.0
    assert worth_of(it, await replied(it, task, "")) == 0.0
    near = await replied(it, task, task.data[:2])
    assert worth_of(it, near) == pytest.approx(0.8) and near.metrics["solved"] == 0.0


def test_noise_replaces_letters_at_its_rate():
    it = environment("reverse_text", letters=[10, 10])
    task = it.task(Random(0))
    answers = [it.demonstration(task, Random(seed), 0.75)[0].answer for seed in range(500)]
    kept = sum(a == b for answer in answers for a, b in zip(answer, task.data, strict=True)) / 5000
    assert kept == pytest.approx(0.25 + 0.75 / 26, abs=0.03)


async def test_tries_lower_the_reward_and_end():
    it = environment("reverse_text_tries", letters=[4, 4], tries=3, penalty=0.1)
    task = it.task(Random(1))
    first = await replied(it, task, "????")
    assert (first.done, first.messages[0]["content"]) == (False, "no, try again")
    assert worth_of(it, await replied(it, task, "????", task.data)) == pytest.approx(0.9)
    third = await replied(it, task, "????", "????", task.data[:2])
    assert third.done and worth_of(it, third) == pytest.approx(0.8 * 2 * 2 / 6)


def test_early_mistakes_of_clean_demonstrations_are_not_learnt():
    it = environment("reverse_text_tries", letters=[4, 6])
    demonstrations = [it.demonstration(it.task(Random(i)), Random(i), 0.0) for i in range(400)]
    with_mistake = sum(len(turns) > 1 for turns in demonstrations) / 400
    assert with_mistake == pytest.approx(0.4, abs=0.08)
    for turns in demonstrations:
        assert [turn.trained for turn in turns] == [False] * (len(turns) - 1) + [True]
    noisy = [it.demonstration(it.task(Random(i)), Random(i), 0.75) for i in range(50)]
    assert all(turn.trained for turns in noisy for turn in turns)
    assert max(map(len, noisy)) == 3


async def test_swapped_words_may_come_with_spaces_and_capitals():
    it = environment("swap_words")
    task = it.task(Random(2))
    first, second = task.messages[-1]["content"].split()
    assert task.data == f"{second} {first}" and first != second
    assert [m["role"] for m in task.messages] == ["user", "assistant"] * 2 + ["user"]
    assert worth_of(it, await replied(it, task, f" {second.upper()} {first}\n")) == 1.0


def test_the_registry_imports_no_torch():
    found = "print({'torch', 'vllm', 'transformers'} & set(sys.modules))"
    program = f"import sys, stackrl.runtime.environments; {found}"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "set()\n"

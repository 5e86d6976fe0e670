"""Arithmetic, word problems, sorting, guessing and Wordle: what is right in them, and what is told."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as some

from stackrl.runtime.environments import EnvironmentRefused, make
from stackrl.runtime.environments.answers import last_number
from stackrl.runtime.environments.base import Answer
from stackrl.runtime.environments.wordle import guess_in, marks
from stackrl.runtime.environments.wordle_words import WORDS
from stackrl.schemas.environments import Environment


def environment(type, **args):
    return make(Environment(name="it", type=type, args=args))


async def rewards(it, task, *texts):
    return (await it.reply(task, [Answer(text) for text in texts])).rewards


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("19", 19),
        ("12 + 7 = 19", 19),
        ("it is -3.", -3),
        ("1,234", 1234),
        ("2.50 or so", 2.5),
        ("nineteen", None),
        ("", None),
        ("5-3", -3),
        ("7" * 30, int("7" * 30)),
        ("1" + "0" * 30, None),
        ("7" * 5000, None),
        ("-" + "1," * 400 + "1.5", None),
        (f"12 or {'9' * 400}.5", None),
        ("0." + "3" * 500, 1 / 3),
    ],
)
def test_the_last_number_of_an_answer_counts(text, number):
    found = last_number(text)
    assert type(found) is type(number) and found == pytest.approx(number)


@pytest.mark.parametrize("type", ["arithmetic", "word_problems", "guess_number", "tool_use"])
@given(text=some.text("0123456789.,-", max_size=60) | some.integers(31, 6000).map(lambda count: "8" * count))
def test_no_number_that_a_model_may_write_fails_a_rollout(type, text):
    it = environment(type)
    outcome = asyncio.run(it.reply(it.task(Random(0)), [Answer(text)]))
    assert all(0 <= reward <= 1 for reward in outcome.rewards.values())


@pytest.mark.parametrize(
    ("type", "reward"),
    [
        ("reverse_text", "similarity"),
        ("reverse_text_tries", "similarity"),
        ("swap_words", "similarity"),
        ("sort_words", "right"),
        ("arithmetic", "right"),
        ("word_problems", "right"),
        ("guess_number", "found"),
        ("wordle", "found"),
        ("tool_use", "right"),
    ],
)
async def test_only_what_is_said_behind_the_thoughts_counts(type, reward):
    """Thoughts that name the answer are none, also where they were cut off."""
    it = environment(type)
    task = it.task(Random(0))
    right = str(task.data["answer"] if isinstance(task.data, dict) else task.data)

    async def rewarded(text, **more):
        return (await it.reply(task, [Answer(text, **more)])).rewards[reward]

    assert await rewarded(f"<think>\nnot 7 xylophones\n</think>\n\n{right}") == 1.0
    assert await rewarded(f"not 7 xylophones\n</think>\n\n{right}", thinking=True) == 1.0
    assert await rewarded(right) == 1.0
    for text in (f"<think>{right}</think>", f"<think>{right}</think>I do not know", f"\n<think>\n{right}"):
        assert await rewarded(text) < 0.5
    assert await rewarded(right, thinking=True, closed=False) == 0.0


@given(some.integers(0, 2**32), some.integers(2, 6), some.sampled_from(["+", "+-", "*", "+-*"]))
def test_sums_have_the_value_that_python_gives_them(seed, terms, operations):
    it = environment("arithmetic", largest=99, terms=[terms, terms], operations=operations)
    task = it.task(Random(seed))
    expression = task.messages[0]["content"].removesuffix("=")
    assert task.data == eval(expression) and sum(map(expression.count, "+-*")) == terms - 1


async def test_a_number_that_is_nearly_right_gets_a_part():
    it = environment("arithmetic")
    task = it.task(Random(0))
    right, near, far = str(task.data), f"{task.data}0", "x"
    assert await rewards(it, task, right) == {"right": 1.0, "digits": 1.0}
    some_of_it = await rewards(it, task, near)
    assert some_of_it["right"] == 0.0 and 0.5 < some_of_it["digits"] < 1.0
    assert await rewards(it, task, far) == {"right": 0.0, "digits": 0.0}


async def test_stories_can_be_followed_by_their_sums():
    it = environment("word_problems", steps=[4, 4], largest=12)
    for seed in range(300):
        task = it.task(Random(seed))
        held = last_number(task.messages[0]["content"].partition(".")[0])
        for written in task.data["sums"]:
            left, _, value = written.partition("=")
            assert int(left[: len(str(held))]) == held and eval(left) == int(value)
            held = int(value)
        assert held == task.data["answer"] >= 0
        assert (await rewards(it, task, f"so {held}"))["right"] == 1.0
        assert (await rewards(it, task, f"so {held + 1}"))["right"] == 0.0


async def test_words_are_sorted_whatever_stands_between_them():
    it = environment("sort_words", words=[4, 4])
    task = it.task(Random(3))
    shown, words = task.messages[0]["content"].removeprefix("sort: ").split(), task.data.split()
    assert sorted(shown) == words and shown != words
    assert await rewards(it, task, ", ".join(words).upper()) == {"right": 1.0, "order": 1.0}
    swapped = [words[1], words[0], *words[2:]]
    assert await rewards(it, task, " ".join(swapped)) == {"right": 0.0, "order": 0.75}
    assert (await rewards(it, task, " ".join(words * 2)))["right"] == 0.0
    thinking = f"<think>{' '.join(shown)}, hm</think>{' '.join(words)}"
    assert (await rewards(it, task, thinking))["right"] == 1.0


async def test_guesses_are_told_where_the_number_is():
    it = environment("guess_number", largest=100, guesses=3)
    task = it.task(Random(1))
    below = await it.reply(task, [Answer(str(task.data - 1))])
    assert (below.done, below.messages[0]["content"]) == (False, "higher")
    above = await it.reply(task, [Answer("?"), Answer(str(task.data + 1))])
    assert (above.done, above.messages[0]["content"]) == (False, "lower")
    silent = await it.reply(task, [Answer("?")])
    assert silent.messages[0]["content"] == "Say a number from 1 to 100." and silent.rewards["near"] == 0.0
    found = await it.reply(task, [Answer("1"), Answer(f"is it {task.data}")])
    assert found.done and found.rewards == {"found": 1.0, "near": 1.0} and found.metrics["guesses"] == 2
    lost = await it.reply(task, [Answer(str(task.data + 1))] * 3)
    assert lost.done and not lost.messages and lost.rewards == {"found": 0.0, "near": 0.99}


def test_the_words_are_words_of_five_letters_and_each_is_there_once():
    assert all(len(word) == 5 and word.isalpha() and word.islower() for word in WORDS)
    assert len(set(WORDS)) == len(WORDS) > 500


@pytest.mark.parametrize(
    ("guess", "word", "told"),
    [
        ("crane", "crane", "GGGGG"),
        ("nacre", "crane", "YYYYG"),
        ("eerie", "crane", "--Y-G"),  # the e that stands right takes the only one
        ("allol", "llama", "YGY--"),  # two l, and two that are told of
        ("zzzzz", "crane", "-----"),
    ],
)
def test_marks(guess, word, told):
    assert marks(guess, word) == told


@given(some.text("abc", min_size=5, max_size=5), some.text("abc", min_size=5, max_size=5))
def test_a_letter_is_marked_as_often_as_the_word_has_it_at_most(guess, word):
    told = marks(guess, word)
    assert [mark == "G" for mark in told] == [a == b for a, b in zip(guess, word, strict=True)]
    marked = Counter(letter for letter, mark in zip(guess, told, strict=True) if mark != "-")
    assert marked == Counter(guess) & Counter(word)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ("[crane]", "crane"),
        ("not [slate], so [Crane]!", "crane"),
        ("  Crane\n", "crane"),
        ("I say crane", None),
        ("[cranes]", None),
        ("[cr4ne]", None),
        ("", None),
    ],
)
def test_the_last_guess_in_brackets_counts(text, guess):
    assert guess_in(text) == guess


async def test_a_game_of_wordle():
    it = environment("wordle", guesses=3)
    task = it.task(Random(0))
    other = next(word for word in WORDS if word != task.data)
    first = await it.reply(task, [Answer(f"[{other}]")])
    assert not first.done
    assert [m["content"] for m in first.messages] == [f"{other} {marks(other, task.data)}"]
    unreadable = await it.reply(task, [Answer("I give up")])
    assert not unreadable.done and "five letters in brackets" in unreadable.messages[0]["content"]
    assert unreadable.metrics["unreadable"] == 1.0 and unreadable.rewards["letters"] == 0.0
    lost = await it.reply(task, [Answer("[zzzzz]"), Answer(f"[{task.data[:4]}z]"), Answer("[zzzzz]")])
    assert lost.done and not lost.messages and lost.rewards["found"] == 0.0
    assert lost.rewards["letters"] >= 0.8, "the best guess counts"
    won = await it.reply(task, [Answer("[zzzzz]"), Answer(f"[{task.data}]")])
    assert won.done and won.rewards == {"found": 1.0, "letters": 1.0}


async def test_noise_makes_worse_players():
    for type in ("arithmetic", "sort_words", "word_problems", "wordle", "guess_number"):
        it = environment(type)
        solved = 0.0
        for seed in range(40):
            task = it.task(Random(seed))
            turns = it.demonstration(task, Random(seed), 0.9)
            outcome = await it.reply(task, [Answer(turn.answer) for turn in turns])
            assert outcome.done, "the demonstration ends where the game does"
            solved += outcome.metrics["solved"]
        assert solved < 20, type


@pytest.mark.parametrize(
    ("type", "args", "why"),
    [
        ("arithmetic", {"terms": [3, 2]}, r"terms: \[3, 2\] names the larger count first"),
        ("word_problems", {"steps": [3, 2]}, r"steps: \[3, 2\] names the larger count first"),
        ("sort_words", {"words": [3, 2]}, r"words: \[3, 2\] names the larger count first"),
        ("sort_words", {"words": [50, 50], "letters": 1}, r"words: 50 are more than the 2\d of letters: 1"),
    ],
)
def test_arguments_that_do_not_fit_each_other_are_refused(type, args, why):
    with pytest.raises(EnvironmentRefused, match=f"'it': {why}"):
        environment(type, **args)

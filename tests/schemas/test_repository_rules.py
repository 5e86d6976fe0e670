"""Rules over environments that hold sandboxes: each is told with a mend."""

from __future__ import annotations

from pathlib import Path

import pytest

import stackrl
from stackrl.schemas.loader import load
from stackrl.schemas.problems import StackError

STACK = Path(stackrl.__file__).parent / "stacks" / "swe-mini-cpu.yaml"
TIMEOUT = "temperature: 1.0, max_tokens: 600, timeout: 300.0"


def written(folder, old, new):
    """The stack of small repositories with ``new`` in the place of ``old``."""
    text = STACK.read_text()
    assert text.count(old) == 1
    file = folder / "stacks" / STACK.name
    file.parent.mkdir()
    file.write_text(text.replace(old, new))
    return file


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "test_timeout: 60.0",
            "test_timeout: 200.0",
            "environments.0.args.test_timeout: tests of 200 s leave no time to work in sampling.timeout, "
            "300 s; raise sampling.timeout to 320 or more, or lower this",
        ),
        (
            "          test_timeout: 60.0\n",
            "",
            "environments.0.args: tests of 300 s leave no time to work in sampling.timeout, 300 s",
        ),
        (
            "        type: swe\n",
            "        type: swe\n        sampling: {timeout: 100.0}\n",
            "environments.0.args.test_timeout: tests of 60 s leave no time to work in sampling.timeout, 100",
        ),
    ],
)
def test_tests_leave_time_to_work(old, new, said, tmp_path):
    with pytest.raises(StackError) as error:
        load(written(tmp_path, old, new))
    assert [said in str(problem) for problem in error.value.problems] == [True]


def test_rollouts_are_bounded_where_they_are_led(tmp_path):
    load(written(tmp_path, "        type: swe\n", "        type: swe\n        at_once: 4\n"))
    text = "  - {name: words, type: sort_words, args: {}, at_once: 4}\n      - name: swe\n        type: swe\n"
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(StackError) as error:
        load(written(other, "  - name: swe\n        type: swe\n", text))
    assert any(
        "environments.0.at_once: sort_words does not lead its rollouts" in str(problem)
        for problem in error.value.problems
    )

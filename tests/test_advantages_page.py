"""What docs/algorithms.md shows of advantages and references works as it stands there."""

from __future__ import annotations

import re

import numpy as np
import pytest
import yaml
from small_runs import STACK

import stacks
from stackrl.schemas.rules import STACK_RULES
from stackrl.schemas.stack import Stack

PAGE = (stacks.ROOT / "docs" / "algorithms.md").read_text().partition("\n## Advantages\n")[2]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SHOWN = [text for language, text in BLOCKS if language == "yaml"]


def test_the_page_shows_something():
    assert len(SHOWN) >= 5


@pytest.mark.parametrize("shown", SHOWN, ids=range(len(SHOWN)))
def test_stacks_are_right(shown):
    part = yaml.safe_load(shown)
    part = part["_metadata"]["stack"] if "_metadata" in part else part
    algorithm = STACK["algorithm"] | part.get("algorithm", {})
    if set(part.get("algorithm", {})) == {"reference"} and "environments" not in part:
        algorithm["loss"] = {"kl": {}}
    stack = Stack.model_validate(STACK | part | {"algorithm": algorithm})
    assert [str(problem) for rule in STACK_RULES for problem in rule(stack)] == []


def test_the_advantage_of_ones_own():
    [code] = [text for language, text in BLOCKS if language == "python"]
    names: dict = {}
    exec(code, names)
    assert names["ranked"](np.array([0.1, 0.9, 0.5]), [], scale=0.5).tolist() == [-0.5, 0.5, 0.0]
    assert names["ranked"](np.array([0.0, 1.0, 0.0]), []).tolist() == [-0.5, 1.0, -0.5]
    assert names["ranked"](np.zeros(4), []).tolist() == [0.0] * 4

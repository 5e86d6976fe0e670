"""Rules over environments that grade with tests, in sandboxes. schemas/rules.py registers them."""

from __future__ import annotations

from collections.abc import Iterator

from stackrl.schemas.problems import Problem
from stackrl.schemas.rules_of_workers import environments_of, may_lead
from stackrl.schemas.stack import Stack, settings_of, settings_of_environment

Problems = Iterator[Problem]
TEST_TIMEOUT = 300.0
"""Seconds of the tests of a task where `args` do not say."""
LEAST_SECONDS = 120.0
"""Of a rollout beside its tests: a minute to prepare and to grade, and one for the model."""


def tests_leave_time_to_work(stack: Stack) -> Problems:
    """The model works for what is left of a rollout's time when that of its tests is set aside."""
    for path, environment in environments_of(stack):
        tests = environment.args.get("test_timeout", TEST_TIMEOUT)
        if environment.type != "swe" or not isinstance(tests, int | float):
            continue
        of_a_stage = path[-4] == "stages"
        stages = [stack.stages[path[-3]]] if of_a_stage else stack.stages
        settings = (settings_of_environment(settings_of(stack, stage), environment) for stage in stages)
        seconds = min((one.sampling.timeout for one in settings), default=None)
        if seconds is not None and seconds < tests + LEAST_SECONDS:
            what = f"tests of {tests:g} s leave no time to work in sampling.timeout, {seconds:g} s"
            mend = f"raise sampling.timeout to {tests + LEAST_SECONDS:g} or more, or lower this"
            place = ("args", "test_timeout") if "test_timeout" in environment.args else ("args",)
            yield Problem((*path, *place), what, mend)


def rollouts_are_bounded_where_they_are_led(stack: Stack) -> Problems:
    """Others hold nothing between two answers."""
    for path, environment in environments_of(stack):
        if environment.at_once is not None and not may_lead(environment.type):
            what = f"{environment.type} does not lead its rollouts, which take no room therefore"
            yield Problem((*path, "at_once"), what, "remove it", at_key=True)

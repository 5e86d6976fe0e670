"""Errors of the orchestrator that a person can act on."""

from __future__ import annotations


class OrchestratorError(Exception):
    """The run cannot go on. The text says what is wrong, where, and what to look at next."""


class BadInput(OrchestratorError):
    """What the run was given cannot work; trying again does not mend it."""


class GuardStop(OrchestratorError):
    """A guard found that the run learns the wrong thing; trying again does not mend it."""


def first_cause(error: BaseException) -> BaseException:
    """What began an error that task groups have wrapped."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

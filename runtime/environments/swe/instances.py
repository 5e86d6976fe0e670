"""Tasks in SWE-bench's format: a repository at a commit, a problem, and tests for the solution."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_CHANGED = re.compile(r"^(?:---|\+\+\+) [ab]/(.*?)\t?$", re.MULTILINE)
_IMAGES = ("image", "docker_image", "image_name")
"""Columns of data sets that name a task's own image."""


class InstanceError(ValueError):
    """A task that cannot be set, whoever is to solve it. The text names it."""


class UnknownTests(InstanceError):
    """A task whose tests nothing here runs."""


@dataclass(frozen=True)
class Instance:
    """One task. Its repository is ``files``, or ``base_commit`` of ``repo``, or stands in ``image``."""

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    patch: str
    """The change that solves it, as a diff; grading looks at the names of its files alone."""
    test_patch: str
    fail_to_pass: tuple[str, ...]
    """Tests that the solution mends."""
    pass_to_pass: tuple[str, ...]
    """Tests that must go on passing."""
    image: str = ""
    files: tuple[tuple[str, str], ...] = ()
    """Path and text of each file, for repositories that travel with their task."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Instance:
        """Of a row of a data set; lists may be JSON in a string. Raises InstanceError."""
        name = str(row.get("instance_id") or "a task without instance_id")
        try:
            instance = cls(
                instance_id=str(row["instance_id"]),
                repo=str(row["repo"]),
                base_commit=str(row["base_commit"]),
                problem_statement=str(row["problem_statement"]),
                patch=row.get("patch") or "",
                test_patch=row.get("test_patch") or "",
                fail_to_pass=_names(row["FAIL_TO_PASS"]),
                pass_to_pass=_names(row.get("PASS_TO_PASS") or ()),
                image=next((str(row[key]) for key in _IMAGES if row.get(key)), ""),
                files=tuple(sorted((row.get("files") or {}).items())),
            )
        except KeyError as error:
            raise InstanceError(f"{name} has no {error.args[0]}; rows follow SWE-bench's format") from None
        except (TypeError, ValueError) as error:
            raise InstanceError(f"{name}: {error}") from error
        if not instance.fail_to_pass:
            raise InstanceError(f"{name}: FAIL_TO_PASS is empty, so that doing nothing would solve it")
        instance.framework  # noqa: B018 (names of tests that nothing runs are refused here)
        return instance

    def as_row(self) -> dict[str, Any]:
        """What ``of`` reads; plain JSON."""
        return {
            "instance_id": self.instance_id,
            "repo": self.repo,
            "base_commit": self.base_commit,
            "problem_statement": self.problem_statement,
            "patch": self.patch,
            "test_patch": self.test_patch,
            "FAIL_TO_PASS": list(self.fail_to_pass),
            "PASS_TO_PASS": list(self.pass_to_pass),
            "image": self.image,
            "files": dict(self.files),
        }

    @property
    def tests(self) -> tuple[str, ...]:
        return (*self.fail_to_pass, *self.pass_to_pass)

    @property
    def framework(self) -> str:
        """``pytest`` (``path.py::test``) or ``unittest`` (``module.Class.test``). Raises UnknownTests."""
        if all("::" in test or test.endswith(".py") for test in self.tests):
            return "pytest"
        for test in self.tests:
            if not re.fullmatch(r"\w+(\.\w+){2,}", test):
                raise UnknownTests(
                    f"{self.instance_id}: {test!r} names a test neither as pytest does (path.py::test) nor "
                    "as unittest does (module.Class.test)"
                )
        return "unittest"

    @property
    def test_files(self) -> frozenset[str]:
        """Paths of the files that hold the tests, or would."""
        if self.framework == "pytest":
            own = {test.partition("::")[0] for test in self.tests}
        else:
            own = {"/".join(test.split(".")[:-2]) + ".py" for test in self.tests}
        return frozenset(own | changed_files(self.test_patch))

    @property
    def digest(self) -> str:
        """Changes with anything in it."""
        return hashlib.sha256(json.dumps(self.as_row(), sort_keys=True).encode()).hexdigest()


def changed_files(patch: str) -> set[str]:
    """Paths that a diff of a data set changes."""
    return set(_CHANGED.findall(patch))


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    names = json.loads(value) if isinstance(value, str) else value
    if not all(isinstance(name, str) for name in names):
        raise ValueError("names of tests are texts")
    return tuple(names)

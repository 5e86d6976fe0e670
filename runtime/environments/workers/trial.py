"""The adapter of a worker (see program.py) that makes an environment, tries what it needs, and ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

ABSENT = "absent"
"""In place of a key of the stack: what is missing may be there where the run will be."""


class Refusal(Exception):
    """Why the environment cannot be had."""

    def __init__(self, key: str, what: str) -> None:
        super().__init__(what)
        self.refusal = {"refused": what, "mend": "", "key": key}


def load(settings: dict[str, Any]) -> Trial:
    """``settings``: the ``environment`` of the stack, the ``path`` to find modules by, and whether to do all
    that a run does (``whole``): fetch data sets, and try sandboxes and judges."""
    sys.path[:] = settings["path"]
    if not settings["whole"]:
        os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports what reads it
    from stackrl.runtime.environments import EnvironmentRefused, make_here
    from stackrl.schemas.environments import Environment

    described = Environment.model_validate(settings["environment"])
    try:
        return Trial(make_here(described), settings["whole"])
    except EnvironmentRefused as error:
        if not settings["whole"] and _is_still_to_be_fetched(error, described.type, described.args):
            return Trial(None, False)
        what = str(error).removeprefix(f"environment {described.name!r}: ")
        raise Refusal(ABSENT if _may_be_elsewhere(error, described.args) else "args", what) from None


class Trial:
    """An environment that was made, or one whose data is not here yet."""

    def __init__(self, environment: Any, whole: bool) -> None:
        self._environment, self._whole = environment, whole
        self.about: dict[str, Any] = {}

    async def start(self) -> None:
        if self._whole:
            await self._environment.start()

    async def rollout(self, number: int, policy: Any) -> dict[str, Any]:
        raise NotImplementedError("this worker runs nothing")


def _is_still_to_be_fetched(error: Exception, kind: str, args: dict[str, Any]) -> bool:
    """Whether only rows are missing that a run fetches from the Hub."""
    from stackrl.runtime.data.files import DataError
    from stackrl.runtime.environments.users_own import is_fetched

    return isinstance(error.__cause__, DataError) and "dataset" in args and is_fetched(kind, args["dataset"])


def _may_be_elsewhere(error: Exception, args: dict[str, Any]) -> bool:
    """Whether a machine that is set up in another way may have what is missing. What has a relative path
    travels with the work directory."""
    from stackrl.runtime.data.files import DataError, find

    data, cause = args.get("dataset"), error.__cause__
    if isinstance(cause, DataError) and isinstance(data, str) and Path(data).expanduser().is_absolute():
        try:
            find(data)
        except DataError:
            return True
    while cause is not None:
        if isinstance(cause, ImportError):
            return True
        cause = cause.__cause__
    return "no installed package" in str(error) or "is not installed" in str(error)

"""Whether a change solves a task: its tests, run in a sandbox that nobody worked in before."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from stackrl.runtime.environments.sandboxes.base import Machine, Result, Sandbox, SandboxError
from stackrl.runtime.environments.swe.instances import Instance, InstanceError, changed_files
from stackrl.runtime.environments.swe.protected import protected
from stackrl.runtime.environments.swe.runner import READY
from stackrl.runtime.environments.swe.workspace import Workspace


@dataclass(frozen=True)
class Place:
    """Where and how tasks are graded, and worked on."""

    machine: Machine
    repositories: Path | None = None
    """Folder of clones, for tasks whose repository is named by its commit."""
    image: str = ""
    """Name of a task's image; ``{id}`` and ``{docker_id}`` are filled in."""
    folder: str = "/testbed"
    """Where a repository stands in its image."""
    python: str = "python3"
    """What runs the tests, in the sandbox."""
    test_timeout: float = 300.0
    """Seconds for all tests of a task."""

    def image_of(self, instance: Instance) -> str:
        docker_id = instance.instance_id.lower().replace("__", "_1776_")
        return instance.image or self.image.format(id=instance.instance_id, docker_id=docker_id)


@dataclass(frozen=True)
class Grade:
    """What the tests say."""

    mended: float
    """Share of FAIL_TO_PASS that passes."""
    kept: float
    """Share of PASS_TO_PASS that passes."""
    problem: str = ""
    """Why no test counts, where none does."""

    @property
    def resolved(self) -> bool:
        return self.mended == 1.0 and self.kept == 1.0


async def grade(instance: Instance, patch: str, place: Place) -> Grade:
    """Apply ``patch`` and run the task's tests.

    Raises SandboxError where the machine, and InstanceError where the task is at fault; a patch that does not
    apply, hangs or breaks everything gets its grade.
    """
    if not patch.strip():
        return _none("nothing was changed")
    async with place.machine.sandbox(place.image_of(instance)) as sandbox:
        workspace = Workspace(sandbox, instance, place.folder, place.repositories)
        await workspace.prepare()
        found_there, _ = await workspace.files()
        if problem := await workspace.apply(patch):
            return _none(f"the change does not apply: {problem}")
        solution = changed_files(instance.patch)
        changed = await _undo_tests(workspace, instance, found_there)
        if problem := await _set_tests(workspace, instance):
            return _none(f"the change stands in the way of the tests: {problem}")
        secret = secrets.token_hex(32)
        order = {
            "secret": secret,
            "framework": instance.framework,
            "tests": list(instance.tests),
            "changed": sorted(changed - solution),
        }
        result = await _run(sandbox, workspace, place, order)
    if not result.output.startswith(READY) and not result.timed_out:
        await _check_runs(instance, place, result)
    return _graded(instance, result, secret)


async def _run(sandbox: Sandbox, workspace: Workspace, place: Place, order: dict) -> Result:
    """What the program says that runs the tests."""
    return await sandbox.run(
        [place.python, "-I", "-c", runner()],
        stdin=json.dumps(order).encode(),
        seconds=place.test_timeout,
        folder=workspace.folder,
    )


async def _undo_tests(workspace: Workspace, instance: Instance, found_there: set[str]) -> set[str]:
    """Undo what the change did to tests; the files that it still changes.

    ``found_there`` are the files before it, with what the repository does not track.
    """
    now, first = await workspace.files()
    undone = protected(now | first, first, instance.test_files, changed_files(instance.patch))
    await workspace.restore(restored=undone & first, removed=(undone & now) - first - found_there)
    return (await workspace.changed() | (now - found_there)) - undone


async def _check_runs(instance: Instance, place: Place, result: Result) -> None:
    """Whether tests could be run at all, where they were not with a change.

    Raises SandboxError where they cannot without it either.
    """
    async with place.machine.sandbox(place.image_of(instance)) as sandbox:
        workspace = Workspace(sandbox, instance, place.folder, place.repositories)
        await workspace.prepare()
        order = {"secret": "", "framework": instance.framework, "tests": [], "changed": []}
        alone = await _run(sandbox, workspace, place, order)
    if not alone.output.startswith(READY):
        said = (result.errors or alone.errors).decode(errors="replace").strip()[-500:]
        raise SandboxError(
            f"{instance.instance_id}: {place.python} does not run {instance.framework} in the sandbox: {said}"
        )


async def _set_tests(workspace: Workspace, instance: Instance) -> str:
    """Apply the tests of the task; why the change does not let them.

    Raises InstanceError where they never could.
    """
    if not instance.test_patch:
        return ""
    problem = await workspace.apply(instance.test_patch)
    if problem and not await workspace.fitted(instance.test_patch):
        raise InstanceError(
            f"{instance.instance_id}: its test_patch does not apply to its repository: {problem}"
        )
    return problem


def _graded(instance: Instance, result: Result, secret: str) -> Grade:
    if result.timed_out:
        return _none("the tests took too long")
    report = _sealed(result.output, secret)
    if not report:
        why = "the memory was used up" if result.out_of_memory else "the tests did not end as they should"
        return _none(f"{why}: {result.errors.decode(errors='replace').strip()[-500:]}")
    verdict, *numbers = report
    if verdict != "fair":
        return _none("the test framework was changed from within")
    passed = {instance.tests[int(number)] for number in numbers}
    return Grade(_share(instance.fail_to_pass, passed), _share(instance.pass_to_pass, passed))


def _sealed(output: bytes, secret: str) -> list[str]:
    """The words of the one line that carries the seal; none where there is no such line."""
    for line in output.split(b"\n"):
        seal, _, text = line.partition(b" ")
        expected = hmac.new(secret.encode(), text, hashlib.sha256).hexdigest().encode()
        if hmac.compare_digest(seal, expected):
            return text.decode().split()
    return []


def _share(names: tuple[str, ...], passed: set[str]) -> float:
    return sum(name in passed for name in names) / len(names) if names else 1.0


def _none(problem: str) -> Grade:
    return Grade(0.0, 0.0, problem)


@cache
def runner() -> str:
    """The program that runs the tests."""
    return Path(__file__).with_name("runner.py").read_text(encoding="utf-8")

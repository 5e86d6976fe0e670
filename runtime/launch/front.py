"""The verbs that only look: init, validate, show, schema, plan. The result goes to stdout, talk to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from stackrl.schemas.advice import advice
from stackrl.schemas.loader import LoadedStack, load, load_text
from stackrl.schemas.problems import STACK, Place, Problem, StackError
from stackrl.schemas.support import unsupported
from stackrl.schemas.written import written

if TYPE_CHECKING:
    from stackrl.runtime.environments.verifiers.preflight import Looked
    from stackrl.runtime.launch.planning.at_work import AtWork
    from stackrl.runtime.launch.planning.plan import Plan
    from stackrl.runtime.run import RunFolder

ROOT = Path(__file__).resolve().parents[2]
"""The folder of the package: templates/, schemas/, stacks/."""


def init(name: str, template: str, force: bool) -> int:
    """Write a new stack file from a template. ``name`` is a name, or the path of a .yaml file."""
    file = Path(name) if name.endswith((".yaml", ".yml")) else Path(f"{name}.yaml")
    if file.exists() and not force:
        raise StackError([_at(file, "the file is there already", "choose another name, or add --force")])
    if not file.parent.is_dir():
        raise StackError(
            [_at(file, f"there is no folder {file.parent}", f"type `mkdir -p {file.parent}` first")]
        )
    text = (ROOT / "templates" / f"{template}.yaml").read_text()
    here = os.path.relpath(file)
    for mark, value in (("@NAME@", file.stem), ("@FILE@", here), ("@SCHEMA@", _schema_from(file.parent))):
        text = text.replace(mark, value)
    load_text(text, file, str(file))
    file.write_text(text)
    print(file)
    print(f"next: read it, then `stackrl plan {file}` and `stackrl launch {file}`", file=sys.stderr)
    return 0


def templates() -> list[str]:
    return sorted(file.stem for file in (ROOT / "templates").glob("*.yaml"))


@dataclass(frozen=True)
class Checked:
    """A file and what was found in it."""

    file: str
    errors: list[Problem]
    warnings: list[Problem]
    packages: list[str] = field(default_factory=list)
    """A line on each package for verifiers that this machine can run."""

    def as_json(self) -> dict[str, object]:
        found = {"errors": self.errors, "warnings": self.warnings}
        problems = {kind: [problem.as_json() for problem in found[kind]] for kind in found}
        return {"file": self.file} | problems | ({"packages": self.packages} if self.packages else {})


def validate(files: Sequence[str], overrides: Sequence[str], on_node: bool, output: str) -> int:
    """Check stack files. 2 where one has errors, or, ``on_node``, asks for what the runtime cannot do yet."""
    checked = [_check(file, overrides, on_node) for file in files]
    if output == "json":
        print(json.dumps([one.as_json() for one in checked], indent=1, ensure_ascii=False))
    for one in checked:
        for problem in one.errors:
            print(problem, file=sys.stderr)
        warn(one.warnings)
        if not one.errors and output != "json":
            print(f"{one.file}: fine{' (with warnings)' if one.warnings else ''}")
            for told in one.packages:
                print(f"  {told}")
    failed = sum(len(one.errors) for one in checked)
    if failed:
        print(f"{failed} to mend; all keys: docs/stack.md, examples: stacks/", file=sys.stderr)
    return 2 if failed else 0


def show(file: str, overrides: Sequence[str], output: str) -> int:
    """Print the file with overrides applied and defaults filled in. It is a stack file again."""
    loaded = load(file, overrides)
    stack = written(loaded.stack)
    task = {**loaded.task, STACK[0]: {**loaded.task[STACK[0]], STACK[1]: stack}}
    if output == "json":
        print(json.dumps(task, indent=1, ensure_ascii=False))
    else:
        print(yaml.safe_dump(task, sort_keys=False, allow_unicode=True, width=110), end="")
    return 0


def schema(output: str) -> int:
    """Print the JSON Schema of stack files, or the reference of all keys."""
    if output == "markdown":
        from stackrl.schemas.reference import reference

        print(reference(), end="")
    else:
        from stackrl.schemas.json_schema import file_schema

        print(json.dumps(file_schema(), indent=1, ensure_ascii=False))
    return 0


def plan(file: str, overrides: Sequence[str], output: str, reply: float | None, exit_code: bool) -> int:
    """Print what would run where, and what each kind of machine would mean for it.

    ``reply``: the mean tokens that a rollout samples, where they are known. With ``exit_code`` 1 where no run
    of the stack's name is at work with this very plan.
    """
    from stackrl.runtime.launch.planning.forecast import forecasts
    from stackrl.runtime.launch.planning.plan import make_plan

    loaded = load(file, overrides)
    made, found = make_plan(loaded), forecasts(loaded, reply)
    running = _beside_running(loaded, made)
    if output == "json":
        told = {"candidates": [one.as_json() for one in found], "running": running and asdict(running)}
        print(json.dumps(asdict(made) | told, indent=1))
    else:
        from stackrl.runtime.launch.planning.forecast_table import forecast_table, told_running
        from stackrl.runtime.launch.planning.plan_table import table

        print(table(made, loaded.stack), forecast_table(found), sep="\n\n")
        if running or exit_code:
            print("", told_running(loaded.name, running), sep="\n")
    warn(refusals(loaded))
    return int(exit_code and (running is None or bool(running.differs)))


def _beside_running(loaded: LoadedStack, made: Plan) -> AtWork | None:
    """The run of the stack's name that is at work; what tells is only loaded where there is a run."""
    from stackrl.runtime.run import RunError, all_runs

    def named(run: RunFolder) -> bool:
        try:
            return run.read("run.json").get("name") == loaded.name
        except (RunError, OSError):  # damaged, or going away
            return False

    if not (runs := [run for run in all_runs() if named(run)]):
        return None
    from stackrl.runtime.launch.planning.at_work import beside_running

    return beside_running(loaded, made, runs)


def refusals(loaded: LoadedStack) -> list[Problem]:
    """What the stack asks for and this version cannot do."""
    return loaded.locate(unsupported(loaded.stack, loaded.task))


def warn(problems: Sequence[Problem]) -> None:
    for problem in problems:
        print(str(problem).replace(f"{problem.place}: ", f"{problem.place}: warning: ", 1), file=sys.stderr)


def _check(file: str, overrides: Sequence[str], on_node: bool) -> Checked:
    try:
        loaded = load(file, overrides)
    except StackError as error:
        return Checked(file, error.problems, [])
    found, advised = refusals(loaded), loaded.locate(advice(loaded.stack, loaded.task))
    errors, absent, told = [], [], []
    for looked in look(loaded, whole=on_node):
        errors, absent, told = errors + looked.errors, absent + looked.absent, told + looked.told
    found += absent  # where the run will be they may be there
    if on_node:
        return Checked(file, errors + found, advised, told)
    return Checked(file, errors, found + advised, told)


def look(loaded: LoadedStack, *, whole: bool = False) -> list[Looked]:
    """Whether the stack's packages for verifiers can be run here, and what has code or data of the user can
    be made; nothing is started where it has neither. Takes seconds.

    ``whole``: as before a run, with sandboxes and judges (see runtime/environments/preflight.py).
    """
    from stackrl.runtime.environments.users_own import needs_a_look
    from stackrl.schemas.rules_of_workers import environments_of

    environments = [environment for _, environment in environments_of(loaded.stack)]
    looked = []
    if any(environment.type == "verifiers" for environment in environments):
        from stackrl.runtime.environments.verifiers import preflight as packages

        looked.append(packages.look(loaded))
    if any(needs_a_look(environment, whole) for environment in environments):
        from stackrl.runtime.environments import preflight

        looked.append(preflight.look(loaded, whole=whole))
    return looked


def _schema_from(folder: Path) -> str:
    """The schema as an editor finds it from ``folder``: relative inside the package's own folder."""
    file = ROOT / "schemas" / "stack.schema.json"
    return os.path.relpath(file, folder) if folder.resolve().is_relative_to(ROOT) else str(file)


def _at(file: Path, what: str, mend: str) -> Problem:
    return Problem((), what, mend, place=Place(str(file)))

"""Small broken repositories, made up on the spot: a package of a few modules, one of which has one bug.

They need no download. The tests that show the bug come with the task's test patch, as in SWE-bench; the
others are in the repository already.
"""

from __future__ import annotations

import hashlib
from difflib import unified_diff
from random import Random

from stackrl.runtime.environments.swe.instances import Instance
from stackrl.runtime.environments.swe.miniature_modules import MODULES, Bug, Module

NAMES = ("toolbox", "helpers", "basics", "kit", "bits", "parts", "pieces", "gears")
MOST_MODULES = 3


def miniature(rng: Random) -> Instance:
    """A task; the same state of ``rng`` gives the same one."""
    package = f"{rng.choice(NAMES)}{rng.randrange(100)}"
    modules = rng.sample(MODULES, rng.randint(1, MOST_MODULES))
    broken = rng.choice(modules)
    return made(package, modules, broken, rng.choice(broken.bugs))


def made(package: str, modules: list[Module], broken: Module, bug: Bug) -> Instance:
    """The task of repairing ``bug`` in ``broken``, one of ``modules``."""
    files = {"README.md": f"# {package}\n\nTests: `python3 -m unittest`.\n", f"{package}/__init__.py": ""}
    patches, fail, keep = {}, [], []
    for module in modules:
        source, tests = f"{package}/{module.name}.py", f"test_{package}_{module.name}.py"
        hidden = bug.tests if module is broken else ()
        files[source] = module.source
        files[tests] = module.test_file(package, without=hidden)
        prefix = f"{tests.removesuffix('.py')}.{module.test_class}"
        for name in module.tests:
            (fail if name in hidden else keep).append(f"{prefix}.{name}")
        if module is broken:
            files[source] = module.source.replace(bug.right, bug.wrong)
            patches["solution"] = diff(source, files[source], module.source)
            patches["tests"] = diff(tests, files[tests], module.test_file(package))
    digest = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
    return Instance(
        instance_id=f"miniature__{package}-{digest[:10]}",
        repo=f"miniature/{package}",
        base_commit=digest,
        problem_statement=f"{bug.problem} (`{package}.{broken.name}`)",
        patch=patches["solution"],
        test_patch=patches["tests"],
        fail_to_pass=tuple(fail),
        pass_to_pass=tuple(keep),
        files=tuple(sorted(files.items())),
    )


def diff(path: str, before: str, after: str) -> str:
    """The change of one file, as `git diff` writes it."""
    lines = unified_diff(before.splitlines(True), after.splitlines(True), f"a/{path}", f"b/{path}")
    return f"diff --git a/{path} b/{path}\n" + "".join(lines)

"""Repositories are repaired in sandboxes, and only what really repairs them is worth anything."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
import types
import unittest
from pathlib import Path
from random import Random

import pytest
from sandbox_traces import left_behind, running, sandboxes_of

from stackrl.runtime.data.files import DataError
from stackrl.runtime.environments.base import Answer, Call, NoRoom
from stackrl.runtime.environments.sandboxes import machine
from stackrl.runtime.environments.sandboxes.base import SandboxError
from stackrl.runtime.environments.swe import Swe
from stackrl.runtime.environments.swe.agent import in_block, shortened
from stackrl.runtime.environments.swe.grading import Place, grade
from stackrl.runtime.environments.swe.instances import Instance, InstanceError, changed_files
from stackrl.runtime.environments.swe.miniature_modules import MODULES, NUMBERS
from stackrl.runtime.environments.swe.miniatures import diff, made, miniature
from stackrl.runtime.environments.swe.protected import protected
from stackrl.runtime.environments.swe.tasks import GRADING_SECONDS
from stackrl.runtime.environments.swe.workspace import Workspace
from stackrl.runtime.processes import reap_sandboxed

BOX = {"type": "bubblewrap", "memory": "512MiB", "processes": 64, "timeout": 60.0}
needs_bubblewrap = pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")

SOURCE, TESTS = "kit/numbers.py", "test_kit_numbers.py"
CLAMP = made("kit", [NUMBERS], NUMBERS, NUMBERS.bugs[0])
BROKEN = dict(CLAMP.files)[SOURCE]


def new(path, text):
    """A patch that adds a file."""
    lines = "".join(f"+{line}\n" for line in text.splitlines())
    count = len(text.splitlines())
    head = f"diff --git a/{path} b/{path}\nnew file mode 100644\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{count} @@\n{lines}"


def beginning(code):
    """A patch that puts ``code`` where the tests import the broken module."""
    return diff(SOURCE, BROKEN, code + "\n" + BROKEN)


def link(path, target):
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 120000\n--- /dev/null\n+++ b/{path}\n@@ -0,0 +1 @@\n"
        f"+{target}\n\\ No newline at end of file\n"
    )


PASSES = "\n".join(
    ["import unittest", "class NumbersTest(unittest.TestCase):"]
    + [f"    def {name}(self): pass\n" for name in NUMBERS.tests]
)
FORGED = json.dumps({"passed": list(CLAMP.tests), "broken": False})
CHEATS = {
    "garbage": "not a diff\n",
    "something else": diff("README.md", dict(CLAMP.files)["README.md"], "solved\n"),
    "hanging": beginning("import time\nwhile True:\n    time.sleep(1)"),
    "ends at once": beginning("import os\nos._exit(0)"),
    "exits": beginning("raise SystemExit(0)"),
    "edits the tests": diff(TESTS, dict(CLAMP.files)[TESTS], PASSES),
    "a package in the place of the tests": new("test_kit_numbers/__init__.py", PASSES),
    "removes the tests": f"diff --git a/{TESTS} b/{TESTS}\n"
    + diff(TESTS, dict(CLAMP.files)[TESTS], "").split("\n", 1)[1].replace(f"+++ b/{TESTS}", "+++ /dev/null"),
    "plants conftest": new("conftest.py", "def pytest_runtest_makereport(): raise SystemExit(0)")
    + new("kit/conftest.py", "import os; os._exit(0)"),
    "plants sitecustomize": new(
        "sitecustomize.py",
        "import unittest\nunittest.TestCase.run = lambda self, to: to.addSuccess(self)",
    )
    + new("usercustomize.py", "import sitecustomize"),
    "hides unittest": new("unittest.py", "class TestCase: pass\ndef main(): pass"),
    "forges the output": beginning(
        "import os, sys\n"
        f"forged = {FORGED!r}\n"
        'lines = f"OK\\n{\'0\' * 64} {forged}\\n" + forged + "\\n"\n'
        "for descriptor in range(256):\n"
        "    try: os.write(descriptor, lines.encode())\n"
        "    except OSError: pass\n"
        "os._exit(0)"
    ),
    "forges the output later": beginning(
        "import atexit, os\n"
        f"forged = {FORGED!r}\n"
        "def forge():\n"
        "    for descriptor in range(256):\n"
        "        try: os.write(descriptor, ('0' * 64 + ' ' + forged + '\\n').encode())\n"
        "        except OSError: pass\n"
        "atexit.register(forge)"
    ),
    "assertions that hold": beginning(
        "import unittest\nunittest.TestCase.assertEqual = lambda *whatever, **more: None\n"
        "unittest.case._AssertRaisesContext.__exit__ = lambda *whatever: True"
    ),
    "results that are good": beginning(
        "import unittest\nunittest.TestResult.addFailure = unittest.TestResult.addSuccess"
    ),
    "writes another report": beginning(
        f"import hmac, json, os\nforged = {FORGED!r}\n"
        "json.dumps = lambda *whatever, **more: forged\n"
        "os.write = lambda to, line, write=os.write: write(to, forged.encode())\n"
        "hmac.new = hmac.HMAC = None"
    ),
    "parts of a test that never fail": beginning(
        "import contextlib, unittest.case\nright = unittest.case._Outcome.testPartExecutor\n"
        "@contextlib.contextmanager\ndef part(self, test, *more, **named):\n"
        "    if type(test).__name__ == 'Wrong':\n"
        "        with right(self, test, *more, **named): yield\n        return\n"
        "    try: yield\n    except Exception: pass\n"
        "unittest.case._Outcome.testPartExecutor = part"
    ),
    "other code in a function": beginning(
        "import unittest.case\ndef part(self, test, *more, **named):\n"
        "    try: yield\n    except Exception: pass\n"
        "unittest.case._Outcome.testPartExecutor.__wrapped__.__code__ = part.__code__"
    ),
    "blocks that swallow errors": beginning(
        "import contextlib\ncontextlib._GeneratorContextManager.__exit__ = lambda *whatever: True"
    ),
    "a name before that of Python": beginning(
        "import unittest.case\nunittest.case.getattr = lambda *what: True if 'expecting' in what[1] else "
        "getattr(*what)"
    ),
    "swaps the outcomes": beginning(
        "import unittest\n[found] = [one for one in unittest.TestResult.__subclasses__() if one.__name__ == "
        "'Outcomes']\nfound.addFailure = lambda self, test, error: self.addSuccess(test)"
    ),
    "looks for who grades": beginning(
        "import __main__, unittest\n__main__.Guard.broken = lambda self: False\n"
        "unittest.TestCase.run = lambda self, to: to.addSuccess(self)"
    ),
    "failures are expected": beginning(
        "import unittest\nright = min\ndef min(*what):\n"
        "    for tests in unittest.TestCase.__subclasses__():\n"
        "        tests.__unittest_expecting_failure__ = True\n"
        "    return right(*what)"
    ),
}
UNFAIR = (
    "results that are good",
    "parts of a test that never fail",
    "other code in a function",
    "blocks that swallow errors",
    "a name before that of Python",
    "swaps the outcomes",
)


async def place(**changes):
    """Where tasks are graded; its sandbox has been tried."""
    found = Place(machine(BOX), **{"test_timeout": 60.0, **changes})
    await found.machine.check()
    return found


@needs_bubblewrap
async def test_the_solution_resolves_and_nothing_does_not():
    where = await place()
    assert (await grade(CLAMP, CLAMP.patch, where)).resolved
    assert (await grade(CLAMP, "", where)).problem == "nothing was changed"
    other = await grade(CLAMP, CHEATS["something else"], where)
    assert (other.mended, other.kept, other.problem) == (0.0, 1.0, "")
    harm = await grade(CLAMP, CLAMP.patch + diff("kit/__init__.py", "", "raise ImportError('no')\n"), where)
    assert (harm.mended, harm.kept) == (0.0, 0.0)
    assert left_behind() == []


@needs_bubblewrap
@pytest.mark.slow
async def test_what_only_seems_to_solve_is_worth_nothing():
    where = await place(test_timeout=6.0)
    grades = await asyncio.gather(*(grade(CLAMP, patch, where) for patch in CHEATS.values()))
    found = dict(zip(CHEATS, grades, strict=True))
    assert {name: (g.resolved, g.mended) for name, g in found.items() if g.mended} == {}
    assert found["garbage"].problem.startswith("the change does not apply")
    assert found["hanging"].problem == "the tests took too long"
    for name in UNFAIR:
        assert found[name].problem == "the test framework was changed from within", name
    for name in (
        "edits the tests",
        "removes the tests",
        "plants conftest",
        "plants sitecustomize",
        "hides unittest",
    ):
        assert found[name].kept == 1.0, f"{name}: only what was planted is undone"
    assert left_behind() == []


@needs_bubblewrap
@pytest.mark.slow
async def test_what_is_planted_beside_a_solution_takes_nothing_from_it():
    where = await place()
    beside = (
        "edits the tests",
        "plants conftest",
        "plants sitecustomize",
        "a package in the place of the tests",
    )
    patches = [CLAMP.patch + CHEATS[name] for name in beside]
    patches.append(CLAMP.patch + link("tests", "/etc") + link("kit/conftest.py", "/etc/passwd"))
    grades = await asyncio.gather(*(grade(CLAMP, patch, where) for patch in patches))
    assert [g.problem for g in grades if not g.resolved] == []


@needs_bubblewrap
async def test_a_change_in_the_way_of_the_tests_is_worth_nothing():
    more = {**CLAMP.as_row(), "test_patch": CLAMP.test_patch + new("kit/checks/test_more.py", "pass")}
    in_the_way = CLAMP.patch + new("kit/checks", "a file where a folder is to be")
    found = await grade(Instance.of(more), in_the_way, await place())
    assert found.mended == 0.0 and found.problem.startswith("the change stands in the way of the tests")


PARITY = "def even(n):\n    return n % 2\n"
PARITY_TESTS = """
import unittest
import pytest
from pkg.parity import even

def test_even():
    assert even(2) is True

def test_what_is_known():
    pytest.xfail("not today")

@pytest.mark.xfail
def test_what_is_marked():
    assert even("2")

class EvenTest(unittest.TestCase):
    @unittest.expectedFailure
    def test_what_is_expected(self):
        self.assertTrue(even("2"))
"""
OF_PYTEST = Instance(
    instance_id="owner__pkg-1",
    repo="owner/pkg",
    base_commit="",
    problem_statement="2 is even.",
    patch=diff("pkg/parity.py", PARITY, PARITY.replace("% 2", "% 2 == 0")),
    test_patch=new("tests/test_parity.py", PARITY_TESTS),
    fail_to_pass=("tests/test_parity.py::test_even",),
    pass_to_pass=tuple(
        f"tests/test_parity.py::{name}"
        for name in ("test_what_is_known", "test_what_is_marked", "EvenTest::test_what_is_expected")
    ),
    files=(
        ("conftest.py", "pytest_plugins = ['pkg.plugin']\n"),
        ("pkg/__init__.py", ""),
        ("pkg/parity.py", PARITY),
        ("pkg/plugin.py", "\n"),
    ),
)
ALL_PASS = """
import pytest
@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_makereport(item, call):
    made = yield
    made.get_result().outcome = "passed"
"""
AT_WORK = "def even(n):\n    {}\n    return n % 2\n"
PYTEST_CHEATS = {
    "settings in a new file": new("pytest.toml", '[pytest]\naddopts = ["-p", "pkg.evil"]\n')
    + new("pkg/evil.py", ALL_PASS),
    "seems to be installed": new("zz-1.0.dist-info/METADATA", "Name: zz\nVersion: 1.0\n")
    + new("zz-1.0.dist-info/entry_points.txt", "[pytest11]\nzz = pkg.evil\n")
    + new("pkg/evil.py", ALL_PASS),
    "is a plugin already": diff("pkg/plugin.py", "\n", ALL_PASS),
    "becomes a plugin": new("pkg/evil.py", ALL_PASS)
    + diff(
        "pkg/parity.py",
        PARITY,
        AT_WORK.format(
            "import _pytest.assertion.util as u, pkg.evil; all = u._config.pluginmanager; "
            "all.is_registered(pkg.evil) or all.register(pkg.evil)"
        ),
    ),
    "fails as expected": diff("pkg/parity.py", PARITY, AT_WORK.format("__import__('pytest').xfail('so')")),
    "calls that never fail": diff(
        "pkg/parity.py",
        PARITY,
        "import _pytest.python\n_pytest.python.Function.runtest = lambda self: None\n" + PARITY,
    ),
    "hooks that call nothing": diff(
        "pkg/parity.py", PARITY, "import _pytest.python as p\np.pytest_pyfunc_call.__code__ = "
        "(lambda pyfuncitem: True).__code__\n" + PARITY
    ),
}  # fmt: skip


@needs_bubblewrap
@pytest.mark.slow
async def test_pytest_is_not_talked_into_anything():
    where = Place(machine({**BOX, "read": [sys.prefix]}), python=sys.executable, test_timeout=60.0)
    await where.machine.check()
    right = await grade(OF_PYTEST, OF_PYTEST.patch, where)
    assert right.resolved, right
    nothing = await grade(OF_PYTEST, new("notes", "none"), where)
    assert (nothing.mended, nothing.kept, nothing.problem) == (0.0, 1.0, "")
    grades = await asyncio.gather(*(grade(OF_PYTEST, patch, where) for patch in PYTEST_CHEATS.values()))
    found = dict(zip(PYTEST_CHEATS, grades, strict=True))
    assert {name: found[name] for name in found if found[name].mended} == {}
    for name in (
        "is a plugin already",
        "becomes a plugin",
        "calls that never fail",
        "hooks that call nothing",
    ):
        assert found[name].problem == "the test framework was changed from within", name
    both = await grade(OF_PYTEST, OF_PYTEST.patch + PYTEST_CHEATS["settings in a new file"], where)
    assert both.resolved, "what was planted is undone"


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("rounds", [3, pytest.param(10, marks=pytest.mark.nightly)])
async def test_gradings_leave_nothing(rounds):
    """Five at once, again and again."""
    before = set(os.listdir("/proc/self/fd"))
    where = await place()
    grades = []
    for _ in range(rounds):
        grades += await asyncio.gather(*(grade(CLAMP, CLAMP.patch, where) for _ in range(5)))
    assert [g for g in grades if not g.resolved] == []
    assert left_behind() == []
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 2
    reap_sandboxed()  # where a test before this one has made this process adopt what ends there
    assert sandboxes_of(os.getpid()) == []


def test_every_bug_breaks_the_tests_it_says():
    for module in MODULES:
        for bug in module.bugs:
            assert module.source.count(bug.right) == 1
            failing = failed_tests(module, module.source.replace(bug.right, bug.wrong))
            assert failing == set(bug.tests), (module.name, bug.problem)
        assert failed_tests(module, module.source) == set()


def failed_tests(module, source):
    """Names of the tests that fail with ``source`` as the module."""
    loaded = types.ModuleType(module.name)
    exec(source, vars(loaded))
    tests = types.ModuleType("tests")
    code = module.test_file("kit").replace(f"from kit import {module.name}", "")
    vars(tests)[module.name] = loaded
    exec(code, vars(tests))
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(vars(tests)[module.test_class]).run(result)
    assert result.testsRun == len(module.tests)
    return {test.id().rpartition(".")[2] for test, _ in result.failures + result.errors}


def test_miniatures_are_many_and_repeat_with_their_seed():
    them = [miniature(Random(seed)) for seed in range(300)]
    assert them == [miniature(Random(seed)) for seed in range(300)]
    assert len({it.instance_id for it in them}) > 250
    for it in them[:50]:
        assert Instance.of(json.loads(json.dumps(it.as_row()))) == it
        assert it.framework == "unittest" and changed_files(it.patch) <= dict(it.files).keys()
        assert not set(it.fail_to_pass) & set(it.pass_to_pass)


# ---- the agent's loop


class Scripted:
    """A policy that gives prepared answers, and keeps what it was told."""

    seconds = None

    def __init__(self, *answers):
        self._answers = list(answers)
        self.told = []

    async def answer(self, *messages):
        self.told += [message["content"] for message in messages]
        if not self._answers:
            raise NoRoom
        said = self._answers.pop(0)
        return said if isinstance(said, Answer) else Answer("", tuple(said))


def shell(command):
    return [Call("shell", {"command": command})]


def swe(**args):
    return Swe("miniature", **{"sandbox": BOX, "test_timeout": 60.0, **args})


async def rolled_out(it, instance, policy):
    task = it.task(Random(0))
    return await it.rollout(type(task)(task.messages, instance), policy)


REPAIR = "sed -i 's/min(lowest, max(value, highest))/max(lowest, min(value, highest))/' kit/numbers.py"


@needs_bubblewrap
async def test_an_agent_repairs_a_repository():
    policy = Scripted(shell("cat kit/numbers.py; git log --oneline --all"), shell(REPAIR), [Call("submit")])
    outcome = await rolled_out(swe(), CLAMP, policy)
    assert outcome.rewards == {"resolved": 1.0, "mended": 1.0} and outcome.done
    assert "def clamp" in policy.told[0] and policy.told[0].rstrip().endswith("base")
    assert policy.told[1] == ""
    expected = {"solved": 1.0, "kept": 1.0, "changed_lines": 2.0, "turns": 3.0, "commands": 2.0}
    assert outcome.metrics == {
        **expected,
        "malformed": 0.0,
        "timeouts": 0.0,
        "submitted": 1.0,
        "out_of_time": 0.0,
    }
    assert left_behind() == []


@needs_bubblewrap
async def test_an_agent_writes_blocks():
    it = swe(actions="blocks", turns=3)
    assert not it.tools and "```bash" in it.task(Random(0)).messages[0]["content"]
    policy = Scripted(
        Answer("I do not know"),
        Answer(f"<think>\n```bash\nfalse\n```?\n</think>So:\n```bash\n{REPAIR}\n```"),
        Answer("```\nfalse\n```"),
        Answer("more"),
    )
    outcome = await rolled_out(it, CLAMP, policy)
    assert outcome.rewards["resolved"] == 1.0 and outcome.metrics["turns"] == 3.0, (
        "not more turns than it may"
    )
    assert policy.told[0].startswith("There is no block with a command")


@needs_bubblewrap
@pytest.mark.parametrize("actions", ["tools", "blocks"])
async def test_a_demonstration_is_what_happens(actions):
    it = swe(actions=actions)
    task = it.task(Random(3))
    turns = it.demonstration(task, Random(0), 0.0)
    if actions == "blocks":
        policy = Scripted(*(Answer(turn.answer) for turn in turns))
    else:
        policy = Scripted(*([Call(**json.loads(turn.answer.split("\n")[1]))] for turn in turns))
    outcome = await it.rollout(task, policy)
    assert outcome.rewards["resolved"] == 1.0 and outcome.metrics["submitted"] == 1.0
    assert policy.told == [message["content"] for turn in turns for message in turn.messages]
    noisy = it.demonstration(task, Random(0), 1.0)
    assert noisy[:-1] == turns[:-1] and noisy[-1] != turns[-1]


@needs_bubblewrap
async def test_wrong_calls_are_answered_and_silence_ends():
    bad = [Call("shell", problem="arguments are no JSON"), Call("delete"), Call("shell", {"command": 3})]
    policy = Scripted(
        bad, shell("exit 7"), Answer("hm", closed=False), Answer("hm"), Answer("hm"), [Call("submit")]
    )
    outcome = await rolled_out(swe(), CLAMP, policy)
    assert policy.told[:3] == [
        "arguments are no JSON",
        "There is no tool 'delete'; there are `shell` and `submit`.",
        "`shell` needs `command`, a text.",
    ]
    assert policy.told[3] == "\n[exit status 7]" and policy.told[4].startswith(
        "Your answer was cut off. Call"
    )
    assert outcome.rewards["resolved"] == 0.0
    assert (outcome.metrics["malformed"], outcome.metrics["submitted"], outcome.metrics["turns"]) == (
        6.0,
        0.0,
        5.0,
    )


@needs_bubblewrap
@pytest.mark.slow
async def test_a_slow_command_ends_alone_and_its_work_counts():
    it = swe(sandbox={**BOX, "timeout": 3.0})
    policy = Scripted(shell(f"{REPAIR}; echo done; sleep 600"))
    outcome = await rolled_out(it, CLAMP, policy)
    assert outcome.rewards["resolved"] == 1.0 and outcome.metrics["timeouts"] == 1.0


class Slow(Scripted):
    """One that thinks for ever when it has said what was prepared."""

    async def answer(self, *messages):
        return await super().answer(*messages) if self._answers else await asyncio.Event().wait()


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize("last", [(), (shell("sleep 600"),)])
async def test_work_ends_in_time_to_be_judged_also_where_it_hangs_the_tests(last):
    hang = "printf 'while True: pass\\n' >> kit/__init__.py"
    policy = Slow(shell(hang), *last)
    policy.seconds = GRADING_SECONDS + 6.0 + 10.0
    outcome = await asyncio.wait_for(rolled_out(swe(test_timeout=6.0), CLAMP, policy), policy.seconds)
    assert outcome.rewards == {"resolved": 0.0, "mended": 0.0}
    assert outcome.metrics["out_of_time"] == 1.0 and outcome.metrics["commands"] == 1.0 + len(last)
    policy.seconds = 10.0
    with pytest.raises(SandboxError, match="no time was left"):
        await rolled_out(swe(), CLAMP, policy)
    assert left_behind() == []


@needs_bubblewrap
async def test_a_sandbox_that_stops_working_is_no_reward_of_zero(tmp_path, monkeypatch):
    class Breaking(Scripted):
        async def answer(self, *messages):
            if len(self._answers) == 1:
                (tmp_path / "bwrap").write_text("#!/bin/sh\necho 'bwrap: no namespaces' >&2\nexit 1\n")
                (tmp_path / "bwrap").chmod(0o755)
                monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
            return await super().answer(*messages)

    with pytest.raises(SandboxError, match=r"did not begin: .*no namespaces"):
        await rolled_out(swe(), CLAMP, Breaking(shell(REPAIR), [Call("submit")]))


@needs_bubblewrap
async def test_tests_that_nothing_runs_are_no_reward_of_zero():
    where = await place(python="/no/such/python")
    with pytest.raises(SandboxError, match=r"/no/such/python does not run unittest .*not found"):
        await grade(CLAMP, CLAMP.patch, where)


@needs_bubblewrap
async def test_whoever_breaks_the_repository_gets_nothing_and_does_no_harm():
    policy = Scripted(shell("rm -rf .git; rm -rf *; ls"), [Call("submit")])
    outcome = await rolled_out(swe(), CLAMP, policy)
    assert outcome.rewards == {"resolved": 0.0, "mended": 0.0}


@needs_bubblewrap
async def test_a_cancelled_rollout_leaves_nothing():
    it = swe()
    await it.start()
    rollout = asyncio.ensure_future(rolled_out(it, CLAMP, Scripted(shell("sleep 98765.25"))))
    async with asyncio.timeout(60):
        while not running("98765.25"):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout
    assert left_behind() == [] and not running("98765.25")


def test_a_command_in_a_block():
    assert in_block("```bash\nls -l\n```") == Call("shell", {"command": "ls -l"})
    assert in_block("well\n```sh\na\n\nb\n```\nso") == Call("shell", {"command": "a\n\nb"})
    assert in_block("```\nsubmit\n```") == Call("submit")
    assert in_block("```python\nprint()\n```").problem
    assert in_block("```bash\na\n```\n```bash\nb\n```").problem.startswith("There are 2 blocks")


def test_long_output_is_shortened_in_its_middle():
    assert shortened("x" * 100, 100) == "x" * 100
    text = shortened("a" * 60 + "b" * 60, 100)
    assert text == "a" * 50 + "\n[20 characters left out]\n" + "b" * 50


# ---- tasks of data sets


PYTEST_TESTS = "from project.parity import even\n\n\ndef test_odd():\n    assert not even(3)\n"
PYTEST_NEW = PYTEST_TESTS + "\n\ndef test_even():\n    assert even(2)\n"


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A repository with a later commit that has the solution, and the task in SWE-bench's format."""
    folder = tmp_path_factory.mktemp("clones") / "owner" / "project"
    (folder / "project").mkdir(parents=True)
    (folder / "tests").mkdir()

    def git(*words):
        who = ["-c", "user.name=t", "-c", "user.email=t@t"]
        return subprocess.run(
            ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
        ).stdout

    broken, right = "def even(n):\n    return n % 2\n", "def even(n):\n    return n % 2 == 0\n"
    files = {"project/__init__.py": "", "project/parity.py": broken, "tests/test_parity.py": PYTEST_TESTS}
    files[".gitattributes"] = "tests export-ignore\n"
    for path, text in files.items():
        (folder / path).write_text(text)
    git("init", "-q", ".")
    git("add", ".")
    git("commit", "-qm", "first")
    base = git("rev-parse", "HEAD").strip()
    (folder / "project/parity.py").write_text(right)
    patch = git("diff")
    git("commit", "-qam", "the solution")
    row = {
        "instance_id": "owner__project-1",
        "repo": "owner/project",
        "base_commit": base,
        "problem_statement": "2 is even.",
        "patch": patch,
        "test_patch": diff("tests/test_parity.py", PYTEST_TESTS, PYTEST_NEW),
        "FAIL_TO_PASS": json.dumps(["tests/test_parity.py::test_even", "tests/test_parity.py::test_odd"]),
        "PASS_TO_PASS": json.dumps([]),
        "version": "1",
    }
    return folder.parents[1], row


@needs_bubblewrap
@pytest.mark.slow
async def test_a_task_of_a_clone_with_pytest(clone, tmp_path):
    repositories, row = clone
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    it = Swe(
        dataset=str(tmp_path / "tasks.jsonl"),
        repositories=str(repositories),
        sandbox={**BOX, "read": [sys.prefix]},
        python=sys.executable,
    )
    task = it.task(Random(0))
    look = shell("git log --all --oneline | wc -l; grep -r '== 0' . ; ls tests; which python3")
    mend = shell("sed -i 's/% 2/% 2 == 0/' project/parity.py; touch conftest.py")
    policy = Scripted(look, mend, [Call("submit")])
    outcome = await it.rollout(task, policy)
    assert outcome.rewards == {"resolved": 1.0, "mended": 1.0}
    assert policy.told[0].splitlines() == ["1", "test_parity.py", f"{Path(sys.executable).parent}/python3"]
    cheat = new("conftest.py", "import os\ndef pytest_sessionstart(session): os._exit(0)")
    broken = "def even(n):\n    return n % 2\n"
    tampering = "import _pytest.runner as r\nr.check_interactive_exception = r.call_and_report = None\n"
    patched = diff("project/parity.py", broken, tampering + broken)
    where = Place(machine({**BOX, "read": [sys.prefix]}), Path(repositories), python=sys.executable)
    for patch in (cheat, patched):
        assert (await grade(task.data, patch, where)).mended == 0.0


def test_rows_are_refused_with_what_is_wrong(clone, tmp_path):
    repositories, row = clone
    assert Instance.of(row).fail_to_pass == (
        "tests/test_parity.py::test_even",
        "tests/test_parity.py::test_odd",
    )
    assert Instance.of(row).test_files == {"tests/test_parity.py"}
    for change, said in (
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "no list"}, "owner__project-1: Expecting value"),
        ({"FAIL_TO_PASS": ["test_x (module.Class)"]}, "names a test neither as pytest does"),
    ):
        with pytest.raises(InstanceError, match=said):
            Instance.of({**row, **change})
    with pytest.raises(InstanceError, match="has no repo; rows follow SWE-bench's format"):
        Instance.of({key: value for key, value in row.items() if key != "repo"})
    file = tmp_path / "tasks.jsonl"
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"stands in an image: write sandbox: \{type: docker\}"):
        Swe(str(file))
    with pytest.raises(ValueError, match="names no image; write one as `image`"):
        Swe(str(file), sandbox={"type": "docker"})
    with pytest.raises(DataError, match="no file or folder is called"):
        Swe(str(tmp_path / "no.jsonl"))
    file.write_text(json.dumps({**row, "repo": 3, "FAIL_TO_PASS": []}) + "\n")
    with pytest.raises(InstanceError, match=r"tasks\.jsonl:1: owner__project-1"):
        Swe(str(file), repositories=str(repositories))


def test_tasks_with_tests_that_nothing_runs_are_left_out(clone, tmp_path, caplog):
    repositories, row = clone
    file = tmp_path / "tasks.jsonl"
    other = {**row, "instance_id": "django__django-1", "FAIL_TO_PASS": ["test_x (module.Class)"]}
    file.write_text(json.dumps(other) + "\n" + json.dumps(row) + "\n")
    it = Swe(str(file), repositories=str(repositories))
    assert {it.task(Random(seed)).data.instance_id for seed in range(9)} == {"owner__project-1"}
    assert "1 of 2 tasks are left out; django__django-1: 'test_x (module.Class)' names a test" in caplog.text
    file.write_text(json.dumps(other) + "\n")
    with pytest.raises(InstanceError, match="names a test neither as pytest does"):
        Swe(str(file), repositories=str(repositories))


@needs_bubblewrap
async def test_a_repository_that_is_not_there_is_no_reward_of_zero(clone, tmp_path):
    _, row = clone
    where = Place(machine(BOX), tmp_path)
    with pytest.raises(InstanceError, match=r"type `git clone --bare https://github\.com/owner/project"):
        await grade(Instance.of(row), row["patch"], where)
    bad = {**CLAMP.as_row(), "test_patch": diff(TESTS, "not there\n", "nor there\n")}
    with pytest.raises(InstanceError, match="test_patch does not apply"):
        await grade(Instance.of(bad), CLAMP.patch, await place())
    with pytest.raises(SandboxError, match="cannot be started"):
        await grade(CLAMP, CLAMP.patch, Place(NoMachine()))


class NoMachine:
    def sandbox(self, image=""):
        raise SandboxError("bwrap cannot be started")


async def test_what_an_image_holds_beside_its_repository_is_no_change(tmp_path):
    image = tmp_path / "testbed"
    (image / "kit.egg-info").mkdir(parents=True)
    for path, text in {"a.py": "1\n", ".gitignore": "*.egg-info\n"}.items():
        (image / path).write_text(text)
    subprocess.run("git init -q . && git add .", shell=True, cwd=image, check=True)  # noqa: ASYNC221
    (image / "built.txt").write_text("made when the image was\n")
    (image / "kit.egg-info/PKG-INFO").write_text("Name: kit\n")
    bare = Instance.of({**CLAMP.as_row(), "files": {}})
    async with machine({"type": "host", "unsafe_allow_host": True}).sandbox() as sandbox:
        workspace = Workspace(sandbox, bare, str(image), None)
        await workspace.prepare()
        assert await workspace.diff() == "" and await workspace.changed() == set()
        now, first = await workspace.files()
        assert now - first == {"kit.egg-info/PKG-INFO"} and "built.txt" in first
        (image / "a.py").write_text("2\n")
        assert "+2\n" in await workspace.diff() and await workspace.changed() == {"a.py"}


def test_images_of_known_data_sets_have_their_names():
    place = Place(machine(BOX), image="swebench/sweb.eval.x86_64.{docker_id}:latest")
    row = {**CLAMP.as_row(), "instance_id": "django__Django-11"}
    assert place.image_of(Instance.of(row)) == "swebench/sweb.eval.x86_64.django_1776_django-11:latest"
    assert place.image_of(Instance.of({**row, "docker_image": "own:1"})) == "own:1"


def test_what_a_solution_has_no_say_in():
    first = {
        "src/app.py",
        "tests/test_a.py",
        "tests/helpers.py",
        "setup.cfg",
        "django/test/client.py",
        "json.py",
    }
    planted = {
        "conftest.py", "src/conftest.py", "sitecustomize.py", "x.pth", "src/__pycache__/app.cpython-311.pyc",
        "test_a.cpython-311.so", "test_a/__init__.py", "unittest/__init__.py", "typing.py", "tox.ini",
        "pytest.toml", "zz-1.0.dist-info/entry_points.txt", "src/zz.egg-info/PKG-INFO", "zz.egg-info",
    }  # fmt: skip
    fine = {"src/new.py", "src/latest.py", "src/typing.py", "contest.py", "src/attestation/a.py"}
    paths = first | planted | fine
    found = protected(paths, first, {"tests/test_a.py"}, {"src/app.py"})
    assert found == planted | {"tests/test_a.py", "tests/helpers.py", "setup.cfg", "django/test/client.py"}
    opened = protected(paths, first, {"tests/test_a.py"}, {"setup.cfg", "django/test/utils.py"})
    assert found - opened == {"setup.cfg", "django/test/client.py"}

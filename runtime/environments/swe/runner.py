"""Runs tests inside a sandbox and tells which passed; sent there as text, so it needs nothing but Python 3.6.

The order comes through stdin: ``{"secret", "framework", "tests"}``. The answer is one line on what was
stdout: the outcomes as JSON after their seal, an HMAC with the secret. That is read before anything of the
repository is imported and is in no argument, environment variable or file. What tests print goes to stderr.
"""

import hashlib
import hmac
import json
import os
import sys


class Guard:
    """Functions of a test framework as they were before the repository was imported."""

    def __init__(self, owners):
        self.before = [(owner, dict(vars(owner))) for owner in owners]

    def broken(self):
        """Whether one of them is another now: then no outcome means anything."""
        return any(
            vars(owner).get(name) is not value
            for owner, names in self.before
            for name, value in names.items()
        )


def with_unittest(tests):
    import unittest
    import unittest.case
    import unittest.loader
    import unittest.result
    import unittest.suite

    class Outcomes(unittest.TestResult):
        def __init__(self):
            super().__init__()
            self.passed, self.failed = set(), set()

        def addSuccess(self, test):
            self.passed.add(test.id())

        def addExpectedFailure(self, test, err):
            self.passed.add(test.id())

        def addFailure(self, test, err):
            self.failed.add(test.id())

        def addError(self, test, err):
            self.failed.add(test.id())
            sys.stderr.write(self._exc_info_to_string(err, test))

        def addUnexpectedSuccess(self, test):
            self.failed.add(test.id())

        def addSubTest(self, test, subtest, err):
            if err is not None:
                self.failed.add(test.id())

    class Wrong(unittest.TestCase):
        """Fails wherever assertions still mean something."""

        def runTest(self):
            self.assertEqual(1, 2)

    guard = Guard(
        [
            unittest.TestCase,
            unittest.TestResult,
            unittest.TestSuite,
            unittest.BaseTestSuite,
            unittest.TestLoader,
            unittest.case,
            unittest.result,
            unittest.suite,
            Outcomes,
        ]
    )
    sys.path.insert(0, os.getcwd())
    outcomes, loader = Outcomes(), unittest.TestLoader()
    unittest.TestSuite([loader.loadTestsFromName(test) for test in tests]).run(outcomes)
    canary = Outcomes()
    Wrong().run(canary)
    broken = guard.broken() or not canary.failed or bool(canary.passed)
    return sorted(outcomes.passed - outcomes.failed), broken


def with_pytest(tests):
    import _pytest.main
    import _pytest.python
    import _pytest.reports
    import _pytest.runner
    import pytest

    class Outcomes:
        def __init__(self):
            self.passed, self.failed = set(), set()

        def pytest_runtest_logreport(self, report):
            expected = report.skipped and hasattr(report, "wasxfail")
            if report.failed:
                self.failed.add(report.nodeid)
            elif (report.when == "call" and report.passed) or expected:
                self.passed.add(report.nodeid)

    guard = Guard(
        [
            _pytest.runner,
            _pytest.runner.CallInfo,
            _pytest.reports.TestReport,
            _pytest.reports.BaseReport,
            _pytest.main.Session,
            _pytest.python.Function,
            Outcomes,
        ]
    )
    sys.path.insert(0, os.getcwd())
    files = sorted({test.partition("::")[0] for test in tests})
    outcomes = Outcomes()
    pytest.main(["-q", "-p", "no:cacheprovider", *files], plugins=[outcomes])
    return sorted(outcomes.passed - outcomes.failed), guard.broken()


def main():
    order = json.loads(sys.stdin.buffer.read().decode())
    seal = hmac.new(order.pop("secret").encode(), digestmod=hashlib.sha256)
    private, own = os.dup(1), os.getpid()
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.dont_write_bytecode = True
    run = {"unittest": with_unittest, "pytest": with_pytest}[order["framework"]]
    try:
        passed, broken = run(order["tests"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    if os.getpid() != own:  # a test may have left a second process behind
        os._exit(1)
    text = json.dumps({"passed": passed, "broken": broken}).encode()
    seal.update(text)
    line = seal.hexdigest().encode() + b" " + text + b"\n"
    while line:
        line = line[os.write(private, line) :]
    os._exit(0)  # threads that are left do not hold it


if __name__ == "__main__":
    main()

"""Functions of the user's own: whatever one of them does, the process that asks and the other calls go on."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time

import pytest

from stackrl.runtime.environments import functions as module
from stackrl.runtime.environments.functions import FunctionError, functions
from stackrl.runtime.processes import state_of

CODE = r'''
import asyncio, os, re, signal, subprocess, sys, threading, time

def length(answer, row):
    print("printed, which nobody may take for a message")
    return len(answer)

async def soon(answer, row):
    await asyncio.sleep(0.2)
    return 1.0

def slow(answer, row):
    time.sleep(0.3)
    return 1.0

def endless(answer, row):
    """Keeps Python's lock for longer than anybody lives, where the answer is a long one."""
    return float(bool(re.fullmatch(r"(a+)+b", answer)))

async def blocking(answer, row):
    """Lets no other `async` one on."""
    time.sleep(3600)

def dying(answer, row):
    os.kill(os.getpid(), signal.SIGSEGV)

def leaving(answer, row):
    os._exit(3)

def parental(answer, row):
    """Leaves a process behind, and waits for it."""
    child = subprocess.Popen(["sleep", "3600"])
    with open(row["file"], "w") as file:
        file.write(str(child.pid))
    child.wait()

def told(answer, row):
    return float("STACKRL_TOKEN" in os.environ) + (sys.stdin.read() != "")

def threads(answer, row):
    return threading.active_count()
'''
PATHS = [f"own_functions.py:{name}" for name in ("length", "soon", "slow", "endless", "blocking", "dying")]
PATHS += [f"own_functions.py:{name}" for name in ("leaving", "parental", "told", "threads")]
LONG = "a" * 60


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Functions with a limit; what they leave is ended with the test."""
    (tmp_path / "own_functions.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "GRACE", 2.0)
    monkeypatch.setattr(module, "PROCESSES", 1)
    yield lambda limit=30.0: functions(PATHS, "", limit)
    module._functions.cache_clear()
    gc.collect()


def call(it, name, answer="", row=None):
    return asyncio.wait_for(it.call(f"own_functions.py:{name}", answer, row or {}, name), timeout=120)


def gone(pid: int) -> bool:
    """Within a while; a zombie is."""
    for _ in range(400):
        if state_of(pid) in ("", "Z"):
            return True
        time.sleep(0.05)
    return False


async def test_many_calls_run_at_once_in_few_processes(pool):
    it = pool()
    assert await call(it, "length", "abc") == 3.0
    begun = time.monotonic()
    values = await asyncio.gather(*(call(it, name) for name in ("soon", "slow") * 32))
    assert values == [1.0] * 64 and time.monotonic() - begun < 12, "one after the other they take 16 s"
    assert len(it._processes) == 1 and await call(it, "told") == 0.0


@pytest.mark.slow
async def test_a_function_that_keeps_the_lock_stops_nobody_else(pool):
    """Neither who asks, nor the calls that were in the same process."""
    it = pool(limit=4.0)
    await call(it, "length")
    lag, last = 0.0, time.monotonic()

    async def beat():
        nonlocal lag, last
        while True:
            await asyncio.sleep(0.02)
            now = time.monotonic()
            lag, last = max(lag, now - last), now

    beating = asyncio.create_task(beat())
    others = [call(it, "soon"), call(it, "endless", "aab"), call(it, "length", "four")]
    endless, *rest = await asyncio.gather(call(it, "endless", LONG), *others, return_exceptions=True)
    beating.cancel()
    assert type(endless) is TimeoutError and str(endless) == "endless took over 4 s"
    assert rest == [1.0, 1.0, 4.0]
    assert lag < 5, "who asks stood still"
    assert await call(it, "length", "and on") == 6.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("blocking", TimeoutError, "^blocking took over 4 s$"),
        ("dying", FunctionError, r"^dying ended its process \(.*SIGSEGV.*\)$"),
        ("leaving", FunctionError, r"^leaving ended its process \(exit code 3\)$"),
    ],
)
async def test_a_function_that_ends_or_blocks_its_process_fails_alone(pool, name, error, why):
    it = pool(limit=4.0)
    bad, *good = await asyncio.gather(
        call(it, name), *(call(it, "soon") for _ in range(5)), return_exceptions=True
    )
    assert good == [1.0] * 5
    with pytest.raises(error, match=why):
        raise bad


async def test_what_a_function_that_is_late_has_started_is_ended(pool, tmp_path):
    it = pool(limit=4.0)
    with pytest.raises(TimeoutError):
        await call(it, "parental", row={"file": str(tmp_path / "pid")})
    assert await asyncio.to_thread(gone, int((tmp_path / "pid").read_text()))
    assert await call(it, "threads") <= 4, "a new process, without the thread that still waits"


async def test_a_cancelled_call_is_nobodys_trouble(pool):
    it = pool()
    await call(it, "length")
    waiting = asyncio.create_task(call(it, "slow"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert await call(it, "slow") == 1.0


def test_processes_end_with_their_pool(pool):
    it = pool()
    asyncio.run(call(it, "length"))
    pids = [process._process.pid for process in it._processes]
    module._functions.cache_clear()
    del it
    gc.collect()
    assert pids and all(gone(pid) for pid in pids)


def test_processes_end_with_who_asks_also_where_they_are_blocked(pool, tmp_path):
    """It is killed, and has no time for anything."""
    program = f"""
import asyncio
from stackrl.runtime.environments.functions import functions
it = functions({PATHS!r}, "", 600.0)
async def main():
    await it.call("own_functions.py:length", "", {{}}, "it")
    print(it._processes[0]._process.pid, flush=True)
    await it.call("own_functions.py:endless", {LONG!r}, {{}}, "it")
asyncio.run(main())
"""
    asking = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    pid = int(asking.stdout.readline())
    time.sleep(0.5)
    asking.kill()
    asking.wait()
    asking.stdout.close()
    assert gone(pid)


async def test_functions_that_cannot_be_had_there_say_why(pool, tmp_path):
    it = pool()
    (tmp_path / "own_functions.py").write_text("import no_such_package\n")
    for _ in range(2):
        with pytest.raises(
            FunctionError, match=r"^length cannot be called: .*ModuleNotFoundError: No module"
        ):
            await call(it, "length")

"""The adapter of a worker whose rollouts go wrong as its settings say. Standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Refused(Exception):
    """As an environment's own adapter refuses."""

    refusal = {"refused": "it does not want to", "mend": "ask another one", "key": "args"}


def load(settings: dict[str, Any]) -> Faults:
    match settings.get("start"):
        case "refuse":
            raise Refused
        case "raise":
            raise KeyError("no such data")
        case "raise once" if not (begun := Path(settings["begun"])).exists():
            begun.touch()
            raise KeyError("no such data yet")
        case "die":
            print("so far so good", flush=True)
            os._exit(7)
        case "hang":
            time.sleep(600)
    return Faults(settings.get("does", {}))


class Faults:
    """``does``: by the number of the task, what happens instead of a question and its judgement."""

    def __init__(self, does: dict[str, str]) -> None:
        self._does = does
        self.about = {
            "token": os.environ.get("STACKRL_TOKEN", ""),
            "stackrl": [name for name in sys.modules if name.startswith("stackrl") and "." in name],
        }

    async def rollout(self, number: int, policy: Any) -> dict[str, Any]:
        does = self._does.get(str(number), "ask")
        match does:
            case "die":
                print("this is the end", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            case "block":
                time.sleep(600)  # noqa: ASYNC251 (what it must not do)
            case "hold on":
                await _hold_on()
            case "give up":
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(policy.ask(messages=[{"role": "user", "content": "slow"}]), 0.2)
                return {"rewards": {"score": policy.seconds}, "metrics": {}}
            case "tidy":
                await _tidy(Path(os.environ["STACKRL_TEST_HELD"]))
            case "wait":
                await asyncio.sleep(600)
            case "raise":
                raise KeyError("no such task")
            case "nan":
                return {"rewards": {"score": float("nan")}, "metrics": {}}
            case "text":
                return {"rewards": {"score": "much"}, "metrics": {}}
            case "no json":
                return {"rewards": {"score": object()}, "metrics": {}}
            case "garble":
                os.write(int(sys.argv[1]), b"no message\n")
                await asyncio.sleep(600)
            case "leave":
                child, orphan = _leave()
                return {"rewards": {"score": 0.0}, "metrics": {"child": child, "orphan": orphan}}
        return await _asked(number, policy)


LEFT_OVER = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
print(subprocess.Popen(sleep, start_new_session=True).pid, flush=True)
time.sleep(600)
"""
"""A child that starts a daemon with a session of its own."""


def _leave() -> tuple[int, int]:
    """Start what nobody ends: a child, and a daemon."""
    child = subprocess.Popen([sys.executable, "-c", LEFT_OVER], stdout=subprocess.PIPE)
    return child.pid, int(child.stdout.readline())


async def _asked(number: int, policy: Any) -> dict[str, Any]:
    """Two answers, the second after a message; the reward is the number of letters."""
    first = await policy.ask(messages=[{"role": "user", "content": f"task {number}"}])
    try:
        second = await policy.ask(messages=[{"role": "user", "content": "more"}])
    except Exception as error:
        second = {"text": "", "closed": False, "error": type(error).__name__}
    letters = len(first["text"] + second["text"])
    metrics = {"closed": first["closed"], "full": second.get("error") == "NoRoom"}
    return {"rewards": {"score": letters}, "metrics": metrics}


async def _tidy(held: Path) -> None:
    """Hold a file, and let it go some time after the end."""
    held.touch()  # noqa: ASYNC240
    try:
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0.2)
        held.unlink()  # noqa: ASYNC240


async def _hold_on() -> None:
    while True:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            continue

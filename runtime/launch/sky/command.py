"""SkyPilot's own command: where it is and how it is asked. Its Python lives in another environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stackrl.runtime.launch.front import ROOT
from stackrl.runtime.run import TOKEN_VARIABLE, RunError, new_token
from stackrl.schemas.split import Task

ASK_LIMIT = 90.0
"""Seconds for a question to SkyPilot: its server may have to start, and asks the cloud itself."""
RESTART_LIMIT = 300.0
"""Seconds for a question whose answer needs the controller of managed jobs to be started again."""
END_LIMIT = 900.0
"""Seconds until machines are given back."""
LAUNCH_LIMIT = 25 * 3600.0
"""Seconds until machines are there: SkyPilot itself waits a day where a cluster's queue is named."""


class NoAnswer(Exception):
    """SkyPilot could not be asked; its own words."""


def sky() -> str:
    """The path of the `sky` command. Raises RunError where there is none."""
    beside = ROOT / ".venv-sky" / "bin" / "sky"
    found = shutil.which("sky") or (str(beside) if beside.exists() else None)
    if found is None:
        raise RunError(
            "there is no `sky` command here, which gets machines from clouds; type `make sky`, or install "
            "SkyPilot in an environment of its own: `uv tool install 'skypilot[aws]>=0.14,<0.15'` (or [gcp], "
            "[kubernetes] …), then `sky check`"
        )
    return found


def submit(arguments: Sequence[str], secrets: Mapping[str, str]) -> int:
    """Let SkyPilot get machines, its talk in the terminal (stderr); its exit code. ``secrets`` travel in the
    environment: a command line can be read by everybody on this machine."""
    started = subprocess.Popen(
        [sky(), *arguments], stdin=subprocess.DEVNULL, stdout=2, env={**os.environ, **secrets}
    )
    return _wait(started, LAUNCH_LIMIT)


def show(arguments: Sequence[str]) -> int:
    """Let SkyPilot write to this terminal for as long as the user likes; its exit code."""
    return _wait(subprocess.Popen([sky(), *arguments], stdin=subprocess.DEVNULL), None)


def show_program(command: Sequence[str]) -> int:
    """Give this terminal to a program of another machine; its exit code."""
    return _wait(subprocess.Popen(command), None)


def ask(arguments: Sequence[str], limit: float = ASK_LIMIT) -> list[dict[str, Any]]:
    """What SkyPilot answers with `-o json`, within ``limit`` seconds. Raises NoAnswer."""
    text = do([*arguments, "-o", "json"], limit)
    start = text.find("[")
    try:
        found, _ = json.JSONDecoder().raw_decode(text[max(start, 0) :])
    except ValueError:
        raise NoAnswer(last_words(text) or "sky answers nothing") from None
    return found


def do(arguments: Sequence[str], limit: float) -> str:
    """Let SkyPilot do something; what it says. Raises NoAnswer where it fails, or takes too long."""
    return quietly([sky(), *arguments], limit)


def quietly(command: Sequence[str], limit: float, text: str | None = None) -> str:
    """The output of a command that reads ``text``. Raises NoAnswer."""
    try:
        done = subprocess.run(
            command, input=text or "", capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"`{Path(command[0]).name}` did not answer within {limit:.0f} s") from None
    except OSError as error:
        raise NoAnswer(f"{command[0]}: {error.strerror}") from None
    if done.returncode:
        raise NoAnswer(last_words(done.stderr) or last_words(done.stdout) or f"exit code {done.returncode}")
    return done.stdout


def secrets_of(task: Task, environment: Mapping[str, str]) -> dict[str, str]:
    """The values of the task's `secrets` and of those `envs` that say null, from the environment.

    The run's token is made where nobody gives one. Raises RunError for what is not there.
    """
    secrets, envs = task.get("secrets") or {}, task.get("envs") or {}
    wanted = [name for name in secrets if isinstance(secrets, Mapping) and secrets[name] is None]
    wanted += [name for name in envs if envs[name] is None]
    found = {name: environment[name] for name in wanted if name in environment}
    if TOKEN_VARIABLE in wanted:
        found[TOKEN_VARIABLE] = new_token()
    if missing := [name for name in wanted if name not in found]:
        words = "; ".join(f"export {name}=…" for name in missing)
        raise RunError(
            f"the stack's secrets take their values from the environment, where there is no "
            f"{' and no '.join(missing)}; type `{words}`, or remove what the run does not need"
        )
    return found


def _wait(started: subprocess.Popen[bytes], limit: float | None) -> int:
    """Ctrl-C reaches the program itself, which says what goes on without it."""
    try:
        return started.wait(limit)
    except subprocess.TimeoutExpired:
        started.terminate()
        raise RunError(f"SkyPilot got no machines within {LAUNCH_LIMIT / 3600:.0f} h") from None
    except KeyboardInterrupt:
        try:
            started.wait(10.0)
        except subprocess.TimeoutExpired:
            started.kill()
        raise


def last_words(text: str) -> str:
    """The last line that says something: where `sky` puts the reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""

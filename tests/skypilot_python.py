"""SkyPilot itself, for tests: programs in its own environment, without a network and without an account."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import stacks

BIN = stacks.ROOT / ".venv-sky" / "bin"
SECRETS = ("STACKRL_TOKEN", "HF_TOKEN", "WANDB_API_KEY")

HEAD = f"""\
import json, sys

def refuse(event, arguments):
    address = arguments[1] if event == "socket.connect" else ""
    if isinstance(address, tuple) and not address[0].startswith("127."):
        raise OSError(f"no network here: {{address}}")

sys.addaudithook(refuse)
from sky.data import storage
from sky.utils import dag_utils

storage.Storage.add_store = lambda *bucket, **options: None  # whether it is there is asked of the cloud

def dag_of(path):
    return dag_utils.load_dag_from_yaml(path, None, [(name, "x") for name in {SECRETS!r}])
"""
"""What every program begins with. It defines dag_of(path), which reads a task as `sky launch` does."""


def needed() -> None:
    """Skip the test where SkyPilot is not installed, or fail it where that is a fault."""
    if not (BIN / "python").exists():
        if os.environ.get("STACKRL_TESTS_NEED_SKY"):
            pytest.fail(".venv-sky is not there; `make sky` makes it")
        pytest.skip(".venv-sky is not there; `make sky` makes it")


def answer(program: str, arguments: Sequence[object], home: Path) -> Any:
    """Run ``program`` after HEAD with a home folder of its own; the JSON in the last line that it prints."""
    needed()
    done = subprocess.run(
        [BIN / "python", "-c", HEAD + program, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=stacks.ROOT,
        env=environment(home),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def environment(home: Path, *folders: Path) -> dict[str, str]:
    """Without what this machine knows of clouds. ``folders`` come first on the PATH."""
    path = os.pathsep.join([*map(str, folders), os.environ["PATH"]])
    return {"HOME": str(home), "PATH": path, "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}

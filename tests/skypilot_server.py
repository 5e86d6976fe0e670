"""SkyPilot's own server for tests, with a small catalog of one cloud: it chooses machines and rents none."""

from __future__ import annotations

import contextlib
import csv
import os
import signal
import sqlite3
import stat
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import skypilot_python

from stackrl.runtime.launch.ports import free_ports

CLOUD = "lambda"
"""It needs no package of its own and is asked nothing in a dry run."""
MACHINES = (
    ("H100", 8, 24.0), ("H100", 4, 12.0), ("H100", 2, 6.0), ("H200", 8, 30.0), ("B200", 8, 45.0),
    ("A100-80GB", 2, 4.0), ("RTX4090", 1, 1.0), ("", 0, 0.3),
)  # fmt: skip
"""GPU, count, dollars per hour. Made up."""
START_LIMIT = 240.0

ENABLE = f"""
from sky import check, global_user_state, skypilot_config
from sky.clouds.cloud import CloudCapability

workspace = skypilot_config.get_active_workspace()
for capability in CloudCapability:
    global_user_state.set_enabled_clouds([{CLOUD!r}], capability, workspace)
# else SkyPilot asks all clouds anew, and finds none
global_user_state.set_allowed_clouds(check._get_workspace_allowed_clouds(workspace), workspace)
"""
"""What `sky check` would note of an account."""


def write_catalog(home: Path) -> None:
    """The catalog that SkyPilot would fetch."""
    header = "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,Price,Region,GpuInfo,SpotPrice"
    rows = []
    for gpu, count, price in MACHINES:
        told = {"Gpus": [{"Name": gpu, "Count": float(count), "MemoryInfo": {"SizeInMiB": 81920}}]}
        name = f"gpu_{count}x_{gpu.lower()}" if gpu else "cpu_16x"
        sizes = (26 * count, 225 * count) if gpu else (16, 64)
        rows.append([name, gpu, count or "", *sizes, price, "us-west-3", told if gpu else "", ""])
    folder = home / ".sky" / "catalogs" / "v8"
    names = list(dict.fromkeys(gpu for gpu, *_ in MACHINES if gpu))
    _write(folder / CLOUD / "vms.csv", header.split(","), rows)
    _write(
        folder / "common" / "accelerators.csv",
        ["AcceleratorName", "Clouds"],
        [[name, "['Lambda']"] for name in names],
    )
    _write(
        folder / "common" / "metadata.csv",
        ["GPU", "MemoryGB", "Manufacturer"],
        [[name, 80, "NVIDIA"] for name in names],
    )


def programs(folder: Path) -> Path:
    """A folder for the PATH with an `rsync` that does nothing: SkyPilot looks whether there is one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rsync").write_text("#!/bin/sh\nexit 0\n")
    (folder / "rsync").chmod(stat.S_IRWXU)
    return folder


@contextlib.contextmanager
def server(home: Path) -> Iterator[dict[str, str]]:
    """The environment in which `sky` asks a server of its own, with the cloud enabled. A minute to start."""
    skypilot_python.needed()
    write_catalog(home)
    (port,) = free_ports(1)
    environment = skypilot_python.environment(home, programs(home / "programs"), skypilot_python.BIN)
    environment["SKYPILOT_API_SERVER_LOCAL_PORT"] = str(port)
    with open(home / "server.log", "wb") as log:
        started = subprocess.Popen(
            [skypilot_python.BIN / "sky", "api", "start", "--foreground"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        _until_ready(port, home)
        skypilot_python.answer(f"{ENABLE}\nprint('null')", [], home)
        yield environment
    finally:
        # told to end, it writes errors for minutes
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait(30)


def _until_ready(port: int, home: Path) -> None:
    """It answers, and has looked for clouds, after which what is enabled stays."""
    ask = build_opener(ProxyHandler({})).open
    deadline = time.monotonic() + START_LIMIT
    while time.monotonic() < deadline:
        with contextlib.suppress(URLError, OSError, sqlite3.Error):
            ask(f"http://127.0.0.1:{port}/api/health", timeout=2).close()
            if _looked_for_clouds(home):
                return
        time.sleep(0.5)
    said = (home / "server.log").read_text(errors="replace").splitlines()[-1:]
    raise TimeoutError(f"SkyPilot's server is not ready after {START_LIMIT:.0f} s: {said}")


def _looked_for_clouds(home: Path) -> bool:
    books = sqlite3.connect(f"file:{home / '.sky' / 'api_server' / 'requests.db'}?mode=ro", uri=True)
    with contextlib.closing(books):
        asked = "select status from requests where request_id = 'skypilot-server-on-boot-check'"
        return [row[0] for row in books.execute(asked)] in (["SUCCEEDED"], ["FAILED"])


def _write(file: Path, header: list[str], rows: list[list[object]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file, "w", newline="") as out:
        csv.writer(out).writerows([header, *rows])

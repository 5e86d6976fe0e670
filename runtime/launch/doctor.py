"""`stackrl doctor`: is this machine ready for a run, and what to do where it is not."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from stackrl.runtime.launch.ports import free_ports
from stackrl.runtime.run import home

_IMPORT_LIMIT = 300.0
_GIB = 1 << 30
_LEAST_MEMORY = 6 * _GIB
_LEAST_DISK = 2 * _GIB
_INSTALL = "install the runtime with `make install` (CPU) or `pip install 'stackrl[gpu]'`"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. Without an ``optional`` one a run works, with something less."""

    name: str
    fine: bool
    found: str
    mend: str = ""
    optional: bool = False


def doctor(output: str) -> int:
    """Print every check; 1 where a run needs something that is missing."""
    checks = [check() for check in _CHECKS]
    if output == "json":
        print(json.dumps([asdict(check) for check in checks], indent=1))
    else:
        for check in checks:
            mark = "ok" if check.fine else "–" if check.optional else "MISSING"
            print(f"{mark:<8} {check.name:<12} {check.found}")
            if not check.fine:
                print(f"{'':<21} {check.mend}")
    ready = all(check.fine or check.optional for check in checks)
    print(
        "ready: try `stackrl launch stacks/reverse-text-cpu.yaml`"
        if ready
        else "not ready: see the lines above",
        file=sys.stderr,
    )
    return 0 if ready else 1


def _python() -> Check:
    version = platform.python_version()
    return Check(
        "python", sys.version_info >= (3, 11), f"{version} at {sys.executable}", "needs Python 3.11 or newer"
    )


def _system() -> Check:
    return Check(
        "system",
        sys.platform == "linux",
        platform.platform(),
        "runs need Linux; the front works elsewhere too",
    )


def _torch() -> Check:
    return _importable(
        "torch", "import torch; print(torch.__version__, 'distributed', torch.distributed.is_available())"
    )


def _vllm() -> Check:
    return _importable("vllm", "import vllm; print(vllm.__version__)")


def _importable(name: str, program: str) -> Check:
    """Import in a process of its own: the front stays free of it, and a crash is only its crash."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=_IMPORT_LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Check(
            name, False, f"`import {name}` took over {_IMPORT_LIMIT:.0f} s", "is the machine overloaded?"
        )
    lines = (result.stdout if result.returncode == 0 else result.stderr).strip().splitlines() or ["no output"]
    return Check(name, result.returncode == 0, lines[-1], _INSTALL)


def _gpus() -> Check:
    mend = "a stack with `accelerators` needs NVIDIA's driver; stacks for CPU run without"
    if (command := shutil.which("nvidia-smi")) is None:
        return Check("gpus", False, "none", mend, optional=True)
    query = [command, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except subprocess.TimeoutExpired:
        return Check("gpus", False, "nvidia-smi hangs", "restart the machine or its driver", optional=True)
    found = "; ".join(result.stdout.strip().splitlines())
    return Check("gpus", result.returncode == 0 and bool(found), found or "none", mend, optional=True)


def _cores() -> Check:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cores", count >= 2, str(count), "a run needs two: one for the trainer, one for the engine")


def _memory() -> Check:
    total = _memory_limit()
    return Check(
        "memory", total >= _LEAST_MEMORY, f"{total / _GIB:.1f} GiB", "a small run on CPU needs about 6 GiB"
    )


def _memory_limit() -> int:
    """Bytes of memory: the machine's, or the control group's limit where that is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdecimal() else total


def _ports() -> Check:
    try:
        free_ports(8)
    except OSError as error:
        return Check("ports", False, str(error), "end what listens on 127.0.0.1")
    return Check("ports", True, "free ones on 127.0.0.1")


def _folder() -> Check:
    mend = "set STACKRL_HOME to a folder that you can write to"
    try:
        home().mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        return Check("runs", False, str(error), mend)
    return Check("runs", os.access(home(), os.W_OK), str(home()), mend)


def _disk() -> Check:
    nearest = next(path for path in (home(), *home().parents) if path.exists())
    free = shutil.disk_usage(nearest).free
    return Check(
        "disk",
        free >= _LEAST_DISK,
        f"{free / _GIB:.0f} GiB free for {home()}",
        "free some, or set STACKRL_HOME",
    )


def _sky() -> Check:
    beside = Path(sys.prefix).with_name(".venv-sky") / "bin" / "sky"
    found = shutil.which("sky") or (str(beside) if beside.exists() else None)
    mend = "only clouds need it: `make sky` installs SkyPilot into .venv-sky"
    return Check("skypilot", found is not None, found or "none", mend, optional=True)


_CHECKS: list[Callable[[], Check]] = [
    _python,
    _system,
    _torch,
    _vllm,
    _gpus,
    _cores,
    _memory,
    _ports,
    _folder,
    _disk,
    _sky,
]

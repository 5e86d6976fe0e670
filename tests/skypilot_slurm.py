"""A real Slurm that SkyPilot reaches as it reaches any: by ssh to a login node, which is this machine.

What a node would fetch from the internet for SkyPilot's runtime it takes from here (uv, a Python). Everything
lies in one folder, the home folders of both sides included, and is ended by pid.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import skypilot_python
import slurm_cluster

import stacks
from stackrl.runtime.launch.ports import free_ports

SSHD, HOSTS, UV = Path("/usr/sbin/sshd"), Path("/etc/hosts"), stacks.ROOT / ".venv" / "bin" / "uv"
START_LIMIT = 240.0

CURL = """\
#!/bin/bash
for word in "$@"; do case $word in *astral.sh/uv/install.sh)
  echo 'mkdir -p "$UV_INSTALL_DIR" && cp {programs}/uv "$UV_INSTALL_DIR/uv"'; exit 0;; esac; done
exec /usr/bin/curl "$@"
"""
PROGRAM_UV = """\
#!/bin/bash
words=(); for word in "$@"; do [ "$word" = 3.10 ] && word={python}; words+=("$word"); done
export UV_PYTHON_DOWNLOADS=never
exec {uv} "${{words[@]}}"
"""
SSH = """\
#!/bin/bash
cat {home}/.sky/generated/ssh/* 2>/dev/null | sed 's#~/#{home}/#' > {home}/ssh_config
exec /usr/bin/ssh -F {home}/ssh_config "$@"
"""
"""What SkyPilot writes for ssh lies in a home that ssh does not know: it takes that of the account."""
SSHD_CONFIGURATION = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/user.pub
PasswordAuthentication no
UsePAM no
StrictModes no
PermitRootLogin prohibit-password
MaxStartups 100
MaxSessions 100
Subsystem sftp internal-sftp
SetEnv SLURM_CONF={slurm} SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
"""


def lacking() -> str:
    """Why SkyPilot cannot be put on a Slurm here; empty where it can."""
    if why := slurm_cluster.lacking():
        return why
    if not SSHD.exists() or shutil.which("rsync") is None:
        return "sshd or rsync is not installed (apt-get install openssh-server rsync)"
    hostlist = [skypilot_python.BIN / "python", "-c", "import hostlist"]
    if not hostlist[0].exists() or subprocess.run(hostlist, capture_output=True).returncode:
        return ".venv-sky has no skypilot[slurm] (.venv-sky/bin/pip install 'skypilot[slurm]')"
    return ""


@contextlib.contextmanager
def skypilot(folder: Path) -> Iterator[tuple[slurm_cluster.Cluster, dict[str, str]]]:
    """A Slurm called `tower`, and the environment in which `sky` reaches it. Two minutes to start."""
    client, cluster, programs = folder / "client", folder / "cluster", folder / "programs"
    for made in (client / ".slurm", cluster, programs):
        made.mkdir(parents=True)
    _write_programs(programs, cluster)
    (client / "ssh").write_text(SSH.format(home=client))
    (client / "ssh").chmod(stat.S_IRWXU)
    _write_catalog(client / ".sky" / "catalogs" / "v8" / "common")
    with (
        _named(slurm_cluster.CPU_NODES),
        slurm_cluster.cluster(apart=False, home=cluster) as tower,
        _login(folder, tower) as port,
    ):
        (client / ".slurm" / "config").write_text(
            f"Host {slurm_cluster.NAME}\n    HostName 127.0.0.1\n    Port {port}\n    User root\n"
            f"    IdentityFile {folder}/user\n    IdentitiesOnly yes\n"
        )
        environment = skypilot_python.environment(client, client, skypilot_python.BIN)
        with _server(client, environment):
            subprocess.run(
                [skypilot_python.BIN / "sky", "check", "slurm"],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=True,
                timeout=START_LIMIT,
            )
            yield tower, environment


@contextlib.contextmanager
def _named(nodes: Sequence[str]) -> Iterator[None]:
    """SkyPilot looks up the addresses of nodes by name, as on any cluster."""
    line = f"127.0.0.1 {' '.join(nodes)} # a test of stackrl\n"
    with open(HOSTS, "a") as hosts:
        hosts.write(line)
    try:
        yield
    finally:
        HOSTS.write_text(HOSTS.read_text().replace(line, ""))


@contextlib.contextmanager
def _login(folder: Path, tower: slurm_cluster.Cluster) -> Iterator[int]:
    """The port of a login node."""
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (port,) = free_ports(1)
    Path("/run/sshd").mkdir(exist_ok=True)
    configuration = folder / "sshd_config"
    configuration.write_text(SSHD_CONFIGURATION.format(port=port, folder=folder, slurm=tower.configuration))
    daemon = subprocess.Popen([*tower.at_home, SSHD, "-D", "-f", configuration, "-E", folder / "sshd.log"])
    try:
        yield port
    finally:
        daemon.terminate()
        daemon.wait(30)


@contextlib.contextmanager
def _server(client: Path, environment: dict[str, str]) -> Iterator[None]:
    """SkyPilot's own, which is ended by force: told to end, it writes errors for minutes."""
    (port,) = free_ports(1)
    environment["SKYPILOT_API_SERVER_LOCAL_PORT"] = str(port)
    with open(client / "server.log", "wb") as log:
        started = subprocess.Popen(
            [skypilot_python.BIN / "sky", "api", "start", "--foreground"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    ask, deadline = build_opener(ProxyHandler({})).open, time.monotonic() + START_LIMIT
    try:
        while True:
            with contextlib.suppress(URLError, OSError):
                ask(f"http://127.0.0.1:{port}/api/health", timeout=2).close()
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"SkyPilot's server does not answer after {START_LIMIT:.0f} s")
            time.sleep(0.5)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.wait(30)


def _write_programs(programs: Path, cluster: Path) -> None:
    """First on the PATH of who logs in."""
    (programs / "curl").write_text(CURL.format(programs=programs))
    (programs / "uv").write_text(PROGRAM_UV.format(python=sys._base_executable, uv=UV))
    for program in programs.iterdir():
        program.chmod(stat.S_IRWXU)
    (cluster / ".profile").write_text(f"export PATH={programs}:$PATH\n")


def _write_catalog(folder: Path) -> None:
    """SkyPilot would fetch these to know the GPUs."""
    folder.mkdir(parents=True)
    (folder / "accelerators.csv").write_text("AcceleratorName,Clouds\nH100,\"['Slurm']\"\n")
    (folder / "metadata.csv").write_text("GPU,MemoryGB,Manufacturer\nH100,80,NVIDIA\n")

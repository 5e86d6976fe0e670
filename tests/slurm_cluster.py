"""A real Slurm on this machine: nodes without GPUs, nodes with GPUs that are none, and a queue of its own.

Every node is a slurmd on a loopback address of its own. All files and sockets lie in one folder; whatever was
started is ended by its pid.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from stackrl.runtime.launch.ports import free_ports
from stackrl.runtime.processes import die_with

CPU_NODES, GPU_NODES, GPUS = ("cpu1", "cpu2"), ("gpu1", "gpu2", "big1"), 4
GPU_TYPES = {"gpu1": "h100", "gpu2": "h100", "big1": "b200"}
NAME = "tower"
START_LIMIT = 40.0

CONFIGURATION = """\
ClusterName={name}
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PriorityType=priority/basic
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
MinJobAge=3600
KillWait=10
OverTimeLimit=0
SlurmctldTimeout=60
SlurmdTimeout=60
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=DEFAULT CPUs=8 Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory=16000
{nodes}
PartitionName=DEFAULT MaxTime=INFINITE DefaultTime=01:00:00 DefMemPerCPU=100 State=UP
PartitionName=cpu Nodes={cpu_nodes} Default=YES PriorityTier=10 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes={cpu_nodes} PriorityTier=100 PreemptMode=OFF
PartitionName=gpu Nodes={gpu_nodes} PriorityTier=10
"""


def lacking() -> str:
    """Why no cluster can be started here; empty where one can."""
    programs = ("munged", "slurmctld", "slurmd", "sbatch")
    missing = [program for program in programs if _found(program) is None]
    if missing:
        return f"{', '.join(missing)} is not installed (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "only root can start Slurm's daemons"


class Cluster:
    """A running Slurm. `environment` makes its commands and what they start find it.

    ``apart``: each node has an address of its own, else all have that of the host's name. ``home``: that of
    the account, for all that runs there.
    """

    def __init__(self, folder: Path, apart: bool = True, home: Path | None = None) -> None:
        self.folder, self._apart = folder, apart
        self.at_home: list[str] = [] if home is None else _at_home(home, folder)
        """What stands before a command so that it finds that home."""
        self.configuration = folder / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.configuration)}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Write the configuration and start all daemons. Raises TimeoutError."""
        port, *ports = free_ports(1 + len(CPU_NODES) + len(GPU_NODES), "0.0.0.0")
        nodes = dict(zip((*CPU_NODES, *GPU_NODES), ports, strict=True))
        self.configuration.write_text(
            CONFIGURATION.format(
                name=NAME,
                port=port,
                folder=self.folder,
                nodes="\n".join(
                    _node(name, 10 + number if self._apart else 0, nodes[name])
                    for number, name in enumerate(nodes)
                ),
                cpu_nodes=",".join(CPU_NODES),
                gpu_nodes=",".join(GPU_NODES),
            )
        )
        self._write_gpus()
        (self.folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        for name in ("state", *(f"spool.{node}" for node in nodes)):
            (self.folder / name).mkdir()
        self._start_munge()
        self._start("slurmctld", "-D", "-f", str(self.configuration))
        for node in nodes:
            self._start("slurmd", "-D", "-N", node, "-f", str(self.configuration))
        wait_until(lambda: self._ready(len(nodes)), "all nodes", START_LIMIT)

    def stop(self) -> None:
        """Cancel all jobs and end the daemons."""
        if self._daemons:
            with contextlib.suppress(subprocess.SubprocessError, TimeoutError):
                self.cancel_all()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(10)
        self._daemons.clear()

    def cancel_all(self) -> None:
        """Raises TimeoutError where a job does not go."""
        if jobs := self.command("squeue", "-h", "-o", "%A").split():
            self.command("scancel", *jobs)
            wait_until(lambda: not self.command("squeue", "-h"), "the end of all jobs", 60)

    def command(self, *words: str) -> str:
        """What one of Slurm's commands prints. Raises CalledProcessError and TimeoutExpired."""
        done = subprocess.run(
            words, env=os.environ | self.environment, capture_output=True, text=True, timeout=30, check=True
        )
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED …"""
        return self.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")

    def logs(self) -> str:
        """The last lines of every daemon, for a failure's message."""
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    def _write_gpus(self) -> None:
        """Clones of /dev/null: Slurm wants device files, and nobody computes on these."""
        for number in range(GPUS):
            os.mknod(self.folder / f"gpu{number}", 0o20666, os.makedev(1, 3))
        lines = [
            f"NodeName={node} Name=gpu Type={GPU_TYPES[node]} File={self.folder}/gpu[0-{GPUS - 1}]"
            for node in GPU_NODES
        ]
        (self.folder / "gres.conf").write_text("\n".join(lines) + "\n")

    def _start_munge(self) -> None:
        key, place = self.folder / "munge.key", self.folder / "munge.socket"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"key-file": key, "socket": place, "pid-file": self.folder / "munged.pid"}
        files |= {"log-file": self.folder / "munged.log", "seed-file": self.folder / "munged.seed"}
        options = [f"--{name}={file}" for name, file in files.items()]
        self._start("munged", "--foreground", "--force", *options)
        wait_until(place.exists, "munge", START_LIMIT)

    def _start(self, program: str, *arguments: str) -> None:
        with open(self.folder / f"{program}.started.log", "ab") as log:
            command = [*self.at_home, _found(program) or program, *arguments]
            environment = os.environ | self.environment
            daemon = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM),  # tests may be killed
            )
        self._daemons.append(daemon)

    def _ready(self, count: int) -> bool:
        for daemon in self._daemons:
            assert daemon.poll() is None, f"{daemon.args} ended\n{self.logs()}"
        try:
            return len(self.command("sinfo", "-hN", "-t", "idle", "-o", "%N").split()) >= count
        except subprocess.SubprocessError:
            return False


@contextlib.contextmanager
def cluster(apart: bool = True, home: Path | None = None) -> Iterator[Cluster]:
    """A cluster for as long as the context lasts."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # a short path: sockets lie in it
    folder.chmod(0o755)
    made = Cluster(folder, apart, home)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


def wait_until(condition: Callable[[], object], what: str, limit: float) -> None:
    """Raises TimeoutError."""
    deadline = time.monotonic() + limit
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit:.0f} s for {what} in vain")
        time.sleep(0.1)


def _at_home(home: Path, folder: Path) -> list[str]:
    """A view of the files in which the account of root has another home."""
    lines = Path("/etc/passwd").read_text().splitlines()
    accounts = [line.split(":") for line in lines]
    moved = [[*a[:5], str(home), *a[6:]] if a[0] == "root" else a for a in accounts]
    own = folder / "passwd"
    own.write_text("\n".join(map(":".join, moved)) + "\n")
    return ["unshare", "--mount", "bash", "-c", f'mount --bind {own} /etc/passwd && exec "$0" "$@"']


def _node(name: str, number: int, port: int) -> str:
    gpus = f" Gres=gpu:{GPU_TYPES[name]}:{GPUS}" if name in GPU_TYPES else ""
    return f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.{1 + number} Port={port}{gpus}"


def _found(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")

"""Linux namespaces through bubblewrap: no network, a read-only system, no other processes, a user of its own.

Every command begins in namespaces of its own, over the sandbox's folders, and takes about 25 ms. For root the
command runs as a user id that nobody else has, with no capability; for others it runs in a user namespace.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from stackrl.runtime.environments.sandboxes import cgroups, folders, processes
from stackrl.runtime.environments.sandboxes.base import KEPT_OUTPUT, Machine, Result, Sandbox, SandboxError
from stackrl.runtime.environments.sandboxes.cgroups import PREFIX, Cgroup, Cgroups, entering
from stackrl.runtime.environments.sandboxes.folders import FOLDER, check_room, remove, takes_more_than
from stackrl.runtime.environments.sandboxes.settings import Settings

FIRST_USER, USERS = 0x40000000, 0x20000000
"""User ids of sandboxes of root; nothing else on a machine has ids so high."""
SHARED_MEMORY = 64 << 20
"""Bytes of /dev/shm."""
NAMESPACES = ("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")
_TOOLS = {"bwrap": "bubblewrap", "prlimit": "util-linux", "setpriv": "util-linux", "git": "git"}
"""Programs that are needed, and the Debian packages that have them."""
_PROBE_SECONDS = 30.0

log = logging.getLogger(__name__)


class Bubblewraps(Machine):
    """What this machine has for such sandboxes; found once, by ``check``."""

    def __init__(self, settings: Settings, root: bool | None = None) -> None:
        self.settings = settings
        self.root = os.geteuid() == 0 if root is None else root
        self.cgroups: Cgroups | None = None
        self.commands = asyncio.Semaphore(settings.at_once)
        self.seen = _seen(settings.read)

    async def check(self) -> None:
        """Try a sandbox. Raises SandboxError with what to install or allow."""
        for tool, package in _TOOLS.items():
            if not shutil.which(tool):
                raise SandboxError(
                    f"sandbox bubblewrap: {tool} is not installed here; type `apt-get install {package}`, "
                    "or use sandbox: {type: docker}"
                )
        for folder in self.settings.read:
            _check_folder(folder, of_others=self.root)
        await asyncio.to_thread(folders.remove_stale)
        await asyncio.to_thread(cgroups.remove_stale)
        self.cgroups = await asyncio.to_thread(Cgroups.find)
        if self.cgroups is None:
            log.warning(
                "no control groups can be made here: sandboxes bound the memory of each process, not of all "
                "together; run as root, or in a cgroup that is delegated to this user"
            )
        try:
            async with Bubblewrap(self) as sandbox:
                await sandbox.run(["true"], seconds=_PROBE_SECONDS)
        except SandboxError as error:
            raise SandboxError(
                f"sandbox bubblewrap: it does not work here ({error}); containers often forbid namespaces: "
                "start this one with `--security-opt seccomp=unconfined --security-opt apparmor=unconfined`, "
                "or use sandbox: {type: docker}"
            ) from error

    def sandbox(self, image: str = "") -> Bubblewrap:
        return Bubblewrap(self)


class Bubblewrap(Sandbox):
    """A folder of the machine, and commands that see it as /box."""

    home = "/box"

    def __init__(self, machine: Bubblewraps) -> None:
        self._machine, self._settings = machine, machine.settings
        self._folder: Path | None = None
        self._group: Cgroup | None = None
        self._user = FIRST_USER + secrets.randbelow(USERS)

    async def start(self) -> None:
        try:
            self._make()
        except OSError as error:
            raise SandboxError(f"sandbox bubblewrap: {error}") from error

    def _make(self) -> None:
        self._folder = folder = Path(tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-"))
        for name in ("box", "tmp", "etc"):
            (folder / name).mkdir()
            # bwrap enters without the rights of root, whatever umask this process has
            (folder / name).chmod(0o755)
            if self._machine.root and name != "etc":
                os.chown(folder / name, self._user, self._user)
        user = f"box:x:{self._user}"
        files = {
            "passwd": f"root:x:0:0::/:/bin/sh\n{user}:{self._user}::/box:/bin/sh\n",
            "group": f"root:x:0:\n{user}:\n",
        }
        for name, text in files.items():
            (folder / "etc" / name).write_text(text)
            (folder / "etc" / name).chmod(0o644)
        if groups := self._machine.cgroups:
            name = f"{PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
            self._group = groups.make(name, self._settings.memory, self._settings.processes)

    async def run(
        self,
        command: Sequence[str],
        *,
        seconds: float | None = None,
        stdin: bytes = b"",
        folder: str | None = None,
        keep: int = KEPT_OUTPUT,
    ) -> Result:
        if (own := self._folder) is None:
            raise SandboxError("the sandbox is not running")
        limit = seconds or self._settings.timeout
        group, settings = self._group, self._settings
        async with self._machine.commands:
            killed = group.out_of_memory() if group else 0
            result = await processes.run_inside(
                [*entering(group), *self._inside(folder or self.home), *self._limits(limit)],
                command,
                seconds=limit,
                keep=keep,
                stdin=stdin,
                env={"PATH": os.environ.get("PATH", os.defpath)},  # of the rest a program inside might see
                end=group.kill if group else _nothing,
                watch=lambda: takes_more_than(own, settings.disk, settings.files),
            )
            killed = (group.out_of_memory() if group else 0) - killed
        if result.code:
            check_room(own)
        return Result(**{**vars(result), "out_of_memory": killed > 0})

    async def stop(self) -> None:
        group, folder = self._group, self._folder
        self._group = self._folder = None
        if group is not None:
            await asyncio.to_thread(group.remove)
        if folder is not None:
            await asyncio.to_thread(remove, folder)

    def _inside(self, folder: str) -> list[str]:
        """bwrap up to the command, which begins in ``folder``."""
        command = ["bwrap", *NAMESPACES, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        command += [*self._folders(), "--chdir", folder, "--clearenv"]
        variables = {"PATH": _path(), "HOME": self.home, "TMPDIR": "/tmp", "LANG": "C.UTF-8"}
        for name, value in variables.items():
            command += ["--setenv", name, value]
        user = str(self._user)
        if not self._machine.root:
            return [*command, "--unshare-user", "--uid", user, "--gid", user, "--"]
        # what changes the user needs these, and gives them up with it
        for capability in ("CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP"):
            command += ["--cap-add", capability]
        drop = ["--clear-groups", "--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
        return [*command, "--", "setpriv", "--reuid", user, "--regid", user, *drop, "--"]

    def _folders(self) -> list[str]:
        """The read-only system and, the only ones to write in, the home, /tmp and /dev/shm."""
        own = self._folder
        options = ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev"]
        for name in _linked():
            options += ["--symlink", f"usr/{name}", f"/{name}"]
        options += ["--perms", "1777", "--size", str(SHARED_MEMORY), "--tmpfs", "/dev/shm"]
        options += ["--bind", str(own / "box"), self.home, "--bind", str(own / "tmp"), "/tmp"]
        options += ["--perms", "0755", "--dir", "/etc"]
        for name in ("passwd", "group"):
            options += ["--ro-bind", str(own / "etc" / name), f"/etc/{name}"]
        return [*options, *self._machine.seen, "--remount-ro", "/dev", "--remount-ro", "/"]

    def _limits(self, seconds: float) -> list[str]:
        """What bounds each process of a command that stands behind it."""
        settings = self._settings
        limits = [f"--nproc={settings.processes}", f"--fsize={settings.file_size}", "--core=0"]
        limits.append(f"--cpu={int(seconds) + 1}")
        if self._group is None:
            limits.append(f"--as={settings.memory}")
        return ["prlimit", *limits, "--"]


def _check_folder(folder: str, *, of_others: bool) -> None:
    """Raises SandboxError where programs inside could not read it."""
    if not os.path.isdir(folder):
        raise SandboxError(f"sandbox.read: {folder} is no folder on this machine")
    if of_others and os.stat(folder).st_mode & 0o005 != 0o005:
        raise SandboxError(
            f"sandbox.read: sandboxes run as another user, who may not read {folder}; "
            f"type `chmod o+rx {folder}`"
        )


def _nothing() -> None:
    """Nothing is left to end: all processes end with the first of their namespace."""


def _linked() -> list[str]:
    """Names at the root that are links into /usr."""
    return [name for name in ("bin", "sbin", "lib", "lib32", "lib64") if Path("/", name).is_symlink()]


def _path() -> str:
    return f"{sys.base_prefix}/bin:/usr/local/bin:/usr/bin:/bin"


def _seen(read: Sequence[str]) -> list[str]:
    """Options that bring what programs need of the machine beside /usr, and folders that the stack names."""
    options: list[str] = []
    made: set[str] = {"/", "/usr"}
    files = ["/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime"]
    unlinked = [f"/{name}" for name in ("bin", "sbin", "lib", "lib64") if f"/{name}" not in _roots()]
    for place in [*unlinked, *files, sys.base_prefix, *read]:
        if place == "/usr" or place.startswith("/usr/") or not Path(place).exists():
            continue
        for parent in reversed(Path(place).parents):
            if str(parent) not in made:  # it may not be readable where it comes from
                options += ["--perms", "0755", "--dir", str(parent)]
                made.add(str(parent))
        options += ["--ro-bind", place, place]
    return options


def _roots() -> set[str]:
    return {f"/{name}" for name in _linked()}

"""A task's repository in a sandbox: put there, compared with how it was, changed by diffs."""

from __future__ import annotations

import asyncio
import io
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from stackrl.runtime.environments.sandboxes.base import Result, Sandbox, SandboxError
from stackrl.runtime.environments.swe.instances import Instance, InstanceError

PREPARE_SECONDS = 300.0
LARGEST_DIFF = 4 << 20
"""Bytes; a larger one is none."""
_CHECKOUT_SECONDS = 300.0
_KEPT_TREES = 4
GIT = (
    "git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.autocrlf=false -c core.quotePath=false "
    "-c gc.auto=0 -c diff.external= --literal-pathspecs"
)
"""git as it was before anybody set it up to run something else."""
_NEW_HISTORY = f"""
git init -q --template= .
mkdir -p .git/info
printf '%s\\n' '[user]' 'name = solver' 'email = solver@localhost' >> .git/config
printf '%s\\n' '__pycache__/' '*.pyc' '.pytest_cache/' >> .git/info/exclude
{GIT} add -f --pathspec-from-file="$HOME/tracked" --pathspec-file-nul
{GIT} add -A
{GIT} commit -q --no-verify --allow-empty -m base
rm "$HOME/tracked"
git rev-parse HEAD
"""
_LIST = "find . -path ./.git -prune -o ! -type d -print0"


class Workspace:
    """The repository of ``instance`` within ``sandbox``, in ``folder``.

    Its history is a single commit: nobody finds the solution in what came later.
    """

    def __init__(self, sandbox: Sandbox, instance: Instance, folder: str, repositories: Path | None) -> None:
        self._sandbox, self._instance = sandbox, instance
        self._in_image = not instance.files and repositories is None
        self.folder = folder if self._in_image else f"{sandbox.home}/repository"
        self._repositories = repositories
        self._base = ""

    async def prepare(self) -> None:
        """Raises SandboxError, and InstanceError where there is no such repository."""
        if self._in_image:
            tree, script = b"", f'cd {self.folder}\ngit ls-files -z > "$HOME/tracked"\nrm -rf .git\n'
        else:
            tree = await asyncio.to_thread(_tree, self._instance, self._repositories)
            script = (
                f"mkdir {self.folder}\ncd {self.folder}\ntar -xf - --no-same-owner\n"
                f'{_LIST} > "$HOME/tracked"\n'
            )
        result = await self.script(script + _NEW_HISTORY, tree)
        if result.code:
            raise SandboxError(
                f"{self._instance.instance_id}: the repository could not be set up: {_said(result)}"
            )
        self._base = result.text.split()[-1]

    async def diff(self) -> str:
        """What was changed, as a diff; empty where nothing was, or where that cannot be told any more.

        Raises SandboxError where the sandbox is at fault, not what was done in it.
        """
        script = (
            f"cd {self.folder}\n{GIT} add -A\n"
            f"{GIT} diff --cached --binary --full-index --no-ext-diff --no-textconv --no-color {self._base}"
        )
        result = await self.script(script, keep=LARGEST_DIFF)
        if result.code:
            await self._still_works(result)
        return "" if result.code or result.truncated else result.output.decode(errors="surrogateescape")

    async def changed(self) -> set[str]:
        """Paths of the files of the first ones that are another now."""
        script = f"cd {self.folder}\n{GIT} diff -z --name-only --no-ext-diff --no-renames {self._base}"
        result = await self.script(script, keep=64 << 20)
        if result.code or result.truncated:
            raise SandboxError(f"{self._instance.instance_id}: changes could not be listed: {_said(result)}")
        return set(result.output.decode(errors="surrogateescape").split("\0")) - {""}

    async def _still_works(self, result: Result) -> None:
        """Raises SandboxError where not even the simplest command runs after ``result`` came to nothing."""
        if (await self.script("true")).code:
            raise SandboxError(
                f"{self._instance.instance_id}: its sandbox does not work any more: {_said(result)}"
            )

    async def files(self) -> tuple[set[str], set[str]]:
        """Paths of the files that are there, and of those that were there at first."""
        script = f"cd {self.folder}\n{GIT} ls-tree -r -z --name-only {self._base}\nprintf '\\0'\n{_LIST}"
        result = await self.script(script, keep=64 << 20)
        if result.code or result.truncated:
            raise SandboxError(
                f"{self._instance.instance_id}: its files could not be listed: {_said(result)}"
            )
        first, _, now = result.output.decode(errors="surrogateescape").partition("\0\0")
        return {path.removeprefix("./") for path in now.split("\0") if path}, set(first.split("\0")) - {""}

    async def apply(self, patch: str) -> str:
        """Change the files as ``patch`` says, all or none; what git says where it cannot."""
        script = f"cd {self.folder}\n{GIT} apply --whitespace=nowarn -"
        result = await self.script(script, patch.encode(errors="surrogateescape"))
        return _said(result) if result.code else ""

    async def fitted(self, patch: str) -> bool:
        """Whether ``patch`` applies to the files as they were at first."""
        script = f"cd {self.folder}\n{GIT} apply --cached --check -"
        return (await self.script(script, patch.encode())).code == 0

    async def restore(self, restored: set[str], removed: set[str]) -> None:
        """Give files back their first contents, and remove others."""
        orders = {"restored": _nul(restored), "removed": _nul(removed)}
        script = (
            f'cd "$HOME"\ntar -xf -\ncd {self.folder}\nxargs -0 -r rm -rf -- < "$HOME/removed"\n'
            f'test ! -s "$HOME/restored" || {GIT} checkout -q {self._base} '
            '--pathspec-from-file="$HOME/restored" --pathspec-file-nul'
        )
        result = await self.script(script, _tar(orders))
        if result.code:
            raise SandboxError(f"{self._instance.instance_id}: tests could not be restored: {_said(result)}")

    async def script(self, text: str, stdin: bytes = b"", keep: int = 1 << 20) -> Result:
        """Raises SandboxError also where that takes too long: it is known to be quick."""
        result = await self._sandbox.run(
            ["sh", "-ec", text], seconds=PREPARE_SECONDS, stdin=stdin, folder=self._sandbox.home, keep=keep
        )
        if result.timed_out:
            raise SandboxError(f"{self._instance.instance_id}: git took over {PREPARE_SECONDS:g} s")
        return result


def _said(result: Result) -> str:
    return result.errors.decode(errors="replace").strip()[-500:] or f"exit status {result.code}"


def _nul(paths: set[str]) -> bytes:
    return b"".join(path.encode(errors="surrogateescape") + b"\0" for path in sorted(paths))


def _tar(files: Mapping[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return stream.getvalue()


def _tree(instance: Instance, repositories: Path | None) -> bytes:
    """The files at the base commit, as a tar archive."""
    if instance.files:
        return _tar({path: text.encode() for path, text in instance.files})
    return _checked_out(_repository(repositories, instance), instance.base_commit, instance.instance_id)


def _repository(repositories: Path, instance: Instance) -> Path:
    """`owner/name` as a folder, a bare repository, or with two underscores."""
    flat = instance.repo.replace("/", "__")
    tried = [instance.repo, f"{instance.repo}.git", flat, f"{flat}.git"]
    for name in tried:
        if (found := repositories / name).is_dir():
            return found
    raise InstanceError(
        f"{instance.instance_id}: no repository {instance.repo} in {repositories}; "
        f"type `git clone --bare https://github.com/{instance.repo} {repositories / tried[3]}`"
    )


@lru_cache(maxsize=_KEPT_TREES)
def _checked_out(repository: Path, commit: str, name: str) -> bytes:
    """`git archive` would leave out what a repository marks so; this takes every file."""
    with tempfile.TemporaryDirectory(prefix="stackrl-checkout-") as folder:
        work = Path(folder, "work")
        work.mkdir()
        git_folder = repository / ".git" if (repository / ".git").exists() else repository
        done = subprocess.run(
            ["git", "-c", "core.hooksPath=/dev/null", "-c", "safe.directory=*", f"--git-dir={git_folder}",
             f"--work-tree={work}", "checkout", "-q", "-f", commit, "--", "."],
            env={**os.environ, "GIT_INDEX_FILE": str(Path(folder, "index"))},
            capture_output=True,
            text=True,
            timeout=_CHECKOUT_SECONDS,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise InstanceError(
                f"{name}: {commit} of {repository} cannot be had: {done.stderr.strip()[-300:]}"
            )
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for path in sorted(work.iterdir()):
                archive.add(path, path.name, filter=_nobodys)
        return stream.getvalue()


def _nobodys(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry

"""The folder of a run: where every role finds what it needs and leaves what others read.

run.json          id, name, source file, when it began
stack.json        the resolved stack: defaults filled in, overrides applied; the only thing roles read
plan.json         processes, ports, cores
endpoints.json    the addresses of this incarnation; an engine keeps its own for the whole attempt
scale.json        how many engines are asked for, and the answer (launch/scaling.py)
scaled.json       the counts of engines that were asked for since the plan was made
state.json        status, attempt, incarnation, role states, why it ended
restore.json      the checkpoint from which this incarnation goes on
handle.json       who carries the run (launch/handle.py)
slurm.sh          the script of its Slurm job
task.json, launched.yaml, sky.yaml
                  the file as it was launched, the one that its nodes read, and what SkyPilot was given
heartbeats/       what each process does now (heartbeat.py)
preempt           whoever makes this file says that the machine is being taken away
logs/<attempt>/<role>.log
model/            the first weights and the tokenizer, as a Hugging Face folder
journal/          the orchestrator's books
data/             rows of supervised stages as tokens (data/store.py)
checkpoints/      unless the stack names another place
metrics.jsonl events.jsonl
final/            the trained model, as a Hugging Face folder
adapter/          what LoRA has trained of it, in the format of PEFT
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from stackrl.runtime.file_locks import locked_by
from stackrl.runtime.versions import versions
from stackrl.schemas.roles import Pool
from stackrl.schemas.stack import Stack

TOKEN_VARIABLE = "STACKRL_TOKEN"
CORES_VARIABLE = "STACKRL_CORES"
"""The cores that the plan deals to a process, such as `0,1`; empty: no cores of its own."""
ADDRESS_VARIABLE = "STACKRL_ADDRESS"
"""The address of its node, as the other nodes know it."""


class RunError(Exception):
    """A run that is not there, not unique, or not in the state that was asked for; the text is for people."""


@dataclass(frozen=True)
class Endpoints:
    """Addresses of one incarnation. Every URL needs the run's token."""

    orchestrator: str
    """URL that trainer ranks take batches from."""
    weights: str
    """URL at which trainer rank 0 serves weights."""
    engines: list[str]
    """URL of each engine, by its number; empty for one that has left."""
    rendezvous: str
    """host:port where trainer ranks meet (torch's TCPStore)."""
    pools: list[Pool] = field(default_factory=list)
    """The key under `roles:` of each engine; where it is not said, `inference`."""

    @property
    def members(self) -> dict[str, Pool]:
        """The engines that there are: URL → pool."""
        pools = [*self.pools, *["inference"] * (len(self.engines) - len(self.pools))]
        return {url: pool for url, pool in zip(self.engines, pools, strict=True) if url}


@dataclass
class State:
    """What a run is doing, as its node program last wrote it."""

    status: str = "created"
    """created, starting, running, finished, failed or stopped."""
    attempt: int = 0
    """Lives of the node program."""
    incarnation: int = 0
    """Lives of the trainer's ranks: one or more in each attempt."""
    began: float = 0.0
    ended: float | None = None
    reason: str = ""
    roles: dict[str, str] = field(default_factory=dict)
    """Process, such as `trainer-0` → running, done, failed, or ended (by the node program)."""
    fruitless: int = 0
    """Starts in a row, the last one included, that somebody else ended before an optimizer step was done."""
    used: float = 0.0
    """Seconds that node programs have worked on the run, all attempts together."""


class RunFolder:
    """Typed access to the folder of a run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).resolve()

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def final(self) -> Path:
        return self.path / "final"

    @property
    def heartbeats(self) -> Path:
        return self.path / "heartbeats"

    @property
    def preempt(self) -> Path:
        return self.path / "preempt"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def checkpoints(self, stack: Stack) -> Path:
        return Path(stack.checkpoint.path) / self.id if stack.checkpoint.path else self.path / "checkpoints"

    def weights(self, stack: Stack) -> Path:
        """Folder of the `folder` transport."""
        path = getattr(stack.weights, "path", None)
        return Path(path) / self.id if path else self.path / "weights"

    def stack(self) -> Stack:
        """The resolved stack. Raises RunError where it is damaged or of another version."""
        stored = json.dumps(self.read("stack.json"))
        try:
            return Stack.model_validate_json(stored)
        except ValidationError as error:
            first, *more = error.errors()
            where, others = ".".join(map(str, first["loc"])), f" (and {len(more)} more)" if more else ""
            raise RunError(
                f"{self.path / 'stack.json'} is no stack of this version of stackrl: {where}: "
                f"{first['msg']}{others}; use the version that the run was made with, or go on with a stack "
                f"file of this one: `stackrl launch FILE --resume {self.id}`"
            ) from error

    def endpoints(self) -> Endpoints:
        return Endpoints(**self.read("endpoints.json"))

    def state(self) -> State:
        """What other versions of stackrl have written besides is left out."""
        known = {one.name for one in fields(State)}
        return State(**{key: value for key, value in self.read("state.json").items() if key in known})

    def write_state(self, state: State) -> None:
        self.write("state.json", asdict(state))

    def restore(self) -> Path | None:
        """The checkpoint that this incarnation goes on from; None where it starts from the beginning.

        The node program chooses it once for all roles; where there was none, the newest good one is taken.
        """
        with contextlib.suppress(FileNotFoundError):
            chosen = self.read("restore.json")
            if chosen["incarnation"] == self.state().incarnation:
                return Path(chosen["checkpoint"]) if chosen["checkpoint"] else None
        from stackrl.runtime import checkpoints

        return checkpoints.newest(self.checkpoints(self.stack()))

    def write_restore(self, incarnation: int, checkpoint: Path | None) -> None:
        self.write("restore.json", {"incarnation": incarnation, "checkpoint": str(checkpoint or "")})

    def keeper(self, limit: float = 1.0) -> int | None:
        """Pid of the node program that is at work on this run on this machine; None where there is none.

        A node program writes its pid right after it has locked the file, and takes it back before it lets
        go. Raises RunError where one holds the lock for ``limit`` seconds without a pid.
        """
        deadline = time.monotonic() + limit
        while True:
            try:
                with open(self.path / "lock") as file:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except FileNotFoundError:
                return None
            except BlockingIOError:
                if pid := (self.path / "lock").read_text():
                    return int(pid)
            if time.monotonic() > deadline:
                raise RunError(f"run {self.id} is running, but its node program has not said which it is")
            time.sleep(0.01)

    @contextlib.contextmanager
    def kept(self, limit: float = 1.0) -> Iterator[None]:
        """Be the one node program of this run; the kernel lets go when the process ends, however it ends.

        Raises RunError where another one keeps it for more than ``limit`` seconds (`keeper` holds the lock
        too, for a moment).
        """
        deadline = time.monotonic() + limit
        with open(self.path / "lock", "ab", buffering=0, opener=open_private) as file:
            if not locked_by(file, deadline):
                raise RunError(
                    f"run {self.id} is already running; see `stackrl status {self.id}`, "
                    f"end it with `stackrl down {self.id}`"
                )
            file.truncate(0)
            try:
                file.write(str(os.getpid()).encode())
            except OSError as error:
                raise RunError(f"run {self.id} cannot begin: {self.path}: {error.strerror}") from error
            try:
                yield
            finally:
                file.truncate(0)

    def read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder. Raises RunError where it is damaged."""
        file = self.path / name
        try:
            found = json.loads(file.read_bytes())
            if isinstance(found, dict):
                return found
            wrong = "it holds no object"
        except ValueError as error:
            wrong = str(error)
        raise RunError(f"{file} is damaged: {wrong}; put back a copy of it, or move the run's folder away")

    def write_source(self, source: Path, source_hash: str, environment: Mapping[str, str]) -> None:
        """Keep the file that says what the run is to do, and the environment that came with it."""
        write_durably(self.path / "source.yaml", source.read_bytes())
        origin = {"source": str(source.resolve()), "hash": source_hash, "environment": dict(environment)}
        self.write("run.json", self.read("run.json") | origin)

    def write_plan(self, stack: Stack, plan: Any) -> None:
        """Keep what the run is to do: the resolved stack, and the plan as JSON-able data."""
        write_durably(self.path / "stack.json", stack.model_dump_json(indent=1).encode())
        self.write("plan.json", plan)

    def write(self, name: str, value: Any) -> None:
        """Replace a JSON file at once and durably, readable by its owner alone."""
        write_durably(self.path / name, json.dumps(value, indent=1).encode())


def write_durably(path: Path, data: bytes) -> None:
    """Write ``path`` so that a crash leaves the old content or the new, never a part. Mode 600."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(3)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def create_run(
    name: str,
    source: Path,
    source_hash: str,
    stack: Stack,
    plan: Any,
    environment: Mapping[str, str] | None = None,
    *,
    run_id: str | None = None,
) -> RunFolder:
    """Make the folder of a new run, for its owner alone. ``plan`` is JSON-able.

    ``environment``: the task's `envs`, where no one else brings them to the node program. ``run_id``: by
    default a new one.
    """
    run = RunFolder(runs_home() / (run_id or new_run_id(name)))
    try:
        runs_home().mkdir(mode=0o700, parents=True, exist_ok=True)
        run.path.mkdir(mode=0o700)
    except OSError as error:
        raise RunError(
            f"{runs_home()} cannot hold runs ({error.strerror}); "
            "set STACKRL_HOME to a folder that you can write to"
        ) from error
    made_with = versions(source.resolve().parent)
    run.write("run.json", {"id": run.id, "name": name, "made": time.time(), "versions": made_with})
    run.write_source(source, source_hash, environment or {})
    run.write_plan(stack, plan)
    run.write_state(State())
    return run


def all_runs() -> list[RunFolder]:
    """Every run of this home, the oldest first."""
    found = [
        RunFolder(file.parent)
        for file in runs_home().glob("*/run.json")
        if (file.parent / "state.json").exists()
    ]
    return sorted(found, key=_made)


def _made(run: RunFolder) -> float:
    """When; of a run that cannot tell, when its folder changed last."""
    try:
        return float(run.read("run.json")["made"])
    except (RunError, KeyError, TypeError, ValueError):
        return run.path.stat().st_mtime


def find_run(name: str) -> RunFolder:
    """The run called ``name``: its id, a unique beginning of it, or `latest`. Raises RunError."""
    runs = all_runs()
    if not runs:
        raise RunError(f"there are no runs in {runs_home()} yet; start one with `stackrl launch STACK`")
    if name == "latest":
        return runs[-1]
    matches = [run for run in runs if run.id.startswith(name)]
    exact = [run for run in matches if run.id == name]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    if matches:
        raise RunError(
            f"{name!r} begins several runs: {', '.join(run.id for run in matches)}; type more of it"
        )
    raise RunError(f"no run is called {name!r}; `stackrl status` lists them")


def home() -> Path:
    """``STACKRL_HOME`` or ``~/.stackrl``."""
    return Path(os.environ.get("STACKRL_HOME") or Path.home() / ".stackrl").expanduser()


def runs_home() -> Path:
    return home() / "runs"


def new_run_id(name: str) -> str:
    """``<name>-<time>-<4 hex>``."""
    return f"{plain(name)}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def plain(name: str) -> str:
    """``name`` without what a path or a shell minds."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name)


def new_token() -> str:
    """The token of a run that starts: what the environment gives, else a random one.

    Raises RunError where the given one could be guessed, does not fit into a header, or would be found in
    every line of the logs, which it is blotted out of.
    """
    given = os.environ.get(TOKEN_VARIABLE)
    if given and not re.fullmatch(r"[A-Za-z0-9._~-]{16,}", given):
        raise RunError(
            f"{TOKEN_VARIABLE} must have 16 or more of the characters A-Z a-z 0-9 . _ ~ -; unset it to let "
            "the run make its own, or set what `openssl rand -hex 32` prints"
        )
    return given or secrets.token_urlsafe(32)


def run_token() -> str:
    """The run's token from the environment. Raises SystemExit where a role was started without it."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise SystemExit(f"{TOKEN_VARIABLE} is not set: roles are started by `stackrl node`, not by hand")
    return token


def open_private(path: str | Path, flags: int) -> int:
    """An opener for `open` that makes files which their owner alone can read."""
    return os.open(path, flags, 0o600)

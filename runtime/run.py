"""The folder of a run: where every role finds what it needs and leaves what others read.

run.json          id, name, source file, when it began
stack.json        the resolved stack: defaults filled in, overrides applied; the only thing roles read
plan.json         processes, ports, cores
endpoints.json    the addresses of this attempt
state.json        status, attempt, incarnation, role states, why it ended
logs/<attempt>/<role>.log
model/            the first weights and the tokenizer, as a Hugging Face folder
journal/          the orchestrator's books
checkpoints/      unless the stack names another place
metrics.jsonl events.jsonl
final/            the trained model, as a Hugging Face folder
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stackrl.schemas.stack import Stack

TOKEN_VARIABLE = "STACKRL_TOKEN"


@dataclass(frozen=True)
class Endpoints:
    """Addresses of one attempt. Every URL needs the run's token."""

    orchestrator: str
    """URL that trainer ranks take batches from."""
    weights: str
    """URL at which trainer rank 0 serves weights."""
    engines: list[str]
    """URL of each engine."""
    rendezvous: str
    """host:port where trainer ranks meet (torch's TCPStore)."""


@dataclass
class State:
    """What a run is doing, as its node program last wrote it."""

    status: str = "created"
    """created, starting, running, finished, failed or stopped."""
    attempt: int = 0
    incarnation: int = 0
    pid: int = 0
    """The node program's."""
    pid_started: float = 0.0
    """When that process began (seconds since the epoch), so that a reused pid is not taken for it."""
    began: float = 0.0
    ended: float | None = None
    reason: str = ""
    roles: dict[str, str] = field(default_factory=dict)
    """Role → starting, running, done, failed."""

    @property
    def ongoing(self) -> bool:
        return self.status in ("created", "starting", "running")


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
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def final(self) -> Path:
        return self.path / "final"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / str(attempt)

    def checkpoints(self, stack: Stack) -> Path:
        return Path(stack.checkpoint.path) / self.id if stack.checkpoint.path else self.path / "checkpoints"

    def weights(self, stack: Stack) -> Path:
        """Folder of the `folder` transport."""
        path = getattr(stack.weights, "path", None)
        return Path(path) / self.id if path else self.path / "weights"

    def stack(self) -> Stack:
        """The resolved stack."""
        return Stack.model_validate_json((self.path / "stack.json").read_bytes())

    def endpoints(self) -> Endpoints:
        return Endpoints(**self.read("endpoints.json"))

    def state(self) -> State:
        return State(**self.read("state.json"))

    def write_state(self, state: State) -> None:
        self.write("state.json", asdict(state))

    def read(self, name: str) -> Any:
        return json.loads((self.path / name).read_bytes())

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


def home() -> Path:
    """``STACKRL_HOME`` or ``~/.stackrl``."""
    return Path(os.environ.get("STACKRL_HOME") or Path.home() / ".stackrl").expanduser()


def runs_home() -> Path:
    return home() / "runs"


def new_run_id(name: str) -> str:
    """``<name>-<time>-<4 hex>``."""
    return f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def run_token() -> str:
    """The run's token from the environment. Raises SystemExit where a role was started without it."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise SystemExit(f"{TOKEN_VARIABLE} is not set: roles are started by `stackrl node`, not by hand")
    return token

"""The program of a node that obeys: it starts and ends what node 0 says, and tells what becomes of it."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from stackrl.runtime import preemption
from stackrl.runtime.heartbeat import HEARTBEATS_VARIABLE, Listener
from stackrl.runtime.launch.devices import among_visible
from stackrl.runtime.launch.planning.plan import RUN
from stackrl.runtime.launch.ports import free_ports
from stackrl.runtime.nodes.channel import Channel, Lost
from stackrl.runtime.nodes.crew import ALIVE_SECONDS
from stackrl.runtime.nodes.meeting import MEETING_LIMIT, Facts, join
from stackrl.runtime.notes import tell
from stackrl.runtime.place import Place
from stackrl.runtime.processes import GUARD_LIMIT, LOST, guarded
from stackrl.runtime.run import TOKEN_VARIABLE, RunError, RunFolder, home, write_durably
from stackrl.runtime.stopping import Stopped, longest_end
from stackrl.runtime.supervisor import Program, Supervisor
from stackrl.runtime.watch import SignsOfLife

PYTHON = "PYTHON"
"""Stands for the interpreter in a command that is sent to another node."""
PREEMPTION = "preemption"
_EDGE = 1 << 20
"""Bytes at both ends of a file of weights that are compared between nodes."""
_SUSPENDED_SECONDS = 5.0


def follow(place: Place, token: str, stack: str) -> int:
    """Do what node 0 says until it says farewell. Returns the exit code that it gives, or LOST without it.

    ``stack``: the hash of the stack file. Raises RunError where the nodes do not come together.
    """
    tell(f"node {place.rank} of {place.nodes}: looking for node 0 at {place.addresses[0]}")
    mine = Facts.here(place, stack, os.environ)
    channel = join(place, token, mine, os.environ, MEETING_LIMIT)
    welcome = _welcomed(channel)
    if welcome["kind"] == "farewell":
        return welcome["code"]
    mirror = _mirror(place.rank, welcome["files"])
    tell(f"node {place.rank} works for run {mirror.id}; logs of all nodes are in node 0's folder")
    with mirror.kept():  # what waits for the end of this node sees it there
        code = guarded(
            lambda: _Follower(channel, mirror, token).work(),
            died=lambda reason: tell(f"node {place.rank}: {reason}"),
            limit=longest_end(mirror),
        )
    if code == 0:
        shutil.rmtree(mirror.path, ignore_errors=True)
    return code


def _welcomed(channel: Channel) -> dict[str, Any]:
    """Node 0's `welcome`, once all nodes are there, or its `farewell`, where it has nothing for them to do.

    Without either before node 0 goes, a farewell with LOST. Raises RunError where the nodes do not fit.
    """
    deadline = time.monotonic() + MEETING_LIMIT + 60
    while time.monotonic() < deadline:
        try:
            message = channel.receive_one()  # orders may have come with it
            if message is None:
                time.sleep(0.1)
            elif message["kind"] == "alive":
                channel.send("alive")
            elif message["kind"] == "refused":
                raise RunError(message["why"])
            else:
                return message
        except Lost as lost:
            tell(f"node 0 gave up before all nodes were there ({lost}); see its log")
            return {"kind": "farewell", "code": LOST}
    raise RunError(f"node 0 did not answer within {MEETING_LIMIT + 60:.0f} s; see its log")


def _mirror(rank: int, files: dict[str, bytes]) -> RunFolder:
    """This node's own folder of the run: what its roles read, and their temporary files."""
    run_id = Path(files["id"].decode()).name
    mirror = RunFolder(home() / "nodes" / str(rank) / run_id)
    try:
        mirror.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(mirror.heartbeats, ignore_errors=True)
        mirror.heartbeats.mkdir(mode=0o700)
        mirror.preempt.unlink(missing_ok=True)
        _keep(mirror, files)
    except OSError as error:
        raise RunError(f"{mirror.path} cannot be written: {error}; set STACKRL_HOME") from error
    return mirror


def _keep(mirror: RunFolder, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        if name != "id":
            write_durably(mirror.path / Path(name).name, content)


class _Follower:
    """One life of a node that obeys."""

    def __init__(self, channel: Channel, mirror: RunFolder, token: str) -> None:
        self._channel, self._mirror, self._token = channel, mirror, token
        limits = mirror.stack().limits
        self._silence, self._stop_seconds = limits.silence_seconds, limits.stop_seconds
        self._listener = Listener(mirror.heartbeats, self._silence)
        self._heard = self._spoke = time.monotonic()
        self._orders: deque[dict[str, Any]] = deque()
        self._code: int | None = None
        self._asked, self._heard_from = False, True
        self._complaints: set[str] = set()
        self._given_up = float("inf")

    def work(self) -> int:
        self._supervisor = Supervisor(self._mirror.path / "logs", self._token, self._pass_on, self._complain)
        self._signs = SignsOfLife(self._listener, self._supervisor)
        with self._supervisor as supervisor:
            supervisor.hear(self._channel, self._listen)
            self._listen()  # what has come already wakes nobody
            if preemption.watched(os.environ):
                watch = [sys.executable, "-m", "stackrl.runtime.preemption", str(self._mirror.path)]
                supervisor.start(Program(PREEMPTION, watch))
            while self._code is None:
                try:
                    self._turn()
                except OSError as error:  # a full disk, or a process that SIGKILL does not end
                    self._say("asks", why=str(error), code=LOST)
                    self._leave(str(error))
            if self._heard_from:
                supervisor.hear_no_more(self._channel)
        self._channel.close()
        return self._code

    def _turn(self) -> None:
        try:
            self._supervisor.turn(0.5)
        except Stopped as stop:
            self._ask_for_the_end(str(stop), stop.code)
            self._supervisor.rest(0.5)
        while self._orders:
            self._obey(self._orders.popleft())
        self._signs.end_silent(self._pids())
        self._tell_ends()
        self._mind_node_0()
        if self._mirror.preempt.exists():
            self._ask_for_the_end("the machine is being taken away (preemption notice)", LOST)

    def _ask_for_the_end(self, why: str, code: int) -> None:
        """Node 0 saves first; without its farewell this node waits no longer than that may take."""
        if not self._asked:
            self._asked = True
            self._given_up = time.monotonic() + self._stop_seconds + GUARD_LIMIT / 2
            self._say("asks", why=why, code=code)
        elif self._supervisor.signals > 1:
            self._leave("told to end twice")

    def _mind_node_0(self) -> None:
        now = time.monotonic()
        if now - self._spoke > _SUSPENDED_SECONDS:  # this process was stopped itself
            self._heard = now
        if now - self._spoke > ALIVE_SECONDS:
            self._spoke = now
            self._say("alive")
        if now - self._heard > self._silence:
            self._leave(f"node 0 gave no sign of life for {self._silence:.0f} s")
        if now > self._given_up:
            self._leave("node 0 did not end the run in time")

    def _listen(self) -> None:
        try:
            messages = self._channel.receive()
        except Lost as lost:
            self._heard_from = False
            self._supervisor.hear_no_more(self._channel)
            return self._leave(str(lost))
        self._heard = time.monotonic()
        self._orders += messages

    def _say(self, kind: str, **content: Any) -> None:
        if self._code is None:
            try:
                self._channel.send(kind, **content)
            except Lost as lost:
                self._leave(str(lost))

    def _leave(self, why: str) -> None:
        """Without node 0 nothing here has a purpose."""
        if self._code is not None:
            return
        tell(f"{why}: this node ends what it runs")
        self._code = LOST

    def _obey(self, message: dict[str, Any]) -> None:
        name = message.get("name", "")
        running = self._supervisor.running.get(name)
        match message["kind"]:
            case "start":
                self._start(message)
            case "end" if running is not None and running.exit is None:
                self._supervisor.tell_to_end(running)
            case "kill":
                if running is not None:
                    self._supervisor.kill(running)
                    self._listener.forget(name)
                self._tell_ends()
                self._answer(message)
            case "files":
                _keep(self._mirror, message["files"])
            case "stacks":
                self._signs.dump_stacks(self._pids())
            case "ports":
                self._try(message, lambda: {"ports": free_ports(message["count"], message["host"])})
            case "fingerprint":
                self._try(message, lambda: {"fingerprint": fingerprint(self._mirror.model)})
            case "farewell":
                self._code = message["code"]

    def _start(self, message: dict[str, Any]) -> None:
        places = {PYTHON: sys.executable, RUN: str(self._mirror.path)}
        environment = {
            **among_visible(message["environment"], os.environ),
            TOKEN_VARIABLE: self._token,
            HEARTBEATS_VARIABLE: str(self._mirror.heartbeats),
        }
        command = [places.get(part, part) for part in message["command"]]
        name = message["name"]
        try:
            self._supervisor.start(Program(name, command, environment, message["endless"]))
        except OSError as error:
            why = f"cannot be started: {error}"
            self._say("ended", name=name, exit=1, verdict=why, complaint="")

    def _try(self, message: dict[str, Any], work: Any) -> None:
        try:
            self._answer(message, **work())
        except OSError as error:
            self._answer(message, problem=str(error))

    def _answer(self, message: dict[str, Any], **content: Any) -> None:
        self._say("answer", question=message["question"], **content)

    def _tell_ends(self) -> None:
        for name, running in self._supervisor.running.items():
            if running.exit is None or running.answered or name == PREEMPTION:
                continue
            running.answered = True
            self._say(
                "ended", name=name, exit=running.exit, verdict=running.verdict, complaint=running.complaint
            )

    def _pass_on(self, name: str, line: str) -> None:
        if name != PREEMPTION:  # node 0 has one of its own
            self._say("line", name=name, line=line.encode())

    def _complain(self, text: str) -> None:
        if text not in self._complaints:
            self._complaints.add(text)
            tell(text)

    def _pids(self) -> dict[str, int]:
        return {
            name: running.process.pid
            for name, running in self._supervisor.running.items()
            if running.exit is None and name != PREEMPTION
        }


def fingerprint(model: Path) -> str:
    """Equal for equal first weights: names, sizes, and both ends of each file of the folder."""
    digest = hashlib.sha256()
    for file in sorted(path for path in model.rglob("*") if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(model)} {size}\n".encode())
        with open(file, "rb") as opened:
            digest.update(opened.read(_EDGE))
            opened.seek(max(0, size - _EDGE), os.SEEK_SET)
            digest.update(opened.read(_EDGE))
    return digest.hexdigest()

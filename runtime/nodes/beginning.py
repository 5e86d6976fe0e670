"""What comes before the roles: the nodes gather, and each makes the model's first weights."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

from stackrl.runtime.launch.planning.plan import RUN, Process
from stackrl.runtime.nodes.channel import Channel, Lost, Stranger
from stackrl.runtime.nodes.crew import Crew, contents
from stackrl.runtime.nodes.follower import PYTHON, fingerprint
from stackrl.runtime.nodes.meeting import MEETING_LIMIT, Facts, listen
from stackrl.runtime.notes import Notes
from stackrl.runtime.place import Place
from stackrl.runtime.roles import RoleFailed, blame
from stackrl.runtime.run import TOKEN_VARIABLE, RunError, RunFolder
from stackrl.runtime.supervisor import Program

PREPARE_LIMIT = 3600.0
"""Seconds for the first weights, a download included."""
TURN_AWAY_LIMIT = 120.0
"""Seconds that node 0 waits for the others when there is nothing to do; who comes later looks in vain."""
SHARED = ("run.json", "stack.json", "plan.json")
"""What the other nodes get of the run's folder when they come; Roles gives them the rest."""


def gather(
    run: RunFolder, place: Place, token: str, processes: Sequence[Process], crew: Crew, notes: Notes
) -> None:
    """Wait for the other nodes of the run. Raises RoleFailed, TimeoutError and Stopped."""
    if place.nodes == 1:
        return
    notes.say(f"waiting for {place.nodes - 1} more node(s) at {place.addresses[0]}")
    mine = Facts.here(place, run.read("run.json")["hash"], os.environ)
    files = contents(run.path, SHARED) | {"id": run.id.encode()}
    pools = dict.fromkeys(process.pool for process in processes)
    alike = [sorted({process.node for process in processes if process.pool == pool}) for pool in pools]
    try:
        crew.meet(listen(place, os.environ), token, mine, alike, files, MEETING_LIMIT)
    except (RunError, ValueError) as error:
        raise RoleFailed(str(error)) from None
    notes.event("met", nodes=list(place.addresses))


def turn_away(place: Place, token: str, kind: str, **content: Any) -> None:
    """Tell the other nodes that there is nothing to do for them, as they come."""
    if place.nodes == 1 or not token:
        return
    deadline = time.monotonic() + TURN_AWAY_LIMIT
    with contextlib.suppress(RunError, OSError), listen(place, os.environ) as listener:
        for _ in range(1, place.nodes):
            listener.settimeout(max(0.01, deadline - time.monotonic()))
            connection, (host, *_) = listener.accept()
            with contextlib.suppress(Stranger, Lost):
                channel = Channel.accepted(connection, host, token)
                while channel.receive_one() is None and time.monotonic() < deadline:
                    time.sleep(0.05)  # what is not read would make the closing a reset
                channel.send(kind, **content)
                channel.close()


def preparing(place: Place) -> list[str]:
    """Names of the programs that make the first weights, node by node."""
    return ["prepare", *(f"prepare-{node}" for node in range(1, place.nodes))]


def prepare(run: RunFolder, place: Place, token: str, command: Sequence[str], crew: Crew) -> None:
    """Make the first weights and the tokenizer on every node, unless an earlier attempt did.

    ``command`` is given the run's folder. Raises RoleFailed, TimeoutError and Stopped.
    """
    started = []
    for node, name in enumerate(preparing(place)):
        if node == 0 and not run.model.exists():
            here = [*command, str(run.path)]
            started.append(crew.start(Program(name, here, {TOKEN_VARIABLE: token})))
        elif node > 0:
            started.append(crew.start(Program(name, [PYTHON, *command[1:], RUN], node=node)))
    crew.wait_for([running.program.name for running in started], PREPARE_LIMIT)
    if failed := [running for running in started if running.status == "failed"]:
        raise RoleFailed(blame(failed))
    mine = fingerprint(run.model) if place.nodes > 1 else ""
    if unlike := [str(node) for node, found in crew.fingerprints().items() if found != mine]:
        raise RoleFailed(
            f"node(s) {', '.join(unlike)} made other first weights than node 0: have all nodes the same "
            "version of torch, and is the model's `revision` said?"
        )

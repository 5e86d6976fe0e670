"""What is known here of a run whose folder is on node 0 of a cluster: its state and its metrics, by ssh."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from stackrl.runtime.launch.sky.command import quietly
from stackrl.runtime.run import RunFolder, write_durably

SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=45")
_AS_JOBS = """\
jobs_home="$HOME/.sky_clusters/$SKY_CLUSTER_NAME"
if [ -n "$SKY_CLUSTER_NAME" ] && [ -d "$jobs_home" ]; then cd "$jobs_home" && export HOME="$PWD"; fi
"""
"""On a Slurm of SkyPilot's, jobs have a home of their own within the account's, which only a session that
somebody types in gets as well."""
MIRRORED = ("state.json", "metrics.jsonl", "events.jsonl")
LIMIT = 60.0
"""Seconds until all files are here."""
_MARK = "-----8<-----"
_OVER = frozenset({"finished", "failed", "stopped"})


def on_node(host: str, script: str, limit: float) -> str:
    """What bash says to ``script`` on a node, where `~` is what it is for the job. Raises NoAnswer."""
    return quietly([*SSH, host, "bash -s"], limit, _AS_JOBS + script)


def command_on_node(host: str, command: Sequence[str]) -> list[str]:
    """The program that runs ``command`` on a node, where `~` is what it is for the job."""
    return [*SSH, host, f"{_AS_JOBS}exec {shlex.join(command)}"]


def fetch(run: RunFolder, host: str, home: str) -> None:
    """Bring the files up to date; what the node does not have yet is left as it is. Raises NoAnswer.

    ``home``: STACKRL_HOME on the node.
    """
    script = f'cd "{home}/runs/{run.id}" 2>/dev/null || exit 0\n' + "".join(
        f"[ -e {name} ] && echo '{_MARK} {name}' && cat {name}\n" for name in MIRRORED
    )
    answer = on_node(host, f"{script}exit 0\n", LIMIT)
    for part in answer.split(f"{_MARK} ")[1:]:
        name, _, text = part.partition("\n")
        if name in MIRRORED and text.endswith(("\n", "}")):
            write_durably(run.path / name, text.encode())


def settle(run: RunFolder, status: str, reason: str) -> None:
    """Note the end of a run whose own last word has not arrived here."""
    state = run.state()
    if state.status not in _OVER:
        state.status, state.reason, state.ended = status, "" if status == "finished" else reason, time.time()
        run.write_state(state)

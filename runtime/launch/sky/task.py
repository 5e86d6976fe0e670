"""A stack as SkyPilot gets it from `stackrl launch`: its own task with what a run needs besides.

The task of the file is left as it is, except that it is pinned to the place that was asked for, brings the
resolved stack to the machines, names its run, saves before machines go, and gives them back.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from stackrl.runtime.launch.money import HOURLY_VARIABLE
from stackrl.runtime.place import RUN_VARIABLE
from stackrl.runtime.processes import LOST
from stackrl.schemas import skypilot
from stackrl.schemas.problems import STACK
from stackrl.schemas.split import Task, is_mixed
from stackrl.schemas.stack import Stack
from stackrl.schemas.written import written

JOB_VARIABLE = "STACKRL_JOB"
"""Names what all nodes of a launch belong to; in a group of jobs, SkyPilot's own ids differ."""
IDLE_MINUTES = 10
"""Minutes after the run's end for which machines stay where the stack says nothing: to look, and to copy."""
ANYWHERE = "sky"
"""The word of `--infra` that leaves the choice to SkyPilot."""
_SAVE = """\
home="{home}"
folders=("$home/runs/{run}" "$home"/nodes/*/"{run}")
at_work() {{ [ -e "$1/lock" ] && ! flock -n "$1/lock" true; }}
for folder in "${{folders[@]}}"; do at_work "$folder" && {told}; done
for second in $(seq {limit}); do
  busy=
  for folder in "${{folders[@]}}"; do at_work "$folder" && busy=yes; done
  [ "$busy" ] || exit 0
  sleep 1
done
exit 1
"""
"""Saves a run that is at work on this node, node 0 or another one, and waits until its node program ends."""
BY_NOTICE = 'touch "$folder/preempt"'
"""How it tells the node program that the machine goes; any number of times."""
BY_DOWN = """\
if [ "$folder" = "$home/runs/{run}" ] && grep -qsx down "$folder/preempt"
  then kill -TERM "$(cat "$folder/lock")"
  else echo down > "$folder/preempt"
  fi"""
"""How `down` tells it: a second one ends it at once, as a second signal does. Notices leave no word in the
file, so that a `down` after one of those waits for the checkpoint."""


@dataclass(frozen=True)
class Launch:
    """What a launch adds to the task."""

    run_id: str
    name: str
    """What SkyPilot calls the cluster or job."""
    file: Path
    """The resolved stack on this machine."""
    hourly: float | None
    end_seconds: float
    """That the run may take to save itself and end."""

    @property
    def remote(self) -> str:
        """The resolved stack as a node sees it from its work directory."""
        return f".stackrl/{self.run_id}.yaml"


def sky_name(run_id: str, launches: int) -> str:
    """What SkyPilot calls the machines of a run: a name for clusters, and for groups a part of host names."""
    letters = re.sub(r"[^A-Za-z0-9-]", "-", run_id)
    name = letters if letters[0].isalpha() else f"run-{letters}"
    return f"{name}-{launches}" if launches > 1 else name


def resolved(task: Task, stack: Stack, launch: Launch) -> dict[str, Any]:
    """The stack file that nodes read: defaults filled in, without any secret, and it names itself."""
    brought = {key: value for key, value in task.items() if key != STACK[0]}
    if isinstance(brought.get("secrets"), Mapping):
        brought["secrets"] = dict.fromkeys(brought["secrets"])
    brought |= {"workdir": ".", "envs": {**(task.get("envs") or {}), "STACK": launch.remote}}
    return {**brought, STACK[0]: {STACK[1]: written(stack)}}


def submitted(task: Task, launch: Launch) -> dict[str, Any]:
    """The task that SkyPilot gets, for one kind of machine."""
    made = {key: value for key, value in task.items() if key != STACK[0]}
    envs = {**(task.get("envs") or {}), "STACK": launch.remote}
    envs |= {RUN_VARIABLE: launch.run_id, JOB_VARIABLE: launch.name}
    if launch.hourly is not None:
        envs.setdefault(HOURLY_VARIABLE, f"{launch.hourly:.4f}")
    made["envs"] = envs
    made["file_mounts"] = {**(task.get("file_mounts") or {}), launch.remote: str(launch.file)}
    config = task.get("config") or {}
    made["config"] = {**config, "hooks": [*config.get("hooks", ()), saving_hook(task, launch)]}
    return made


def saving_hook(task: Task, launch: Launch) -> dict[str, Any]:
    """What SkyPilot does on a node before it is taken away, stopped or given back."""
    limit = int(launch.end_seconds) + 1
    script = f"bash -c {shlex.quote(saving_script(task, launch.run_id, limit))}"
    return {"run": script, "events": ["stop", "preemption", "down"], "timeout": limit + 5}


def saving_script(task: Task, run_id: str, limit: int, told: str = BY_NOTICE) -> str:
    """For bash: 0 when no node program works on the run any more, 1 when one still does after ``limit`` s."""
    told = told.replace("{run}", run_id)
    return _SAVE.format(home=remote_home(task), run=run_id, limit=limit, told=told)


def remote_home(task: Task) -> str:
    """STACKRL_HOME on a node, as a shell there reads it."""
    said = (task.get("envs") or {}).get("STACKRL_HOME")
    return str(said).replace("~", "$HOME", 1) if said else "$HOME/.stackrl"


def pinned(resources: Mapping[str, Any], infra: str) -> dict[str, Any]:
    """``resources`` for `--infra`: the alternatives that are there, or, where none is, all of them moved
    there."""
    if infra == ANYWHERE:
        return dict(resources)
    choices = skypilot.choices_of(resources)
    there = [choice for choice in choices if _within(skypilot.infra_of(choice), infra)]
    kept = [_moved(choice, infra) for choice in there or choices]
    different = [choice for index, choice in enumerate(kept) if choice not in kept[:index]]
    if len(different) == 1:
        return different[0]
    key = "ordered" if resources.get("ordered") else "any_of"
    outer = {name: value for name, value in resources.items() if name not in (*skypilot.CHOICES, "infra")}
    outer = {name: value for name, value in outer.items() if name not in skypilot.PLACES}
    return {**outer, key: different}


def is_managed(stack: Stack, resources: Mapping[str, Any]) -> bool:
    """Whether SkyPilot must mind the run: to start it again elsewhere, or because it is several tasks."""
    choices = skypilot.choices_of(resources)
    return is_mixed(stack) or any(choice.get("use_spot") or "job_recovery" in choice for choice in choices)


def recovering(resources: Mapping[str, Any]) -> dict[str, Any]:
    """``resources`` of a managed job: a run that says that its machine is lost is started again.

    What an alternative says of `job_recovery` replaces what all of them say, so it says this, too.
    """
    made = {**resources, "job_recovery": _recovery(resources.get("job_recovery"))}
    for key in skypilot.CHOICES:
        if made.get(key):
            made[key] = [
                {**choice, "job_recovery": _recovery(choice["job_recovery"])}
                if "job_recovery" in choice
                else choice
                for choice in made[key]
            ]
    return made


def _recovery(said: Any) -> dict[str, Any]:
    recovery = dict(said) if isinstance(said, Mapping) else {"strategy": said} if said else {}
    codes = recovery.get("recover_on_exit_codes", [])
    codes = [codes] if isinstance(codes, int) else list(codes)
    if LOST not in codes:
        codes.append(LOST)
    return {**recovery, "recover_on_exit_codes": codes}


def given_back(resources: Mapping[str, Any]) -> dict[str, Any]:
    """``resources`` of a cluster: its machines go when the run has ended, unless the stack says otherwise."""
    if says_what_becomes(resources):
        return dict(resources)
    return {**resources, "autostop": {"idle_minutes": IDLE_MINUTES, "down": True}}


def says_what_becomes(resources: Mapping[str, Any]) -> bool:
    """Whether ``resources`` say what happens to machines on which nothing runs."""
    return all("autostop" in choice for choice in skypilot.choices_of(resources))


def as_yaml(documents: Sequence[Mapping[str, Any]]) -> bytes:
    """For people too: scripts are written as they are, line by line."""
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text.encode()


class _Dumper(yaml.SafeDumper):
    """With long texts as blocks, and every value written out where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _block(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _block)


def _within(place: str, asked: str) -> bool:
    """Whether an alternative's place is the one that was asked for, lies in it, or contains it."""
    first, second = _parts(place), _parts(asked)
    pairs = zip(first, second, strict=False)
    return bool(first) and all(one == other or "*" in (one, other) for one, other in pairs)


def _moved(choice: Mapping[str, Any], infra: str) -> dict[str, Any]:
    """``choice`` at ``infra``, unless its own place is in there already and named more closely."""
    own = skypilot.infra_of(choice)
    closer = _within(own, infra) and len(_parts(own)) > len(_parts(infra))
    bare = {key: value for key, value in choice.items() if key not in (*skypilot.PLACES, "infra")}
    return {"infra": own if closer else infra, **bare}


def _parts(infra: str) -> list[str]:
    """Its steps; nothing where it is left open."""
    first, *rest = infra.lower().split("/")
    return ["k8s" if first == "kubernetes" else first, *rest] if first else []

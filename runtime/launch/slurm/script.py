"""The job's script: templates/slurm.sh filled in. Readable, and free of secrets."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from stackrl.runtime.launch.front import ROOT
from stackrl.runtime.launch.slurm.request import Request
from stackrl.runtime.run import RunError, RunFolder, plain
from stackrl.runtime.stopping import longest_end

TEMPLATE = ROOT / "templates" / "slurm.sh"
MARGIN = 60
"""Seconds between the longest end of a run and the end of its nodes."""
PATIENCE = 600
"""Seconds that a run has lived which, lost, is started again without having been told to leave."""
LAST_NODES = 1200
"""Seconds that nodes have to end after the first of them, when the trained model is saved."""


def write_script(run: RunFolder, request: Request, environment: Mapping[str, str]) -> Path:
    """Write the run's job script into its folder. ``environment``: the task's `envs`.

    Raises RunError where the time limit leaves no time to train, or an option has several lines.
    """
    script = run.path / "slurm.sh"
    script.write_text(render(run, request, environment))
    script.chmod(0o600)
    return script


def render(run: RunFolder, request: Request, environment: Mapping[str, str]) -> str:
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    values = {
        "RUN": run.id,
        "DIRECTIVES": "\n".join(_directives(run, request)),
        "FOLDER": shlex.quote(str(run.path)),
        "EXPORTS": exports,
        "NODELISTS": _node_lists(len(request.parts)),
        "SRUN": " \\\n  ".join(_step(run, request)),
        "PATIENCE": str(PATIENCE),
    }
    return re.sub("@([A-Z]+)@", lambda place: values[place[1]], TEMPLATE.read_text())


def job_name(run: RunFolder) -> str:
    """What Slurm lists the run's job as."""
    return plain(run.read("run.json")["name"])


def log_of(run: RunFolder) -> Path:
    """What the script and the node programs say, all starts one after the other."""
    return run.path / "logs" / "node.log"


def warning_of(run: RunFolder, request: Request) -> int:
    """Seconds before the end of its nodes at which the run is told to save. Raises RunError."""
    seconds = int(longest_end(run)) + MARGIN
    if request.time_limit is not None and request.time_limit < 2 * seconds:
        raise RunError(
            f"a time limit of {request.time_limit / 60:g} minutes leaves no time to train: the run is told "
            f"to save {seconds} s before its end; ask for {2 * seconds // 60 + 1} minutes or more, or lower "
            "limits.stop_seconds"
        )
    return seconds


def container_options(run: RunFolder, image: str, folders: Iterable[Path | str] = ()) -> list[str]:
    """Options of pyxis: the run's folder, the working directory and ``folders`` are there under their own
    names."""
    if not image:
        return []
    stack, cache = run.stack(), os.environ.get("HF_HOME") or "~/.cache/huggingface"
    wanted = [run.path, Path.cwd(), *folders, run.checkpoints(stack).parent, Path(cache).expanduser()]
    mounts = dict.fromkeys(str(path) for path in wanted if path == run.path or Path(path).is_dir())
    return [
        f"--container-image={image}",
        f"--container-mounts={','.join(f'{path}:{path}' for path in mounts)}",
        f"--container-workdir={Path.cwd()}",
        "--no-container-mount-home",
    ]


def _directives(run: RunFolder, request: Request) -> Iterable[str]:
    """The lines that sbatch reads; parts of a heterogeneous job are asked for one after the other."""
    job = [
        f"--job-name={job_name(run)}",
        f"--chdir={Path.cwd()}",
        f"--output={str(log_of(run)).replace('%', '%%')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{warning_of(run, request)}",
        "--export=ALL",
    ]
    for number, part in enumerate(request.parts):
        if number:
            yield "#SBATCH hetjob"
        else:
            yield from map(_directive, job)
        partition = [f"--partition={part.partition}"] if part.partition else []
        nodes = [f"--nodes={part.nodes}", "--ntasks-per-node=1"]
        yield from map(_directive, [*partition, *nodes, *part.options, *request.options])


def _directive(option: str) -> str:
    """Raises RunError for one of several lines: all but the first would be commands of the script."""
    if re.search(r"[\n\r\0]", option):
        raise RunError(f"an option of sbatch is one line, not {option!r}: mend it in the stack")
    name, equals, value = option.partition("=")
    return f"#SBATCH {name}{equals}{shlex.quote(value) if value else ''}"


def _node_lists(parts: int) -> str:
    if parts == 1:
        return '"$SLURM_JOB_NODELIST"'
    return " ".join(f'"$SLURM_JOB_NODELIST_HET_GROUP_{number}"' for number in range(parts))


def _step(run: RunFolder, request: Request) -> Iterable[str]:
    """The command that starts the nodes' programs, a line for each kind of option.

    A node program is told of what happens on the others, and ends by itself: srun ends nobody before
    LAST_NODES. It may use all cores of the job, whatever srun would bind it to.
    """
    yield "srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --label --unbuffered"
    yield f"--wait={LAST_NODES}"
    if len(request.parts) > 1:
        yield f"--het-group={','.join(map(str, range(len(request.parts))))}"
    if request.image:
        yield from map(shlex.quote, container_options(run, request.image))
        yield 'stackrl node "$run"'
    else:
        yield f'{shlex.quote(sys.executable)} -m stackrl node "$run"'

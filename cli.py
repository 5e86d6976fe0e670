"""The command line: parses and calls, no logic.

Each verb is a parser and a small function that imports what it needs, so that ``stackrl validate`` does not
wait for what ``stackrl launch`` loads. Exit codes: 0 fine, 1 the run or the machine failed, 2 bad usage or
stack, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import gc
import os
import shlex
import sys
from collections.abc import Callable, Sequence

FIRST = "stacks/reverse-text-cpu.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line. Returns its exit code."""
    parser = _parser()
    try:
        parsed = parser.parse_args(arguments)
    except SystemExit as exit:  # argparse has said what is wrong
        return exit.code if isinstance(exit.code, int) else 2
    if parsed.version:
        print(_version())
        return 0
    if parsed.run_verb is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        return parsed.run_verb(parsed)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `stackrl show X | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        return _told(error)


def _told(error: Exception) -> int:
    """Say what went wrong where it is the user's to mend; anything else is a fault of ours and is raised."""
    from stackrl.runtime.run import RunError
    from stackrl.schemas.problems import StackError

    if isinstance(error, StackError):
        print(error, file=sys.stderr)
        print(
            "all keys: docs/stack.md, examples: stacks/; check again with `stackrl validate FILE`",
            file=sys.stderr,
        )
        return 2
    if isinstance(error, RunError):
        print(f"stackrl: {error}", file=sys.stderr)
        return 2
    if isinstance(error, OSError):
        print(f"stackrl: {error}; what this machine lacks: `stackrl doctor`", file=sys.stderr)
        return 1
    raise error


def _quick(verb: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """For verbs that only look and end at once: to collect garbage would take a sixth of their time, and to
    search all installed packages for plugins of pydantic a twentieth."""

    def without_collection(given: argparse.Namespace) -> int:
        os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")
        collecting = gc.isenabled()
        gc.disable()
        try:
            return verb(given)
        finally:
            if collecting:
                gc.enable()

    return without_collection


@_quick
def _init(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import front

    return front.init(given.name, given.template, given.force)


@_quick
def _validate(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import front

    return front.validate(given.files, given.set, given.on_node, given.output)


@_quick
def _show(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import front

    return front.show(given.file, given.set, given.output)


@_quick
def _schema(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import front

    return front.schema(given.output)


@_quick
def _plan(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import front

    return front.plan(given.file, given.set, given.output, given.reply, given.exit_code)


def _launch(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import backends
    from stackrl.runtime.run import RunError
    from stackrl.schemas.loader import load

    if given.resume and given.origin:
        raise RunError(
            "a run is resumed or forked: use --resume RUN to go on with it, or --from RUN@STEP for a new one"
        )
    if given.resume and given.set and not given.file:
        changes = " ".join(f"--set {shlex.quote(change)}" for change in given.set)
        raise RunError(
            "--set changes a stack file, and none is named; "
            f"type `stackrl launch FILE --resume {given.resume} {changes}`"
        )
    source = load(given.file, given.set) if given.file else None
    return backends.launch(
        source,
        given.infra,
        detach=given.detach,
        resume=given.resume,
        origin=given.origin,
        changes=given.set,
    )


def _eval(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import evaluating

    question = evaluating.Question(
        given.endpoint, given.model, given.secret, given.prompts, given.samples, given.requests, given.greedy
    )
    return evaluating.evaluate(given.what, given.set, question, given.output)


def _status(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import runs

    return runs.status(given.run, given.output)


def _logs(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import runs

    return runs.logs(given.run, given.role, given.follow, given.attempt, given.lines)


def _watch(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import runs

    return runs.watch(given.run)


def _audit(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import audit

    return audit.show(given.run, given.output)


def _ports(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import sockets

    return sockets.show(given.run, given.output)


def _report(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import reporting

    return reporting.report(given.run, given.output)


def _export(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import exporting

    return exporting.export(given.origin, given.target, given.dtype, given.force)


def _diff(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import difference

    return difference.diff(given.left, given.right, given.output)


def _execute(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import runs

    return runs.execute(given.run, given.command, given.node)


def _down(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import runs

    return runs.down(given.run)


def _scale(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import scaling

    return scaling.scale(given.run, given.counts)


def _doctor(given: argparse.Namespace) -> int:
    from stackrl.runtime.launch import doctor

    return doctor.doctor(given.output)


def _node(given: argparse.Namespace) -> int:
    from stackrl.runtime import node

    return node.main(given.stack)


def _version() -> str:
    from importlib.metadata import version

    return f"stackrl {version('stackrl')}"


class _Parser(argparse.ArgumentParser):
    """Ends a usage error with what to type next."""

    def error(self, message: str) -> None:
        self.print_usage(sys.stderr)
        self.exit(2, f"stackrl: {message}\nhow it is used: `{self.prog} --help`\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="stackrl",
        description="Reinforcement learning of a language model from one YAML file.",
        epilog=f"First steps: `stackrl doctor`, `stackrl plan {FIRST}`, `stackrl launch {FIRST}`.",
    )
    parser.set_defaults(run_verb=None)
    parser.add_argument("--version", action="store_true", help="print the version")
    verbs = parser.add_subparsers(title="verbs", metavar="VERB")

    def verb(
        name: str, function: Callable[[argparse.Namespace], int], help: str, **more
    ) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".", **more)
        made.set_defaults(run_verb=function)
        return made

    init = verb("init", _init, "write a new stack file")
    init.add_argument(
        "name", nargs="?", default="my-run", help="its name, or its path (default: %(default)s)"
    )
    init.add_argument(
        "--template", choices=("cpu", "gpu"), default="cpu", help="what to start from (%(default)s)"
    )
    init.add_argument("--force", action="store_true", help="replace a file that is there")

    validate = verb("validate", _validate, "check stack files and show everything that is wrong")
    validate.add_argument("files", nargs="+", metavar="FILE")
    validate.add_argument(
        "--on-node", action="store_true", help="refuse what the runtime cannot do yet, not warn"
    )
    _sets(validate)
    _output(validate, "text", "json")

    show = verb("show", _show, "print a stack with its defaults filled in")
    show.add_argument("file", metavar="FILE")
    _sets(show)
    _output(show, "yaml", "json")

    schema = verb(
        "schema", _schema, "print the JSON Schema of stack files, or (markdown) the reference of all keys"
    )
    _output(schema, "json", "markdown")

    plan = verb("plan", _plan, "show what would run where, what it needs, costs and takes")
    plan.add_argument("file", metavar="FILE")
    plan.add_argument(
        "--reply", type=_positive, metavar="TOKENS", help="mean tokens that a rollout samples, if known"
    )
    plan.add_argument(
        "--exit-code",
        action="store_true",
        help="1 unless a run of this name is at work and has this very plan (0)",
    )
    _sets(plan)
    _output(plan, "table", "json")

    launch = verb(
        "launch", _launch, "run a stack on this machine, a Slurm cluster or a cloud", aliases=["up"]
    )
    launch.add_argument(
        "file", metavar="FILE", nargs="?", help="the stack; with --resume: what it goes on with"
    )
    launch.add_argument(
        "--infra",
        metavar="WHERE",
        help="local (the default), slurm[/CLUSTER[/PARTITION]], a cloud of SkyPilot's (aws, gcp, k8s …), "
        "or sky: whichever of the stack's resources SkyPilot finds cheapest",
    )
    launch.add_argument("-d", "--detach", action="store_true", help="return once it has started")
    launch.add_argument("--resume", metavar="RUN", help="go on with a run that ended early")
    launch.add_argument(
        "--from",
        dest="origin",
        metavar="RUN@STEP",
        help="begin a new run at a checkpoint of another one: RUN@50, RUN@latest",
    )
    _sets(launch)

    status = verb("status", _status, "show all runs, or one")
    status.add_argument("run", metavar="RUN", nargs="?", help=_RUN_HELP)
    _output(status, "text", "json")

    logs = verb("logs", _logs, "print the logs of a run")
    logs.add_argument("run", metavar="RUN", nargs="?", default="latest", help=_RUN_HELP)
    logs.add_argument("--role", help="only this: trainer, engine-0, orchestrator …")
    logs.add_argument("-f", "--follow", action="store_true", help="go on until the run ends")
    logs.add_argument("--attempt", type=_natural, help="of an earlier start of the run (default: the last)")
    logs.add_argument(
        "-n", "--lines", type=_natural, default=50, help="last lines of each (default: %(default)s)"
    )

    watch = verb("watch", _watch, "show a run live; Ctrl-C leaves it running")
    watch.add_argument("run", metavar="RUN", nargs="?", default="latest", help=_RUN_HELP)

    audit = verb("audit", _audit, "prove from a run's books that nothing was lost or trained twice")
    audit.add_argument("run", metavar="RUN", nargs="?", default="latest", help=_RUN_HELP)
    _output(audit, "text", "json")

    report = verb("report", _report, "write a run's report, an HTML file that needs nothing else")
    report.add_argument("run", metavar="RUN", nargs="?", default="latest", help=_RUN_HELP)
    report.add_argument(
        "-o", "--output", metavar="FILE", help="where to (default: report.html in its folder)"
    )

    export = verb("export", _export, "write a checkpoint of a run as a Hugging Face folder")
    export.add_argument(
        "origin",
        metavar="RUN[@STEP]",
        nargs="?",
        default="latest",
        help="a run and an optimizer step at which it was saved (default: the newest of the latest run)",
    )
    export.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        help="the folder to make (default: exports/step-… in the run's folder)",
    )
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16"), help="type of the weights (default: the stack's)"
    )
    export.add_argument("--force", action="store_true", help="replace a model that is there")

    evaluation = verb(
        "eval", _eval, "put a stack's environments to a model behind an OpenAI-compatible endpoint"
    )
    evaluation.add_argument(
        "what", metavar="FILE_OR_RUN", help="a stack file, or a run; its held-out environments, if it has any"
    )
    evaluation.add_argument(
        "--endpoint", required=True, metavar="URL", help="base of its API, such as http://localhost:8000/v1"
    )
    evaluation.add_argument("--model", required=True, metavar="NAME", help="the model's name there")
    evaluation.add_argument("--secret", metavar="NAME", help="the environment variable that holds its key")
    evaluation.add_argument(
        "--prompts", type=_positive, metavar="N", help="of each environment (default: evaluate.prompts)"
    )
    evaluation.add_argument(
        "--samples", type=_positive, metavar="K", help="answers to each (default: evaluate.samples)"
    )
    evaluation.add_argument(
        "--requests", type=_positive, default=32, metavar="N", help="rollouts at once (default: %(default)s)"
    )
    evaluation.add_argument("--greedy", action="store_true", help="the likeliest tokens, one answer each")
    _sets(evaluation)
    _output(evaluation, "table", "json")

    ports = verb("ports", _ports, "list the ports that a run listens on, and what protects them")
    ports.add_argument("run", metavar="RUN", nargs="?", default="latest", help=_RUN_HELP)
    _output(ports, "text", "json")

    diff = verb("diff", _diff, "show in what two runs differ")
    diff.add_argument("left", metavar="RUN", help=_RUN_HELP)
    diff.add_argument("right", metavar="RUN", help=_RUN_HELP)
    _output(diff, "table", "json")

    execute = verb(
        "exec", _execute, "run a command on a node of a run, as in `stackrl exec RUN -- nvidia-smi`"
    )
    execute.add_argument("run", metavar="RUN", help=_RUN_HELP)
    execute.add_argument("--node", type=_natural, default=0, help="which of its nodes (default: %(default)s)")
    execute.add_argument(
        "command", metavar="COMMAND", nargs="+", help="after `--`, so that its options are its own"
    )

    down = verb("down", _down, "end a run and everything it started")
    down.add_argument("run", metavar="RUN", help=_RUN_HELP)

    scale = verb("scale", _scale, "give a run that is at work more or fewer engines")
    scale.add_argument("run", metavar="RUN", help=_RUN_HELP)
    scale.add_argument(
        "counts", metavar="POOL=N", nargs="+", help="inference=2, or prefill=1 decode=4: engines of a pool"
    )

    doctor = verb("doctor", _doctor, "check whether this machine is ready for a run")
    _output(doctor, "text", "json")

    node = verb("node", _node, "work as a node of a run (this is what machines call)")
    node.add_argument("stack", metavar="FILE_OR_RUN", help="a stack file, or the folder of a run")
    return parser


_RUN_HELP = "its id, the beginning of it, or `latest`"


def _sets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a value of the stack, as in --set stages.short.steps=10",
    )


def _output(parser: argparse.ArgumentParser, *kinds: str) -> None:
    parser.add_argument(
        "-o", "--output", choices=kinds, default=kinds[0], help="form of the result (%(default)s)"
    )


def _positive(text: str) -> int:
    if (number := _natural(text)) == 0:
        raise argparse.ArgumentTypeError("0 is too few")
    return number


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)

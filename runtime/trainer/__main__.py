"""`python -m stackrl.runtime.trainer RUN_DIR`: one rank of the trainer (RANK, WORLD_SIZE, LOCAL_RANK)."""

from __future__ import annotations

import logging
import os
import sys
import threading
import traceback

from stackrl.runtime import heartbeat
from stackrl.runtime.checkpoints import CheckpointError
from stackrl.runtime.own_code import OwnCodeError
from stackrl.runtime.run import RunFolder, run_token
from stackrl.runtime.trainer.models.families import ModelError
from stackrl.runtime.trainer.ranks import Rank, RanksError, claim_cores, join, leave
from stackrl.runtime.trainer.run import run_trainer
from stackrl.runtime.trainer.shared_gpu import SharedGpuError, take_what_is_left
from stackrl.runtime.trainer.stored import ChangedError
from stackrl.runtime.transport.batches import TransportError
from stackrl.runtime.transport.messages import MessageError
from stackrl.runtime.transport.weights import WeightError
from stackrl.schemas.degrees import degrees_of

BAD_INPUT = (ModelError, ChangedError, OwnCodeError)
"""What will not get better by trying again."""
FOR_PEOPLE = (
    *BAD_INPUT,
    RanksError,
    SharedGpuError,
    CheckpointError,
    TransportError,
    MessageError,
    WeightError,
)


FAILED, REFUSED = 1, 2
"""Exit codes; the node program does not start a role again that ends with the second."""


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
    threading.excepthook = end_with_thread
    if len(sys.argv) != 2:
        print("usage: python -m stackrl.runtime.trainer RUN_DIR", file=sys.stderr)
        return REFUSED
    run, me = RunFolder(sys.argv[1]), Rank.of(os.environ)
    heartbeat.start(f"trainer-{me.rank}")
    stack = run.stack()
    claim_cores(stack.trainer.threads)
    try:
        endpoints = run.endpoints()
        heartbeat.note("meeting the other ranks")
        degrees = degrees_of(stack, me.ranks)
        meshes = join(me, endpoints.rendezvous, stack.device or "cpu", degrees)
        if stack.roles.inference and stack.roles.inference.share:
            heartbeat.note("waiting for the engine on the same GPU")
            take_what_is_left(endpoints.engines[0], run_token())
        run_trainer(run, me, meshes, run_token())
        leave()
    except Exception as error:
        return explain(error)
    return 0


def explain(error: BaseException) -> int:
    """Say what ends this process, in its last line; the exit code for it."""
    if not isinstance(error, FOR_PEOPLE):
        traceback.print_exception(error)
    print(f"error: {error or type(error).__name__}", file=sys.stderr)
    return REFUSED if isinstance(error, BAD_INPUT) else FAILED


def end_with_thread(failed: threading.ExceptHookArgs) -> None:
    """A thread that fails ends the process, whatever its main thread waits for."""
    if failed.exc_value is None or isinstance(failed.exc_value, SystemExit):
        return
    code = explain(failed.exc_value)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())

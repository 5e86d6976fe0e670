"""`python -m stackrl.runtime.trainer RUN_DIR`: one rank of the trainer (RANK, WORLD_SIZE, LOCAL_RANK)."""

from __future__ import annotations

import logging
import os
import sys
import traceback

from stackrl.runtime.checkpoints import CheckpointError
from stackrl.runtime.run import RunFolder, run_token
from stackrl.runtime.trainer.models.families import ModelError
from stackrl.runtime.trainer.ranks import Rank, RanksError, claim_cores, join, leave
from stackrl.runtime.trainer.run import run_trainer
from stackrl.runtime.trainer.shared_gpu import SharedGpuError, take_what_is_left
from stackrl.runtime.transport.batches import TransportError
from stackrl.runtime.transport.messages import MessageError
from stackrl.runtime.transport.weights import WeightError

FOR_PEOPLE = (
    ModelError,
    RanksError,
    SharedGpuError,
    CheckpointError,
    TransportError,
    MessageError,
    WeightError,
)


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request
    run, me = RunFolder(sys.argv[1]), Rank.of(os.environ)
    stack = run.stack()
    claim_cores(stack.trainer.threads)
    try:
        endpoints = run.endpoints()
        mesh = join(me, endpoints.rendezvous, stack.device or "cpu")
        if stack.roles.inference and stack.roles.inference.share:
            take_what_is_left(endpoints.engines[0], run_token())
        run_trainer(run, me, mesh, run_token())
        leave()
    except Exception as error:
        if not isinstance(error, FOR_PEOPLE):
            traceback.print_exc()
        print(f"error: {error or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

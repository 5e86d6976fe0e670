"""One trainer rank of a run: the sharded model, brought to where the run goes on, and its loop."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing

from stackrl.runtime import checkpoints, heartbeat
from stackrl.runtime.run import RunFolder
from stackrl.runtime.trainer.learner import Learner
from stackrl.runtime.trainer.ledger import Ledger
from stackrl.runtime.trainer.loop import Loop
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.parallelize import build
from stackrl.runtime.trainer.ranks import Rank, RanksError, broke_off
from stackrl.runtime.trainer.reference import make_reference
from stackrl.runtime.transport.weights import make_publisher
from stackrl.schemas.comparison import trainer_keeps_reference
from stackrl.schemas.split import has_engines

log = logging.getLogger(__name__)


def run_trainer(run: RunFolder, me: Rank, meshes: Meshes, token: str) -> None:
    """Train until the orchestrator ends the run; rank 0 then leaves the final model in the run's folder.

    Raises RanksError naming the operation where another rank breaks off or does not answer in time.
    """
    stack = run.stack()
    heartbeat.note("loading the model")
    compute = stack.trainer.compute_dtype or stack.model.dtype
    model = build(run.model, stack.trainer, compute, meshes, stack.seed)
    with ExitStack() as resources:
        publisher = None
        if me.rank == 0 and has_engines(stack):
            publisher = resources.enter_context(closing(make_publisher(run, stack, token)))
        reference = None
        if trainer_keeps_reference(stack):
            heartbeat.note("loading the reference")
            reference = make_reference(model, run.model, stack.trainer, compute, meshes)
        learner = Learner(stack, model, publisher, reference)
        found = run.restore()
        if found:
            heartbeat.note(f"restoring {found}")
            checkpoints.verify(found, contents=False)
            learner.restore(found)
            log.info("resumed from %s", found)
        ledger, context = Ledger.restored(me.rank, found), meshes.degrees.context
        loop = Loop(run, stack, learner, ledger, rank=me.rank, ranks=me.ranks, context=context, token=token)
        try:
            reason = loop.until_end()
        except RuntimeError as error:
            if not broke_off(error):
                raise
            raise RanksError(
                f"trainer rank {me.rank} of {me.ranks} lost another rank (they met at "
                f"{run.endpoints().rendezvous}) at: {loop.doing}; the other rank's log says more: {error}"
            ) from error
    log.info("the run is over after %d optimizer steps: %s", learner.progress.index, reason)
    if reason == "finished":
        heartbeat.note("writing the final model")
        learner.export(run.model, run.final, write=me.rank == 0)

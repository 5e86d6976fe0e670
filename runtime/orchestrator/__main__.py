"""``python -m stackrl.runtime.orchestrator RUN_DIR``: the orchestrator's process.

SIGUSR2 asks it to end after the step that runs, with a checkpoint; SIGTERM ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from stackrl.runtime import heartbeat
from stackrl.runtime.data.files import DataError
from stackrl.runtime.environments import EnvironmentRefused
from stackrl.runtime.inference.client import Engine, EngineError
from stackrl.runtime.orchestrator.chat import TemplateError
from stackrl.runtime.orchestrator.errors import BadInput, GuardStop, OrchestratorError, first_cause
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.orchestrator.membership import Connect
from stackrl.runtime.orchestrator.stop import Stop
from stackrl.runtime.orchestrator.turns import put_the_loop_first
from stackrl.runtime.run import RunFolder, run_token
from stackrl.runtime.transport.batches import TransportError
from stackrl.schemas.stack import longest_rollout

FOR_PEOPLE = (OrchestratorError, TransportError, EngineError, EnvironmentRefused, TemplateError, DataError)
"""Errors whose text says all that a person needs; others come with their traceback."""
HOPELESS = (EnvironmentRefused, TemplateError, BadInput, DataError)
"""Errors that trying again does not mend."""
FAILED, USELESS_TO_REPEAT, STOPPED_BY_GUARD = 1, 2, 3
ENDED = 128 + signal.SIGTERM
STOP_SIGNAL = signal.SIGUSR2
_MARGIN = 60.0
"""Seconds by which a client is more patient than any rollout, whose own limit is the one to speak."""

log = logging.getLogger("stackrl.orchestrator")


async def _run(run: RunFolder, token: str) -> None:
    loop, task, stop = asyncio.get_running_loop(), asyncio.current_task(), Stop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    loop.add_signal_handler(STOP_SIGNAL, stop.ask)
    connect = _connector(run, token)
    clients = [connect(url, pool) for url, pool in run.endpoints().members.items()]
    await orchestrate(run, token, clients, stop, connect if clients else None)


def _connector(run: RunFolder, token: str) -> Connect:
    """Makes clients that give a reply all the time that its rollout has."""
    limit = longest_rollout(run.stack()) + _MARGIN
    return lambda url, pool: Engine(url, token, timeout=limit, pool=pool)


def main() -> int:
    """0 when all stages are done, or the run was asked to stop and is saved.

    After an error, which the last line on stderr tells: 2 where trying again does not mend it, 3 where a
    guard stopped the run, else 1.
    """
    if len(sys.argv) != 2:
        print("error: give the folder of a run", file=sys.stderr)
        return USELESS_TO_REPEAT
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    heartbeat.start("orchestrator")
    put_the_loop_first()
    try:
        asyncio.run(_run(RunFolder(sys.argv[1]), run_token()))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return ENDED
    except Exception as error:
        cause = first_cause(error)
        plain = isinstance(cause, FOR_PEOPLE) or getattr(cause, "filename", None) is not None
        if not plain:
            log.exception("the orchestrator failed")
        print(f"error: {cause}" if plain else f"error: {cause!r}", file=sys.stderr)
        if isinstance(cause, GuardStop):
            return STOPPED_BY_GUARD
        return USELESS_TO_REPEAT if isinstance(cause, HOPELESS) else FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())

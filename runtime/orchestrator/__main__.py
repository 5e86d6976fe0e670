"""``python -m stackrl.runtime.orchestrator RUN_DIR``: the orchestrator's process."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from stackrl.runtime.environments import EnvironmentRefused
from stackrl.runtime.inference.client import Engine, EngineError
from stackrl.runtime.orchestrator.chat import TemplateError
from stackrl.runtime.orchestrator.errors import OrchestratorError, first_cause
from stackrl.runtime.orchestrator.loop import orchestrate
from stackrl.runtime.run import RunFolder, run_token
from stackrl.runtime.transport.batches import TransportError
from stackrl.schemas.stack import settings_of

FOR_PEOPLE = (OrchestratorError, TransportError, EngineError, EnvironmentRefused, TemplateError)
"""Errors whose text says all that a person needs; others come with their traceback."""
ENDED = 128 + signal.SIGTERM
_MARGIN = 60.0
"""Seconds by which a client is more patient than any rollout, whose own limit is the one to speak."""

log = logging.getLogger("stackrl.orchestrator")


async def _run(run: RunFolder, token: str) -> None:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    await orchestrate(run, token, _engines(run, token))


def _engines(run: RunFolder, token: str) -> list[Engine]:
    """Clients of all engines, which give a reply all the time that its rollout has."""
    stack = run.stack()
    longest = max(settings_of(stack, stage).sampling.timeout for stage in stack.stages)
    return [Engine(url, token, timeout=longest + _MARGIN) for url in run.endpoints().engines]


def main() -> int:
    """0 when all stages are done, 1 after an error that the last line on stderr tells."""
    if len(sys.argv) != 2:
        print("error: give the folder of a run", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        asyncio.run(_run(RunFolder(sys.argv[1]), run_token()))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return ENDED
    except Exception as error:
        cause = first_cause(error)
        if not isinstance(cause, FOR_PEOPLE):
            log.exception("the orchestrator failed")
        print(f"error: {cause}" if isinstance(cause, FOR_PEOPLE) else f"error: {cause!r}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

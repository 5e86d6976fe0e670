"""Metrics to Weights & Biases: on its server with a key (WANDB_API_KEY), else in the run's folder."""

from __future__ import annotations

from typing import Any

from stackrl.runtime.run import RunFolder
from stackrl.schemas.stack import Stack, Wandb

_INIT_TIMEOUT = 60.0


class WandbRun:
    """One run of ours is one run of wandb, under our id. Only metrics and the stack are sent: no console
    output, code, command line or description of the machine."""

    def __init__(self, run: RunFolder, stack: Stack, settings: Wandb, *, offline: bool) -> None:
        try:
            import wandb
        except ImportError as error:
            raise SystemExit(
                f"error: the stack asks for `monitors.wandb`, and wandb cannot be imported ({error}); "
                "install it with `pip install 'stackrl[wandb]'` or remove the key"
            ) from None
        self._wandb = wandb
        try:
            self._run = wandb.init(
                project=settings.project,
                entity=settings.entity,
                id=run.id,
                name=run.id,
                dir=str(run.path),
                mode="offline" if offline else "online",
                resume=None if offline else "allow",
                config=stack.model_dump(mode="json"),
                settings=wandb.Settings(
                    init_timeout=_INIT_TIMEOUT,
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    x_disable_meta=True,
                    x_disable_machine_info=True,
                    x_disable_stats=True,
                ),
            )
        except wandb.Error as error:
            raise SystemExit(
                f"error: Weights & Biases could not be reached within {_INIT_TIMEOUT:.0f} s: {error}; "
                "check WANDB_API_KEY and the network, or unset WANDB_API_KEY to record offline"
            ) from error
        self._run.define_metric("*", step_metric="index")

    def log(self, record: dict[str, Any]) -> None:
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float)}
        self._run.log(numbers)

    def event(self, record: dict[str, Any]) -> None:
        """The evaluations: before and after a stage are one curve, each environment held out is another."""
        if record["event"] == "evaluated":
            name = record["stage"] if record["when"] in ("before", "after") else record["when"]
            scores = {
                f"evaluation/{name}/{key}": value
                for key, value in record.items()
                if isinstance(value, float) and key != "time"
            }
            self.log(scores | {key: record[key] for key in ("time", "index")})

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))
        self._wandb.teardown()  # waits for the process that writes

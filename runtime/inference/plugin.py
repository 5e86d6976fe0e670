"""What vLLM loads of us in each of its processes (entry point group ``vllm.general_plugins``)."""

from __future__ import annotations

import logging

from stackrl.runtime import heartbeat

BACKEND = "stackrl"

_FALSE_ALARMS = "vllm.model_executor.model_loader.reload.layerwise"
"""Warns at each update of layers that have no weights of their own; receiver.py looks closer."""


def register() -> None:
    """Make ``--weight-transfer-config {"backend": "stackrl"}`` known. May be called more than once.

    From here on the process gives signs of life; those that vLLM forks of it do too.
    """
    heartbeat.start(follow_forks=True)
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    logging.getLogger(_FALSE_ALARMS).setLevel(logging.ERROR)
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "stackrl.runtime.inference.receiver", "WeightReceiver"
        )

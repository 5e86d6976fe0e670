"""Losses: pure functions from trained tokens to a loss per token, each in its own file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from stackrl.runtime.trainer.losses.aipo import aipo
from stackrl.runtime.trainer.losses.grpo import grpo
from stackrl.runtime.trainer.losses.normalization import token_weights
from stackrl.runtime.trainer.losses.supervised import supervised
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.algorithm import Loss

__all__ = ["LOSSES", "TokenLoss", "TrainedTokens", "make", "supervised", "token_weights"]

LOSSES = {"aipo": aipo, "grpo": grpo}
"""By the stack's `algorithm.loss.type`."""


def make(settings: Loss) -> Callable[[TrainedTokens], TokenLoss]:
    """The loss that ``settings`` ask for."""
    return partial(LOSSES[settings.type], settings)

"""Losses: pure functions from trained tokens to a loss per token, each in its own file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from stackrl.runtime.trainer.losses.aipo import aipo
from stackrl.runtime.trainer.losses.cispo import cispo
from stackrl.runtime.trainer.losses.decoupled_ppo import decoupled_ppo
from stackrl.runtime.trainer.losses.distillation import distillation
from stackrl.runtime.trainer.losses.divergence import estimate, with_divergence
from stackrl.runtime.trainer.losses.dppo import dppo
from stackrl.runtime.trainer.losses.gmpo import gmpo
from stackrl.runtime.trainer.losses.grpo import grpo
from stackrl.runtime.trainer.losses.gspo import gspo
from stackrl.runtime.trainer.losses.icepop import icepop
from stackrl.runtime.trainer.losses.ipo import ipo
from stackrl.runtime.trainer.losses.normalization import token_weights
from stackrl.runtime.trainer.losses.own import own
from stackrl.runtime.trainer.losses.reinforce import reinforce
from stackrl.runtime.trainer.losses.sapo import sapo
from stackrl.runtime.trainer.losses.sequences import Sequences
from stackrl.runtime.trainer.losses.supervised import supervised
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.runtime.trainer.losses.topr import topr
from stackrl.schemas.losses import Loss, PythonLoss

__all__ = [
    "LOSSES",
    "Sequences",
    "TokenLoss",
    "TrainedTokens",
    "distillation",
    "estimate",
    "make",
    "supervised",
    "token_weights",
]

LOSSES = {
    "aipo": aipo,
    "grpo": grpo,
    "dapo": grpo,
    "dr_grpo": grpo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "decoupled_ppo": decoupled_ppo,
    "dppo": dppo,
    "ipo": ipo,
    "icepop": icepop,
    "topr": topr,
    "sapo": sapo,
    "reinforce": reinforce,
}
"""By the stack's `algorithm.loss.type`; beside them there is `python`, a function of the user's own."""


def make(settings: Loss, *, refers: bool = False) -> Callable[[TrainedTokens], TokenLoss]:
    """The loss that ``settings`` ask for. ``refers``: whether its tokens have logprobs of a reference.

    Raises OwnCodeError where they name a function that is not there, or that fails when it is tried.
    """
    if isinstance(settings, PythonLoss):
        loss = own(settings, refers=refers or settings.kl is not None)
    else:
        loss = partial(LOSSES[settings.type], settings)
    return loss if settings.kl is None else partial(with_divergence, settings.kl, loss)

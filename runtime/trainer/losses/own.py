"""A loss of the user's own: a function of trained tokens, found by where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from stackrl.runtime.own_code import OwnCodeError, load_function
from stackrl.runtime.trainer.losses.sequences import Sequences
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import PythonLoss

GROUP = "stackrl.losses"
"""Of entry points."""


def own(settings: PythonLoss, *, refers: bool = False) -> Callable[[TrainedTokens], TokenLoss]:
    """The function that ``settings`` name. ``refers``: whether its tokens have logprobs of a reference.

    Raises OwnCodeError where there is none, or where it fails on a few tokens or on none, and when it is
    called and gives no loss for each token.
    """
    function = load_function(settings.path, GROUP)

    def loss(tokens: TrainedTokens) -> TokenLoss:
        found = function(tokens, **settings.arguments)
        return _checked(TokenLoss(found) if isinstance(found, Tensor) else found, tokens, settings.path)

    _try(loss, settings.path, refers)
    return loss


def _try(loss: Callable[[TrainedTokens], TokenLoss], path: str, refers: bool) -> None:
    """Better now than after an hour: micro-batches that have nothing for it are rare."""
    for number in (3, 0):
        tokens = _tokens(number, refers)
        try:
            values = loss(tokens).values
        except OwnCodeError:
            raise
        except (Exception, SystemExit) as error:
            raise OwnCodeError(
                f"{path} failed when it was tried with {number} tokens, which a micro-batch may have: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not values.requires_grad:
            raise OwnCodeError(f"{path} gave a loss without a gradient; make it from tokens.logprobs")


def _tokens(number: int, refers: bool) -> TrainedTokens:
    """Of one sequence, where there are any, on the device that is trained on."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logprobs = torch.linspace(-2.0, -0.5, number, device=device)
    of, length = torch.zeros(number, dtype=torch.int64), torch.tensor([number])
    return TrainedTokens(
        logprobs=logprobs.clone().requires_grad_(),
        engine_logprobs=logprobs - 0.1,
        advantages=torch.ones_like(logprobs),
        ages=torch.zeros_like(logprobs),
        sequences=Sequences(of.to(device), length.to(device)),
        reference=logprobs - 0.2 if refers else None,
    )


def _checked(loss: Any, tokens: TrainedTokens, path: str) -> TokenLoss:
    if not isinstance(loss, TokenLoss):
        raise OwnCodeError(f"{path} gave {type(loss).__name__}, not a tensor or a TokenLoss")
    for part in (loss.values, loss.capped):
        if part is not None and part.shape != tokens.logprobs.shape:
            raise OwnCodeError(
                f"{path} gave a loss of shape {list(part.shape)} for {len(tokens.logprobs)} tokens; it has "
                "to give one number for each token"
            )
    return loss

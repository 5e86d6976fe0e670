"""A loss of the user's own: a function of trained tokens, found by where it stands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from stackrl.runtime.own_code import OwnCodeError, load_function
from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens
from stackrl.schemas.losses import PythonLoss

GROUP = "stackrl.losses"
"""Of entry points."""


def own(settings: PythonLoss) -> Callable[[TrainedTokens], TokenLoss]:
    """The function that ``settings`` name. Raises OwnCodeError where there is none, and when it is called and
    gives no loss for each token."""
    function = load_function(settings.path, GROUP)

    def loss(tokens: TrainedTokens) -> TokenLoss:
        found = function(tokens, **settings.arguments)
        return _checked(TokenLoss(found) if isinstance(found, Tensor) else found, tokens, settings.path)

    return loss


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

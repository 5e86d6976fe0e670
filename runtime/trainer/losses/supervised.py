"""Cross-entropy: on demonstrations, and on tokens that are marked for it beside others."""

from __future__ import annotations

from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens


def supervised(tokens: TrainedTokens) -> TokenLoss:
    """−log π."""
    return TokenLoss(-tokens.logprobs)

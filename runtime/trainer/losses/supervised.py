"""Cross-entropy on demonstrations."""

from __future__ import annotations

import torch

from stackrl.runtime.trainer.losses.tokens import TokenLoss, TrainedTokens


def supervised(tokens: TrainedTokens) -> TokenLoss:
    """−log π."""
    return TokenLoss(-tokens.logprobs, capped=torch.zeros_like(tokens.logprobs, dtype=torch.bool))

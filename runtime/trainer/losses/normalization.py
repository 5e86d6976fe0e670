"""The weight of each token in the sum over the step, from denominators that are global.

Because every token's weight is known before the first micro-batch runs, the sum over micro-batches and
ranks does not depend on how the step was cut into them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stackrl.runtime.trainer.losses.sequences import Sequences
from stackrl.schemas.losses import Normalize


def token_weights(
    normalize: Normalize, of: Sequences, *, tokens: int, sequences: int, max_tokens: int
) -> Tensor:
    """float32 [N], one weight per trained token, whose sequences are ``of``.

    ``tokens`` and ``sequences``: trained tokens, and sequences that have any, of the whole step.
    `token`: 1 / tokens; `sequence`: 1 / (sequences · trained tokens of the sequence); `constant`:
    1 / (sequences · max_tokens).
    """
    if normalize == "token":
        return torch.full_like(of.of, 1.0 / max(1, tokens), dtype=torch.float32)
    if normalize == "constant":
        return torch.full_like(of.of, 1.0 / (max(1, sequences) * max_tokens), dtype=torch.float32)
    trained = of.lengths.index_select(0, of.of)
    return 1.0 / (max(1, sequences) * trained.float())

"""The weight of each token in the sum over the step, from denominators that are global.

Because every token's weight is known before the first micro-batch runs, the sum over micro-batches and
ranks does not depend on how the step was cut into them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stackrl.schemas.algorithm import Normalize


def token_weights(
    normalize: Normalize, documents: Tensor, *, tokens: int, sequences: int, max_tokens: int
) -> Tensor:
    """float32 [N], one weight per trained token.

    ``documents`` int64 [N]: which document of the micro-batch each trained token belongs to; a document lies
    whole in one micro-batch. ``tokens`` and ``sequences``: trained tokens and documents of the whole step.
    `token`: 1 / tokens; `sequence`: 1 / (sequences · trained tokens of the document); `constant`:
    1 / (sequences · max_tokens).
    """
    if normalize == "token":
        return torch.full_like(documents, 1.0 / max(1, tokens), dtype=torch.float32)
    if normalize == "constant":
        return torch.full_like(documents, 1.0 / (max(1, sequences) * max_tokens), dtype=torch.float32)
    trained = torch.bincount(documents)[documents]
    return 1.0 / (max(1, sequences) * trained.float())

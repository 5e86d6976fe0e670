"""The loss of rows that are held out: the model as it is, forward only, without gradients."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from stackrl.runtime.trainer.forward_only import forward_only
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.parallelize import computes_on
from stackrl.runtime.trainer.prepared import EMPTY, prepare
from stackrl.runtime.transport.messages import MicroBatch


def validate(model: Decoder, micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """Mean −log π over the marked tokens of all ranks' ``micro_batches``, as a metric; all call it together.

    Every rank has as many micro-batches as the others, some of them empty. A loss that is not finite is left
    out.
    """
    began, device = time.monotonic(), computes_on(model)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    with forward_only(model):
        for micro in micro_batches:
            part = prepare(micro if len(micro.tokens) else EMPTY, device, model.context)
            logprobs, _ = model(part.tokens, part.layout, part.predictors, part.targets, part.temperatures)
            sums += torch.stack([-logprobs.double().sum(), sums.new_tensor(len(part.own))])
    dist.all_reduce(sums)
    total, tokens = sums.tolist()
    loss = total / max(1.0, tokens)
    found = {"validation_tokens": tokens, "seconds_validation": time.monotonic() - began}
    return found | ({"validation_loss": loss} if math.isfinite(loss) else {})

"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from stackrl.schemas.optimizers import Optimizer
from stackrl.schemas.schedules import (
    ConstantSchedule,
    CosineSchedule,
    LinearSchedule,
    Schedule,
    WarmupStableDecaySchedule,
    decay_steps,
)


def rate(step: int, settings: Optimizer, total_steps: int) -> float:
    """The learning rate of ``step``, counted from 0 within a stage of ``total_steps``.

    It grows over w warmup steps as η·(step + 1)/w and has reached η at the last of them; then it is η times
    `share`, which has come down to the schedule's final share where the next stage begins.
    """
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    return settings.learning_rate * share(step, settings.schedule, settings.warmup_steps, total_steps)


def share(step: int, schedule: Schedule, first: int, total_steps: int) -> float:
    """How much of the rate ``schedule``, which begins at step ``first``, leaves at ``step``.

    With f the final share and x = (step − first)/(total_steps − first):

        constant              1
        linear                f + (1 − f)·(1 − x)
        cosine                f + (1 − f)·(1 + cos πx)/2                           (arXiv 1608.03983, eq. 5)
        warmup-stable-decay   f + (1 − f)·min(1, (total_steps − step)/decay_steps)   (arXiv 2405.18392, eq. 1)
    """
    progress = (step - first) / max(1, total_steps - first)
    match schedule:
        case ConstantSchedule():
            return 1.0
        case LinearSchedule():
            left = 1.0 - progress
        case CosineSchedule():
            left = (1.0 + math.cos(math.pi * progress)) / 2
        case WarmupStableDecaySchedule():
            left = min(1.0, (total_steps - step) / decay_steps(schedule.decay_share, total_steps))
    return schedule.final_rate + (1.0 - schedule.final_rate) * left

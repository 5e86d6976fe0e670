"""Whether what is learnt is compared with a fixed reference, and who tells what that one says."""

from __future__ import annotations

from stackrl.schemas.stack import Stack, StageSettings, settings_of
from stackrl.schemas.stages import RlStage


def compares_with_reference(settings: StageSettings) -> bool:
    """Whether a loss of the stage looks at the logprobs of a reference."""
    in_loss = settings.algorithm.loss.kl is not None
    return in_loss or any(environment.component == "ref_kl" for environment in settings.environments)


def trainer_keeps_reference(stack: Stack) -> bool:
    """Whether the trainer tells them, from the weights that the run begins with: no other model is named."""
    rl_stages = (settings_of(stack, stage) for stage in stack.stages if isinstance(stage, RlStage))
    return any(
        compares_with_reference(settings) and settings.algorithm.reference is None for settings in rl_stages
    )

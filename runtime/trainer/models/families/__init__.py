"""From a Hugging Face config to the shape of our decoder: one short file per model family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stackrl.runtime.trainer.models.families import glm4_moe, glm_moe_dsa, llama, minimax_m2, qwen3, qwen3_moe
from stackrl.runtime.trainer.models.shape import ModelError, Shape

__all__ = ["FAMILIES", "ModelError", "config_of", "shape_of"]

FAMILIES: dict[str, Callable[[dict[str, Any]], Shape]] = {
    "llama": llama.shape,
    "qwen3": qwen3.shape,
    "qwen3_moe": qwen3_moe.shape,
    "glm4_moe": glm4_moe.shape,
    "glm_moe_dsa": glm_moe_dsa.shape,
    "minimax_m2": minimax_m2.shape,
}
"""By the config's `model_type`."""
CONFIG = "config.json"


def shape_of(folder: Path) -> Shape:
    """The shape of the model in a Hugging Face ``folder``. Raises ModelError where the trainer lacks it."""
    config = config_of(folder)
    family = config["model_type"]
    if family not in FAMILIES:
        raise ModelError(
            f"the trainer has no model family {family!r} ({folder}); it has {', '.join(FAMILIES)}"
        )
    try:
        return FAMILIES[family](config)
    except KeyError as error:
        raise ModelError(f"{folder / CONFIG} lacks {error.args[0]!r}") from None


def config_of(folder: Path) -> dict[str, Any]:
    """The config of the model in a Hugging Face ``folder``, whatever its family.

    Raises ModelError where there is none, or none that could be trained.
    """
    file = folder / CONFIG
    try:
        config = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise ModelError(f"{folder} has no {CONFIG}: it is not a Hugging Face model folder") from None
    except ValueError as error:
        raise ModelError(f"{file} is damaged: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} does not say which family the model is of: it lacks 'model_type'")
    if config.get("quantization_config"):
        raise ModelError(
            f"the weights in {folder} are quantised ({CONFIG} has quantization_config); "
            "the trainer needs the same model in bfloat16 or float32"
        )
    return config

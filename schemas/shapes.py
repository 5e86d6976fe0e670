"""The shape of the model that a stack names, as far as it can be known without fetching anything.

It is read where it is nearest: in the stack (models made at random), in the config of a local folder or of
the hub's cache on this disk, else in known_models.json, which holds the configs of published models and what
the families' configs say where they are left out.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any

from stackrl.runtime.trainer.models.families import CONFIG, FAMILIES, ModelError, config_of
from stackrl.runtime.trainer.models.families.config import Config, grouped, rope
from stackrl.runtime.trainer.models.families.config import shape as whole
from stackrl.runtime.trainer.models.shape import Experts, GroupedAttention, Layer, Mlp, Shape
from stackrl.schemas.model import ModelSource, PackagedModel, PretrainedModel, RandomModel

TABLE = Path(__file__).parent / "known_models.json"
BYTES_VOCABULARY = 264
"""Rows that the byte tokenizer of random models asks for."""
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")
"""What the families' configs call the number of experts of a layer."""


@dataclass(frozen=True)
class KnownShape:
    """A model of which one knows what it is made of."""

    name: str
    """As the stack names it."""
    family: str
    """The config's `model_type`."""
    shape: Shape
    source: str
    """Where that was read, for people."""


def shape_of(model: ModelSource, *, cached: bool = True) -> KnownShape | None:
    """None where nothing here says what ``model`` is made of, or what is said makes no model.

    ``cached``: look into the hub's cache, too.
    """
    match model:
        case RandomModel():
            config = {"vocab_size": BYTES_VOCABULARY, **model.config, "model_type": model.architecture}
            found = config, "the stack's own model.config"
            name = f"random {model.architecture}"
        case PackagedModel():
            found, name = _of_package(model.file), model.file
        case PretrainedModel():
            found, name = _of_folder(model, cached) or _of_table(model.id), model.id
    if found is None:
        return None
    config, source = found
    try:
        return KnownShape(name, config["model_type"], _made(config), source)
    except (ModelError, KeyError, TypeError, ZeroDivisionError):
        return None  # whoever makes the model says what is wrong with it


def experts_in(shape: Shape) -> int | None:
    """Experts of each layer that has any; None where none has."""
    return next((layer.mlp.number for layer in shape.layers if isinstance(layer.mlp, Experts)), None)


def heads_divide(shape: Shape, ranks: int) -> bool:
    """Whether so many ranks can share the heads of attention; heads of keys are repeated where they are fewer
    (trainer/context_parallel.py). Latent attention is not divided by heads."""
    for layer in shape.layers:
        if isinstance(layer.attention, GroupedAttention):
            keys = layer.attention.key_value_heads
            if layer.attention.heads % ranks or layer.attention.heads % (keys * ranks // gcd(ranks, keys)):
                return False
    return True


def _made(config: Config) -> Shape:
    family = config["model_type"]
    config = {**_table()["families"].get(family, {}), **config}
    return FAMILIES[family](config) if family in FAMILIES else _plain(config)


def _plain(config: Config) -> Shape:
    """A dense model that runs through the code of transformers: its sizes have the usual names."""
    if any(config.get(key) for key in EXPERT_COUNTS):
        raise ModelError("a mixture of experts of a family that the trainer does not have")
    layer = Layer(grouped(config), Mlp(config["intermediate_size"]))
    turning = rope({key: value for key, value in config.items() if not key.startswith("rope_")})
    config = {**config, "hidden_act": "silu", "attention_dropout": 0.0}  # they change no size
    return whole(config, turning, [layer] * config["num_hidden_layers"])


def _of_folder(model: PretrainedModel, cached: bool) -> tuple[Config, str] | None:
    """From the folder that is named, or the hub's cache."""
    folder: Path | None = Path(model.id).expanduser()
    source = f"{CONFIG} in {model.id}"
    if not folder.is_dir():
        folder, source = _in_cache(model) if cached else None, f"{CONFIG} in the hub's cache"
    if folder is None:
        return None
    try:
        return config_of(folder), source
    except (ModelError, OSError):
        return None


def _in_cache(model: PretrainedModel) -> Path | None:
    """The snapshot that huggingface_hub would take without network."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    root = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    repository = root / f"models--{model.id.replace('/', '--')}"
    revision = model.revision or "main"
    try:
        commit = (repository / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        commit = revision
    folder = repository / "snapshots" / commit
    return folder if (folder / CONFIG).is_file() else None


def _of_table(name: str) -> tuple[Config, str] | None:
    wanted = name.lower()
    for entry in _table()["models"]:
        if wanted in map(str.lower, entry["names"]):
            return entry["config"], "the table of known models"
    return None


def _of_package(file: str) -> tuple[Config, str] | None:
    """A file is called after the model that it holds: the longest name that it begins with."""
    names = [name for entry in _table()["models"] for name in entry["names"]]
    fitting = [name for name in names if file.lower().startswith(name.rpartition("/")[2].lower())]
    return _of_table(max(fitting, key=len)) if fitting else None


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_bytes())

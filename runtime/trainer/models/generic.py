"""Models that transformers knows and the trainer has no family for, under the decoder's interface.

transformers' own code makes the hidden states, on packed tokens; our head scores them. What this cannot do
exactly is refused by name: a head that does more than a product, names in files that are not those in memory,
layers that look across documents.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel, __version__
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto import CONFIG_MAPPING, AutoModelForCausalLM

from stackrl.runtime.trainer.context import Context
from stackrl.runtime.trainer.head import token_logprobs
from stackrl.runtime.trainer.models.documents import Documents, layout
from stackrl.runtime.trainer.models.families import FAMILIES, config_of
from stackrl.runtime.trainer.models.shape import ModelError, Names
from stackrl.schemas.degrees import Degrees

PROBE = 7
"""Tokens of each document that `check` looks at."""
DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""By type of the matrix products: what rounding may change in a logprob. A wrong token changes more."""


class Generic(nn.Module):
    """A causal language model of transformers. Parameters have the names that they have there."""

    names = Names()

    def __init__(self, folder: Path, *, head_chunk: int = 512) -> None:
        """Of the config in ``folder``, without weights; ``head_chunk``: tokens per chunk of the head.

        Raises ModelError where the model cannot be trained so.
        """
        super().__init__()
        whole = _model_of(folder)
        self.family = whole.config.model_type
        self.head_chunk = head_chunk
        self.context = Context()
        self.__dict__["_whole"] = whole  # no child: its parts are, under their own names
        self._body_name = whole.base_model_prefix
        self.add_module(self._body_name, whole.base_model)
        self.lm_head = None if whole.config.get_text_config().tie_word_embeddings else whole.lm_head
        with torch.device("cpu"):
            self.scale = _head_scale(whole, self._body_name)
        self.body.eval()  # dropout would make other distributions than the engine's

    @property
    def body(self) -> nn.Module:
        """Everything below the head."""
        return getattr(self, self._body_name)

    @property
    def layers(self) -> nn.ModuleList:
        """The decoder's: of the body's lists of modules, the one that holds most of its weights."""
        lists = [module for module in self.body.modules() if isinstance(module, nn.ModuleList)]
        return max(lists, key=lambda modules: sum(weight.numel() for weight in modules.parameters()))

    @property
    def head_weight(self) -> Tensor:
        """[V, H]."""
        return (self.body.get_input_embeddings() if self.lm_head is None else self.lm_head).weight

    def forward(
        self, tokens: Tensor, documents: Documents, predictors: Tensor, targets: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As `Decoder.forward`. Positions that restart are what keeps documents apart."""
        hidden = self.body(
            input_ids=tokens[None], position_ids=documents.positions[None], use_cache=False
        ).last_hidden_state[0]
        return token_logprobs(
            hidden.index_select(0, predictors),
            self.head_weight,
            targets,
            temperatures / self.scale,
            self.head_chunk,
        )

    def to_empty(self, *, device: torch.device | str, recurse: bool = True) -> Generic:
        """As `nn.Module.to_empty`, and what follows from the config alone (rotary frequencies, scales of
        embeddings) is computed anew, for no file holds it."""
        super().to_empty(device=device, recurse=recurse)
        for tensor in self.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True  # transformers' word for: comes from a file
        self._whole.initialize_weights()
        return self

    def refuse(self, degrees: Degrees) -> None:
        """Raises ModelError where the ranks are to divide more than the model's tensors and micro-batches."""
        for name in ("context", "expert"):
            if (degree := getattr(degrees, name)) > 1:
                raise ModelError(
                    f"trainer.parallel.{name} is {degree}, but {self.family} models run through the code of "
                    f"transformers, which is sharded and replicated only; remove it, or train a model of "
                    f"{', '.join(FAMILIES)}"
                )

    @torch.no_grad()
    def check(self, compute_dtype: torch.dtype, device: torch.device | str) -> None:
        """Whether documents of a pack are scored as each of them alone is by transformers' plain attention.

        ``compute_dtype``: of the matrix products, which are made on ``device``. All ranks call it together,
        with the weights loaded. Raises ModelError where they are not.
        """
        tokens = torch.arange(2 * PROBE, device=device) % len(self.body.get_input_embeddings().weight)
        packed = self._scores(tokens, [PROBE, PROBE])
        chosen = self._whole.config._attn_implementation
        self._whole.set_attn_implementation("eager")
        alone = torch.cat([self._scores(part, [PROBE]) for part in tokens.split(PROBE)])
        self._whole.set_attn_implementation(chosen)
        if isinstance(self, FSDPModule):
            self.reshard()  # as before any forward: optimizers take what parameters there are
        difference = float((packed - alone).abs().max())
        if not difference <= DIFFERENCE[compute_dtype]:
            raise ModelError(
                f"{self.family} models cannot be trained on packed documents: next to another document and "
                f"alone, logprobs differ by {difference:.2g}; families that can: {', '.join(FAMILIES)}"
            )

    def _scores(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        """float32 [T]: the logprob that token 1 comes next, after each of ``tokens``."""
        predictors = torch.arange(len(tokens), device=tokens.device)
        documents = layout(np.array(lengths), tokens.device)
        targets, temperatures = torch.ones_like(tokens), torch.ones(len(tokens), device=tokens.device)
        return self(tokens, documents, predictors, targets, temperatures)[0]


def _model_of(folder: Path) -> PreTrainedModel:
    """transformers' model of the config in ``folder``, without weights."""
    config = config_of(folder)
    family = config["model_type"]
    known = CONFIG_MAPPING[family] if family in CONFIG_MAPPING else None  # noqa: SIM401 - `get` finds none
    if known is None or known not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"neither the trainer nor transformers {__version__} has a causal language model {family!r} "
            f"({folder}); the trainer has {', '.join(FAMILIES)}, and trains most others of transformers"
        )
    whole_class = MODEL_FOR_CAUSAL_LM_MAPPING[known]
    if any(get_checkpoint_conversion_mapping(name) for name in (family, whole_class.__name__)):
        raise _cannot(family, "its tensors have other names or shapes in memory than in files")
    settings = known.from_dict(config)
    text = settings.get_text_config()
    # transformers' fused attention leaves this out in silence
    plain = not whole_class._supports_sdpa or getattr(text, "attn_logit_softcapping", None)
    try:
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(
                settings, dtype=torch.float32, attn_implementation="eager" if plain else "sdpa"
            )
    except (ImportError, ValueError) as error:
        raise _cannot(family, f"transformers says: {error}") from error
    if any(".experts." in name for name, _ in whole.named_parameters()):
        raise _cannot(family, "it is a mixture of experts")
    if not isinstance(getattr(whole, "lm_head", None), nn.Linear):
        raise _cannot(family, "it has no lm_head")
    if "position_ids" not in inspect.signature(whole.base_model.forward).parameters:
        raise _cannot(family, "it takes no positions, which is how packed documents are told apart")
    return whole


@torch.no_grad()
def _head_scale(whole: PreTrainedModel, body_name: str) -> float:
    """What the model multiplies the product of hidden states and head with.

    Seen from its own forward, with a small head on given hidden states. Raises ModelError where the logits
    are no multiple of that product, as where they are capped.
    """
    body, head, family = getattr(whole, body_name), whole.lm_head, whole.config.model_type
    if getattr(head, "bias", None) is not None:
        raise _cannot(family, "its head has a bias")
    width = head.weight.shape[1]
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, PROBE, width, generator=generator)
    small = nn.Linear(width, PROBE, bias=False)
    small.weight.copy_(10 * torch.randn(small.weight.shape, generator=generator))
    try:
        setattr(whole, body_name, _Given(hidden))
        whole.lm_head = small
        logits = whole(input_ids=torch.zeros(1, PROBE, dtype=torch.long)).logits.float()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise _cannot(family, f"its forward does more than apply a head to hidden states: {error}") from error
    finally:
        setattr(whole, body_name, body)
        whole.lm_head = head
    product = small(hidden)
    scale = float((logits * product).sum() / product.square().sum())
    if not torch.allclose(logits, scale * product, rtol=1e-4, atol=1e-4 * abs(scale)):
        config = whole.config.get_text_config().to_dict()
        words = [f"{key} {value}" for key, value in config.items() if value and "logit" in key]
        raise _cannot(family, f"its logits are not the plain product of the head ({', '.join(words)})")
    return scale


class _Given(nn.Module):
    """Stands for a body that has made ``hidden``."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=self.hidden)


class _Output(BaseModelOutputWithPast):
    """What any body returns; of whatever else a model may pass on, there is nothing."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _cannot(family: str, why: str) -> ModelError:
    return ModelError(
        f"{family} models cannot be trained: {why}; families that can: {', '.join(FAMILIES)}, and those of "
        "transformers without such differences"
    )

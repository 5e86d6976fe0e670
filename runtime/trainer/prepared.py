"""A micro-batch as one rank computes with it: what it has of the tokens, and which of them it predicts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stackrl.runtime.trainer.context import Context
from stackrl.runtime.trainer.losses import Sequences, TrainedTokens
from stackrl.runtime.trainer.models.documents import Documents
from stackrl.runtime.transport.messages import CE, REF_KL, RL, MicroBatch


@dataclass(frozen=True)
class Marked:
    """Tokens of one component of the loss."""

    tokens: Tensor
    """int64: which of the n."""
    sequences: Sequences


@dataclass(frozen=True)
class Prepared:
    """What this rank has of a micro-batch, as tensors: t tokens, which predict n of its N trained ones."""

    tokens: Tensor
    """int64 [t]"""
    layout: Documents
    trained: int
    """N"""
    own: Tensor
    """int64 [n]: which of the trained tokens are predicted here."""
    predictors: Tensor
    """int64 [n]: the place here of the token before each of them."""
    targets: Tensor
    """int64 [n]: these tokens."""
    engine_logprobs: Tensor
    advantages: Tensor
    temperatures: Tensor
    """float32 [n] each."""
    ages: Tensor
    """int32 [n]"""
    reference: Tensor | None
    """float32 [n]: what a fixed reference or teacher says to them, NaN where it was not asked."""
    components: dict[int, Marked]
    """RL always, CE and REF_KL where there are any."""
    counted: Tensor
    """bool [t]: tokens that count in what is said of routers; none where there is nothing to learn."""
    routes: Tensor | None
    """int16 [t, layers, experts per token]: experts to go through, -1 where the router chooses."""

    def select(self, component: int, logprobs: Tensor) -> TrainedTokens:
        """The tokens of one component, with their ``logprobs`` among those of all n."""
        marked = self.components[component]
        reference = self.reference
        if reference is None and not len(marked.tokens):
            reference = self.engine_logprobs  # nothing is missing
        return TrainedTokens(
            logprobs=logprobs.index_select(0, marked.tokens),
            engine_logprobs=self.engine_logprobs.index_select(0, marked.tokens),
            advantages=self.advantages.index_select(0, marked.tokens),
            ages=self.ages.index_select(0, marked.tokens),
            sequences=marked.sequences,
            reference=None if reference is None else reference.index_select(0, marked.tokens),
        )


def prepare(micro: MicroBatch, device: torch.device, context: Context = Context()) -> Prepared:  # noqa: B008
    """Select the trained tokens of ``micro`` and move what the model needs to ``device``.

    ``context``: with which other ranks this one shares it.
    """
    document_of = np.repeat(np.arange(len(micro.lengths)), micro.lengths)
    chosen = np.flatnonzero(micro.loss_mask)
    if np.isin(chosen, np.cumsum(micro.lengths) - micro.lengths).any():
        raise ValueError("the first token of a document is marked as trained, but nothing predicts it")
    here = context.own(len(micro.tokens))
    own = np.flatnonzero((chosen > here.start) & (chosen <= here.stop))  # predicted by the token before
    targets = chosen[own]
    documents, marks = document_of[targets], micro.loss_mask[targets]

    def tensor(array: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(array.astype(dtype)).to(device)

    return Prepared(
        tokens=tensor(micro.tokens[here.start : here.stop], np.int64),
        layout=context.layout(micro.lengths, device),
        trained=len(chosen),
        own=tensor(own, np.int64),
        predictors=tensor(targets - 1 - here.start, np.int64),
        targets=tensor(micro.tokens[targets], np.int64),
        engine_logprobs=tensor(micro.logprobs[targets], np.float32),
        advantages=tensor(micro.advantages[documents], np.float32),
        temperatures=tensor(micro.temperatures[documents], np.float32),
        ages=tensor(np.zeros(len(own)) if micro.ages is None else micro.ages[targets], np.int32),
        reference=None if micro.reference is None else tensor(micro.reference[targets], np.float32),
        components={
            component: Marked(
                tokens=tensor(np.flatnonzero(marks == component), np.int64),
                sequences=Sequences(
                    of=tensor(documents[marks == component], np.int64),
                    lengths=tensor(_counts(micro, component, document_of), np.int64),
                    context=context,
                ),
            )
            for component in (RL, CE, REF_KL)
            if component == RL or (micro.loss_mask == component).any()
        },
        counted=torch.full((len(here),), bool(len(chosen)), device=device),
        routes=None if micro.routes is None else tensor(micro.routes[here.start : here.stop], np.int16),
    )


def _counts(micro: MicroBatch, component: int, document_of: np.ndarray) -> np.ndarray:
    """How many tokens of each document are marked so."""
    return np.bincount(document_of[micro.loss_mask == component], minlength=len(micro.lengths))


EMPTY = MicroBatch(
    tokens=np.zeros(2, "<i4"),
    lengths=np.array([2], "<i4"),
    loss_mask=np.zeros(2, "|u1"),
    logprobs=np.zeros(2, "<f4"),
    advantages=np.zeros(1, "<f4"),
    temperatures=np.ones(1, "<f4"),
    documents=["demonstration"],
)
"""Two tokens that train nothing: the part of a rank that has nothing to do."""

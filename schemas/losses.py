"""`algorithm.loss`: what is minimised. docs/algorithms.md has the formulas side by side."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, JsonValue, Tag

from stackrl.schemas.base import Model, untouched, variant

Normalize = Literal["token", "sequence", "constant"]
Level = Literal["token", "sequence", "geometric"]


class Divergence(Model):
    """Divergence from a fixed reference, added to the loss of every token (arXiv 2402.03300).

    The reference is `algorithm.reference` where it is given, else the weights that the run began with, which
    the trainer keeps; with LoRA these are the model without its adapters. Its slope along log π is limited to
    ±20.
    """

    coefficient: float = Field(default=0.001, gt=0)
    """What it is multiplied by."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """With d = log π − log π_ref of a sampled token. k1: d, whose gradient is zero on average; k2: d²/2,
    whose gradient is that of the divergence; k3: e^(−d) + d − 1."""
    reference: Literal["first_weights"] | None = None
    """`first_weights` has to be said where supervised stages come before and `algorithm.reference` is not
    given: the loss then pulls back to what the model was before these stages."""


class Correction(Model):
    """Weight of what the engine sampled in the trainer's eyes, for a loss that has none of its own."""

    method: Literal["truncate", "mask"] = "truncate"
    """A weight beyond the bounds is set to the bound, or to zero."""
    level: Level = "token"
    """What a weight is: a token's π/μ; the product of π/μ over all trained tokens of the sequence; or their
    geometric mean."""
    low: float = Field(default=0.0, ge=0)
    """Smallest weight."""
    high: float = Field(default=2.0, gt=0)
    """Largest weight."""


class ProximalCorrection(Correction):
    """Weight of what the engine sampled in the eyes of the proximal policy."""

    high: float = Field(default=5.0, gt=0)
    """Largest weight."""


class _Loss(Model):
    normalize: Normalize = "token"
    """How the loss is averaged.
    `token`: mean over all trained tokens of the step; `sequence`: mean over sequences of their token means;
    `constant`: sum over tokens divided by sequences × `sampling.max_tokens`. All denominators are global."""
    kl: Divergence | None = None
    """Divergence from a fixed reference, as a part of the loss."""


class _SequenceLoss(_Loss):
    normalize: Normalize = "sequence"
    """How the loss is averaged.
    `token`: mean over all trained tokens of the step; `sequence`: mean over sequences of their token means;
    `constant`: sum over tokens divided by sequences × `sampling.max_tokens`. All denominators are global."""


class AipoLoss(_Loss):
    """−sg(min(π/μ, ratio_cap)) · A · log π  (arXiv 2505.24034)."""

    type: Literal["aipo"] = "aipo"
    """Which loss."""
    ratio_cap: float = Field(default=5.0, ge=1)
    """Cap of the importance ratio between trainer and engine."""


class GrpoLoss(_Loss):
    """−min(r·A, clip(r, 1−clip_low, 1+clip_high)·A) with r = π/μ  (arXiv 1707.06347, 2402.03300)."""

    type: Literal["grpo"]
    """Which loss."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio counts."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far above 1 the ratio counts."""
    dual_clip: float | None = Field(default=None, gt=1, examples=[3.0])
    """Where A < 0, the largest ratio that counts (arXiv 1912.09729)."""


class DapoLoss(_Loss):
    """As `grpo`, with more room above 1 than below, averaged over tokens (DAPO, arXiv 2503.14476)."""

    type: Literal["dapo"]
    """Which loss."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio counts."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far above 1 the ratio counts."""
    dual_clip: float | None = Field(default=None, gt=1, examples=[3.0])
    """Where A < 0, the largest ratio that counts (arXiv 1912.09729)."""


class DrGrpoLoss(_Loss):
    """As `grpo`, divided by a length that is the same for all sequences (Dr. GRPO, arXiv 2503.20783)."""

    type: Literal["dr_grpo"]
    """Which loss."""
    normalize: Normalize = "constant"
    """How the loss is averaged.
    `token`: mean over all trained tokens of the step; `sequence`: mean over sequences of their token means;
    `constant`: sum over tokens divided by sequences × `sampling.max_tokens`. All denominators are global."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio counts."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far above 1 the ratio counts."""
    dual_clip: float | None = Field(default=None, gt=1, examples=[3.0])
    """Where A < 0, the largest ratio that counts (arXiv 1912.09729)."""


class GspoLoss(_SequenceLoss):
    """−min(s·A, clip(s, 1−clip_low, 1+clip_high)·A) with s the geometric mean of π/μ over the sequence
    (GSPO, arXiv 2507.18071)."""

    type: Literal["gspo"]
    """Which loss."""
    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """How far below 1 the sequence's ratio counts."""
    clip_high: float = Field(default=4e-4, gt=0)
    """How far above 1 the sequence's ratio counts."""


class GmpoLoss(_SequenceLoss):
    """−A · exp(mean of the clipped log π/μ over the sequence)  (GMPO, arXiv 2507.20673)."""

    type: Literal["gmpo"]
    """Which loss."""
    clip_low: float = Field(default=0.4, gt=0)
    """How far below 0 a token's log ratio counts, where A < 0."""
    clip_high: float = Field(default=0.4, gt=0)
    """How far above 0 a token's log ratio counts, where A > 0."""


class CispoLoss(_Loss):
    """−sg(clip(π/μ, 1−clip_low, 1+clip_high)) · A · log π: clipped tokens keep their gradient (CISPO, arXiv
    2506.13585)."""

    type: Literal["cispo"]
    """Which loss."""
    clip_low: float = Field(default=1.0, gt=0, le=1)
    """How far below 1 the weight goes."""
    clip_high: float = Field(default=4.0, gt=0)
    """How far above 1 the weight goes."""


class DecoupledPpoLoss(_Loss):
    """−sg(w) · min(r·A, clip(r, 1−clip_low, 1+clip_high)·A) with r = π/π_prox and w = π_prox/μ, corrected
    (arXiv 2110.00641, 2505.24298)."""

    type: Literal["decoupled_ppo"]
    """Which loss."""
    proximal: Literal["recomputed", "approximated"] = "recomputed"
    """The policy that π is kept near to. `recomputed`: the weights that the step begins with, so that r is 1
    and w alone counts; `approximated`: between μ and π, log π_prox = log π + (log μ − log π)/n for a token
    that is n steps old (A-3PO, arXiv 2512.06547)."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far below 1 the ratio counts."""
    clip_high: float = Field(default=0.2, gt=0)
    """How far above 1 the ratio counts."""
    correction: ProximalCorrection = untouched(ProximalCorrection)
    """Bounds of w."""


class DppoLoss(_Loss):
    """−keep · (π/μ) · A + squared_log_ratio · (log π/μ)²: tokens whose probability has moved too far in the
    direction of A are left out (DPPO, arXiv 2602.04879; the penalty: 2602.02276)."""

    type: Literal["dppo"]
    """Which loss."""
    divergence: Literal["tv", "kl"] = "tv"
    """How far a probability has moved. `tv`: |π − μ|; `kl`: the divergence of two coins that show the token
    with probability μ and π."""
    low: float = Field(default=0.2, gt=0)
    """How far it may fall where A ≤ 0."""
    high: float = Field(default=0.2, gt=0)
    """How far it may rise where A > 0."""
    squared_log_ratio: float = Field(default=1e-3, ge=0)
    """Weight of the penalty, which all tokens have."""


class IpoLoss(_Loss):
    """−keep · (π/μ) · A + squared_log_ratio · (log π/μ)²: tokens whose probability has moved too far in any
    direction are left out."""

    type: Literal["ipo"]
    """Which loss."""
    limit: float = Field(default=0.1, gt=0)
    """How far |π − μ| may be."""
    squared_log_ratio: float = Field(default=1e-3, ge=0)
    """Weight of the penalty, which all tokens have."""


class IcepopLoss(_Loss):
    """−keep · (π/μ) · A: tokens whose ratio is out of bounds are left out (IcePop,
    ringtech.notion.site/icepop)."""

    type: Literal["icepop"]
    """Which loss."""
    low: float = Field(default=0.5, ge=0, le=1)
    """Smallest ratio that is kept."""
    high: float = Field(default=5.0, ge=1)
    """Largest ratio that is kept."""


class ToprLoss(_Loss):
    """−A · log π where A ≥ 0, −sg(min(π/μ, 1)) · A · log π where A < 0 (TOPR, arXiv 2503.14286)."""

    type: Literal["topr"]
    """Which loss."""
    level: Level = "sequence"
    """What the ratio is: a token's; the product over all trained tokens of the sequence, as in the paper; or
    their geometric mean."""


class SapoLoss(_SequenceLoss):
    """−(4/τ) · σ(τ(r − 1)) · A with r = π/μ: a soft gate in place of a clip (SAPO, arXiv 2511.20347)."""

    type: Literal["sapo"]
    """Which loss."""
    positive: float = Field(default=1.0, gt=0)
    """τ where A > 0."""
    negative: float = Field(default=1.05, gt=0)
    """τ where A ≤ 0."""


class ReinforceLoss(_Loss):
    """−sg(w) · A · log π; with `advantage: {type: leave_one_out}` it is RLOO (arXiv 2402.14740)."""

    type: Literal["reinforce"]
    """Which loss."""
    correction: Correction | None = None
    """What w is; 1 where it is left out."""


class PythonLoss(_Loss):
    """A function of yours: `function(tokens, **arguments)` gives the loss of each token."""

    type: Literal["python"]
    """Which loss."""
    path: str = Field(min_length=1, examples=["my_package.losses:mine"])
    """`module:function`, `folder/file.py:function`, or the name of an entry point in `stackrl.losses`."""
    arguments: dict[str, JsonValue] = {}
    """Given to the function by name."""


LOSSES = (
    AipoLoss,
    GrpoLoss,
    DapoLoss,
    DrGrpoLoss,
    GspoLoss,
    GmpoLoss,
    CispoLoss,
    DecoupledPpoLoss,
    DppoLoss,
    IpoLoss,
    IcepopLoss,
    ToprLoss,
    SapoLoss,
    ReinforceLoss,
    PythonLoss,
)
Loss = Annotated[
    Annotated[AipoLoss, Tag("aipo")]
    | Annotated[GrpoLoss, Tag("grpo")]
    | Annotated[DapoLoss, Tag("dapo")]
    | Annotated[DrGrpoLoss, Tag("dr_grpo")]
    | Annotated[GspoLoss, Tag("gspo")]
    | Annotated[GmpoLoss, Tag("gmpo")]
    | Annotated[CispoLoss, Tag("cispo")]
    | Annotated[DecoupledPpoLoss, Tag("decoupled_ppo")]
    | Annotated[DppoLoss, Tag("dppo")]
    | Annotated[IpoLoss, Tag("ipo")]
    | Annotated[IcepopLoss, Tag("icepop")]
    | Annotated[ToprLoss, Tag("topr")]
    | Annotated[SapoLoss, Tag("sapo")]
    | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[PythonLoss, Tag("python")],
    variant("type", default="aipo"),
]


class Distillation(Model):
    """−keep · sg(log π_ref − log π) · (π/μ) + squared_log_ratio · (log π/μ)²: lowers the divergence of π from
    a reference or teacher on what π samples. log π_ref − log π is limited to ±20."""

    limit: float = Field(default=0.2, gt=0)
    """A token is left out whose probability has fallen by more than this."""
    squared_log_ratio: float = Field(default=1e-3, ge=0)
    """Weight of the penalty, which all these tokens have."""

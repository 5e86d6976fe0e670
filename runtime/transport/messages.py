"""What the roles of a run say to each other: typed, checked, msgpack on the wire.

One wire version covers all messages. Nothing here is ever pickled: an array travels as its dtype, its
shape and its bytes, and a message that does not fit its type is refused with the reason.
"""

from __future__ import annotations

import math
from typing import Literal, TypeVar

import msgspec
import numpy as np

WIRE_VERSION = 5
MAX_MESSAGE_BYTES = 1 << 30
DTYPES = ("<i4", "<i8", "<f4", "|u1", "|i1", "<i2")
ROUTES_DTYPES = ("|i1", "<i2")
"""Of the experts that tokens go through: the first where they are at most 128 in a layer."""
NO_ROUTE = -1
"""In place of the experts of a token for which the trainer's router is to choose."""
RL, CE, REF_KL = 1, 2, 3
"""What a token is trained by, in a `loss_mask`: the stage's own loss (in a stage with rewards that of
reinforcement learning, in a supervised one cross-entropy), cross-entropy, or the divergence from a reference
or teacher. Each is divided by the number of its own tokens in the step. 0: the token is not trained."""

M = TypeVar("M", bound=msgspec.Struct)


class MessageError(ValueError):
    """A message that is not what it claims to be: wrong wire version, type, dtype, shape or size."""


class Version(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Which weights: the trainer's incarnation and the number of RL optimizer steps behind them.

    Written ``incarnation.step`` (``2.41``). Ordered; a restart raises the incarnation, so weights of an
    older life of the trainer are always smaller.
    """

    incarnation: int
    step: int

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.step}"

    @classmethod
    def parse(cls, text: str) -> Version:
        """Read ``2.41``. Raises MessageError on anything else."""
        incarnation, dot, step = text.partition(".")
        if not (dot and incarnation.isdecimal() and step.isdecimal()):
            raise MessageError(f"{text!r} is not a weight version like 2.41")
        return cls(int(incarnation), int(step))


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Tokens ``start`` (inclusive) to ``end`` (exclusive) were sampled from ``version``."""

    start: int
    end: int
    version: Version


class Sample(msgspec.Struct, kw_only=True):
    """One training sequence of T tokens: a prompt, sampled tokens and the environment's replies between them.

    ``tokens`` int32 [T]; ``loss_mask`` uint8 [T], what each token is trained by (RL, CE or REF_KL), 0 where
    it is not; ``logprobs`` float32 [T], the engine's logprob of each sampled token at the sampling
    temperature, 0 elsewhere; ``spans`` cover exactly the sampled tokens (empty in a demonstration);
    ``advantage`` holds for all sampled tokens. ``routes`` int8 or int16 [T, L, k], where the engine has told
    them: the k experts that each token went through in each of the model's L layers, NO_ROUTE where that is
    not known; in layers without experts they mean nothing. ``reference`` float32 [T], where one was asked:
    the logprob of the same tokens by a fixed reference or teacher at the sampling temperature, 0 in places
    that it was not asked for.
    """

    rollout: str
    group: int
    environment: str
    tokens: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    spans: list[Span] = []
    advantage: float = 0.0
    temperature: float = 1.0
    routes: np.ndarray | None = None
    reference: np.ndarray | None = None

    def __post_init__(self) -> None:
        length = len(self.tokens)
        _require(length > 1, "a sample needs at least two tokens")
        _check_array("tokens", self.tokens, "<i4", (length,))
        _check_array("loss_mask", self.loss_mask, "|u1", (length,))
        _check_array("logprobs", self.logprobs, "<f4", (length,))
        _check_routes(self.routes, length)
        _check_optional("reference", self.reference, "<f4", (length,))
        _check_components(self.loss_mask)
        _require(not self.loss_mask[0], "the first token of a sample has no logprob and cannot be trained")
        _require(math.isfinite(self.advantage), f"advantage {self.advantage} is not finite")
        end = 0
        for span in self.spans:
            _require(end <= span.start < span.end <= length, f"span {span} does not follow its predecessor")
            end = span.end

    def oldest(self) -> Version:
        """The oldest version among the sampled tokens. Raises ValueError for a demonstration."""
        return min(span.version for span in self.spans)


class MicroBatch(msgspec.Struct, kw_only=True):
    """Packed sequences that go through the model at once: T tokens of D documents, back to back.

    ``documents`` names them: a rollout (``12-3``), further sequences of the same rollout (``12-3/1``), or
    ``demonstration``. ``lengths`` int32 [D], summing to T; the other arrays as in Sample, ``advantages`` and
    ``temperatures`` float32 [D] one per document. An empty micro-batch (T = 0) keeps data-parallel ranks in
    step. ``routes`` are given where one of the sequences has them, and so is ``reference``, NaN in the
    others. ``ages`` int32 [T], where anything was sampled: RL steps between the weights that sampled a token
    and those that the batch trains, 0 for other tokens.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    temperatures: np.ndarray
    documents: list[str]
    routes: np.ndarray | None = None
    reference: np.ndarray | None = None
    ages: np.ndarray | None = None

    def __post_init__(self) -> None:
        length, documents = len(self.tokens), len(self.lengths)
        _check_array("tokens", self.tokens, "<i4", (length,))
        _check_array("lengths", self.lengths, "<i4", (documents,))
        _check_array("loss_mask", self.loss_mask, "|u1", (length,))
        _check_array("logprobs", self.logprobs, "<f4", (length,))
        _check_array("advantages", self.advantages, "<f4", (documents,))
        _check_array("temperatures", self.temperatures, "<f4", (documents,))
        _check_routes(self.routes, length)
        _check_optional("reference", self.reference, "<f4", (length,))
        _check_optional("ages", self.ages, "<i4", (length,))
        _check_components(self.loss_mask)
        _require(int(self.lengths.sum()) == length, "lengths do not add up to the tokens")
        _require(bool((self.lengths > 0).all()), "an empty document")
        _require(len(self.documents) == documents, f"{len(self.documents)} names for {documents} documents")


class Batch(msgspec.Struct, kw_only=True):
    """One optimizer step's work for one data-parallel rank.

    ``index`` counts optimizer steps of the run, supervised ones included; ``step`` is the RL step whose
    weights the batch trains (the result is version ``step + 1``; a supervised batch leaves it as it is).
    The global denominators, over all ranks and micro-batches, are ``tokens`` marked RL, ``sequences`` that
    have any of them, ``ce_tokens`` marked CE and ``ref_kl_tokens`` marked REF_KL. With ``report`` each rank
    sends Logprobs of it back. Of ``held_out`` only the loss is measured, after the step; all ranks have some,
    or none has.
    """

    incarnation: int
    index: int
    step: int
    stage: str
    stage_step: int
    rank: int
    ranks: int
    tokens: int
    sequences: int
    checkpoint: bool
    last_of_stage: bool
    micro_batches: list[MicroBatch]
    report: bool = False
    held_out: list[MicroBatch] = []
    ce_tokens: int = 0
    ref_kl_tokens: int = 0

    def __post_init__(self) -> None:
        _require(0 <= self.rank < self.ranks, f"rank {self.rank} of {self.ranks}")
        denominators = (self.tokens, self.sequences, self.ce_tokens, self.ref_kl_tokens)
        _require(min(denominators) >= 0, "negative denominators")


class End(msgspec.Struct, kw_only=True):
    """No more batches: the run is over (``reason`` 'finished') or ends early.

    With ``save`` the trainer first writes a checkpoint of its index, and acknowledges it as durable.
    """

    reason: str
    save: bool = False


class Hello(msgspec.Struct, kw_only=True):
    """A trainer rank meets the orchestrator: the first thing it sends, before any batch, and again where
    the orchestrator was restarted and does not know the rank.

    ``index`` is its next optimizer step, ``weights`` the address that serves its weights (rank 0; empty on
    the others), ``version`` what it has published there. ``taken``: it has batch ``index`` in hand already.
    ``saved``: index of the newest checkpoint whose trainer part it has put on disk in this life, -1 for none.
    """

    incarnation: int
    rank: int
    ranks: int
    index: int
    version: Version
    weights: str = ""
    taken: bool = False
    saved: int = -1


class Ack(msgspec.Struct, kw_only=True):
    """How far a batch came: accepted (arrived whole), applied (optimizer stepped, weights published as
    ``version``) or durable (part of a complete checkpoint)."""

    incarnation: int
    index: int
    step: int
    rank: int
    state: Literal["accepted", "applied", "durable"]
    version: Version
    metrics: dict[str, float] = {}


class Logprobs(msgspec.Struct, kw_only=True):
    """The trainer's logprobs of one rank's trained tokens in batch ``index``, before its step, at the
    sampling temperature.

    ``lengths`` int32 [D]: trained tokens of each of ``documents``; ``logprobs`` float32, their sum long.
    """

    incarnation: int
    index: int
    rank: int
    documents: list[str]
    lengths: np.ndarray
    logprobs: np.ndarray

    def __post_init__(self) -> None:
        _check_array("lengths", self.lengths, "<i4", (len(self.documents),))
        _require(bool((self.lengths >= 0).all()), "a negative length")
        _check_array("logprobs", self.logprobs, "<f4", (int(self.lengths.sum()),))


class TensorInfo(msgspec.Struct, frozen=True):
    """One tensor of a weight version, by its Hugging Face name. ``chunks``: the hash of each piece of its
    bytes (transport/hashes.py)."""

    name: str
    dtype: str
    shape: list[int]
    bytes: int
    chunks: list[str]


class WeightManifest(msgspec.Struct, kw_only=True):
    """Everything a receiver must hold before it may say that it has ``version``.

    ``changes_follow``: later versions can be had as what changed, so that keeping this one is worth its
    memory.
    """

    version: Version
    tensors: list[TensorInfo]
    changes_follow: bool = False


class TensorChange(msgspec.Struct, frozen=True):
    """How one tensor differs from the same tensor of another version, in ``bytes`` bytes whose hash is
    ``hash``: not at all, in ``count`` elements, or wholly, and then the bytes are its own."""

    kind: Literal["same", "some", "whole"]
    bytes: int
    count: int
    hash: str


class WeightChanges(msgspec.Struct, kw_only=True):
    """What makes ``version`` of ``base``: a change for each tensor of the manifest, in its order."""

    version: Version
    base: Version
    tensors: list[TensorChange]


class JoinBroadcast(msgspec.Struct, kw_only=True):
    """A receiver wants a version by broadcast. ``member`` is its name for life, ``holds`` the name of the
    process group that it has from an earlier one; empty for none."""

    member: str
    holds: str = ""


class Broadcast(msgspec.Struct, kw_only=True):
    """How a receiver takes part: as ``rank`` of ``ranks`` in process group ``group``, whose rank 0 sends the
    tensors of ``manifest`` in buckets of ``bucket`` bytes. An operation takes ``silence`` seconds at most."""

    group: str
    rank: int
    ranks: int
    backend: Literal["gloo", "nccl"]
    bucket: int
    silence: float
    manifest: WeightManifest

    def __post_init__(self) -> None:
        _require(0 < self.rank < self.ranks, f"rank {self.rank} of {self.ranks}")
        _require(self.bucket > 0 and self.silence > 0, "a bucket or a limit of nothing")


class _Envelope(msgspec.Struct, array_like=True):
    wire: int
    kind: str
    body: msgspec.Raw


def encode(message: msgspec.Struct) -> bytes:
    """Serialise a message of this module."""
    body = msgspec.msgpack.encode(message, enc_hook=_encode_array)
    return msgspec.msgpack.encode(_Envelope(WIRE_VERSION, type(message).__name__, msgspec.Raw(body)))


def decode(data: bytes, *kinds: type[M]) -> M:
    """Read a message that must be one of ``kinds``. Raises MessageError with the reason it is refused."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise MessageError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
    try:
        envelope = msgspec.msgpack.decode(data, type=_Envelope)
        if envelope.wire != WIRE_VERSION:
            raise MessageError(f"wire version {envelope.wire}, this side speaks {WIRE_VERSION}")
        for kind in kinds:
            if kind.__name__ == envelope.kind:
                return msgspec.msgpack.decode(envelope.body, type=kind, dec_hook=_decode_array)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MessageError(str(error)) from error
    expected = " or ".join(kind.__name__ for kind in kinds)
    raise MessageError(f"a {envelope.kind[:40]!r} came where {expected} was expected")


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    raise NotImplementedError(f"{type(value).__name__} does not travel")


def _decode_array(kind: type, value: object) -> np.ndarray:
    if kind is not np.ndarray:
        raise NotImplementedError(kind.__name__)
    if not (isinstance(value, list) and len(value) == 3):
        raise ValueError("an array is [dtype, shape, bytes]")
    dtype, shape, data = value
    _require(dtype in DTYPES, f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    _require(
        isinstance(shape, list) and all(isinstance(n, int) and n >= 0 for n in shape) and len(shape) <= 4,
        f"shape {shape!r}",
    )
    _require(
        isinstance(data, bytes) and len(data) == math.prod(shape) * np.dtype(dtype).itemsize,
        f"the bytes of the array are not those of {dtype} {shape}",
    )
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _check_array(name: str, array: np.ndarray, dtype: str, shape: tuple[int, ...]) -> None:
    _require(
        array.dtype.str == dtype and array.shape == shape,
        f"{name} is {array.dtype.str} {list(array.shape)}, expected {dtype} {list(shape)}",
    )


def _check_optional(name: str, array: np.ndarray | None, dtype: str, shape: tuple[int, ...]) -> None:
    if array is not None:
        _check_array(name, array, dtype, shape)


def _check_components(loss_mask: np.ndarray) -> None:
    largest = int(loss_mask.max(initial=0))
    _require(largest <= REF_KL, f"a token is marked {largest}, which is none of {RL}, {CE} and {REF_KL}")


def _check_routes(routes: np.ndarray | None, length: int) -> None:
    if routes is None:
        return
    _require(
        routes.dtype.str in ROUTES_DTYPES and routes.ndim == 3 and len(routes) == length,
        f"routes is {routes.dtype.str} {list(routes.shape)}, expected {' or '.join(ROUTES_DTYPES)} "
        f"[{length}, layers, experts per token]",
    )


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise ValueError(reason)

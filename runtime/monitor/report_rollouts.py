"""The rollouts of a report: a table of all of them, and their tokens in chunks that a page opens one by one.

A chunk is the length of a JSON header (uint32), the header, and three arrays over all of its sequences, one
after the other, each beginning at a multiple of 4 bytes:

    tokens       places in the table of tokens, in 1, 2 or 4 bytes each
    trained      uint8, 1 where the engine sampled the token
    engine       int16, the engine's logprob of each sampled token in thousandths
    difference   int16, trainer − engine in ten-thousandths; NONE where the trainer's is not known

All numbers are little-endian.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stackrl.runtime.monitor.kept_rollouts import (
    KeptRollout,
    KeptSequence,
    KeptStep,
    count_rollouts,
    read_steps,
)
from stackrl.runtime.monitor.report_tokens import Pieces, as_json, text

MOST_ROLLOUTS = 10_000
MOST_TOKENS = 20_000_000
"""Of the newest rollouts; a page that holds more is no joy to open."""
_CHUNK_ROLLOUTS, _CHUNK_TOKENS = 128, 200_000
_NONE = -32768
_SNIPPET = 120
"""Characters of prompt and answer that the list shows."""
_ROLE = re.compile(r"^\s*(system|user|assistant|tool|human|model)\s*\n")


@dataclass(frozen=True)
class EmbeddedRollouts:
    """What goes into the page. ``table`` and ``tokens`` are JSON-able; ``left_out`` counts older rollouts."""

    table: dict[str, list[Any]]
    tokens: dict[str, list[Any]]
    chunks: Sequence[bytes]
    left_out: int


def embed(folder: Path, model: Path) -> EmbeddedRollouts:
    """The newest rollouts that are kept in ``folder``, the newest step first, as ``model``'s tokens."""
    steps = list(_newest(folder))
    vocabulary = _Vocabulary(steps, Pieces(model))
    table = _Table(vocabulary)
    chunks = []
    for members in _chunked(steps):
        for step, rollout in members:
            table.add(step, rollout, chunk=len(chunks))
        chunks.append(_chunk(members, vocabulary))
    shown = sum(len(step.rollouts) for step in steps)
    return EmbeddedRollouts(
        table.columns, vocabulary.table, chunks, left_out=max(0, count_rollouts(folder) - shown)
    )


def _newest(folder: Path) -> Iterator[KeptStep]:
    left = MOST_TOKENS
    for step in read_steps(folder, MOST_ROLLOUTS):
        fitting = []
        for rollout in step.rollouts:
            left -= _length(rollout)
            if left < 0:
                break
            fitting.append(rollout)
        yield replace(step, rollouts=fitting)
        if left < 0:
            return


def _length(rollout: KeptRollout) -> int:
    return sum(len(sequence.trained) for sequence in rollout.sequences)


class _Vocabulary:
    """The tokens that occur, the most frequent first; a place in this table stands for each."""

    def __init__(self, steps: Sequence[KeptStep], pieces: Pieces) -> None:
        counts = np.zeros(0, dtype=np.int64)
        for step in steps:
            data = b"".join(sequence.tokens for r in step.rollouts for sequence in r.sequences)
            more = np.bincount(np.frombuffer(data, dtype="<i4").clip(0))
            if len(more) > len(counts):
                counts = np.pad(counts, (0, len(more) - len(counts)))
            counts[: len(more)] += more
        order = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)]
        self._place = np.zeros(len(counts), dtype=np.int64)
        self._place[order] = np.arange(len(order))
        self.bytes = 1 if len(order) <= 1 << 8 else 2 if len(order) <= 1 << 16 else 4
        self.pieces = pieces.of(order.tolist())
        self.special = [pieces.special(token) for token in order.tolist()]
        self.table = {
            "pieces": [as_json(piece) for piece in self.pieces],
            "ids": order.tolist(),
            "special": [place for place, special in enumerate(self.special) if special],
        }

    def places(self, sequence: KeptSequence) -> np.ndarray:
        return self._place[np.frombuffer(sequence.tokens, dtype="<i4").clip(0)]

    def written(self, sequence: KeptSequence) -> bytes:
        return self.places(sequence).astype(f"<u{self.bytes}").tobytes()


class _Table:
    """What the list shows and filters by, a column each."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        names = (
            "id group step index stage environment reward advantage turns sampled difference chunk place "
            "prompt answer"
        )
        self.columns: dict[str, list[Any]] = {name: [] for name in names.split()}

    def add(self, step: KeptStep, rollout: KeptRollout, chunk: int) -> None:
        chunks = self.columns["chunk"]
        place = self.columns["place"][-1] + 1 if chunks and chunks[-1] == chunk else 0
        row = {
            "id": rollout.id,
            "group": rollout.group,
            "step": step.about.step,
            "index": step.about.index,
            "stage": step.about.stage,
            "environment": rollout.environment,
            "reward": _short(rollout.reward),
            "advantage": _short(rollout.advantage),
            "turns": rollout.turns,
            "sampled": rollout.sampled,
            "difference": _mean_difference(step, rollout),
            "chunk": chunk,
            "place": place,
            **self._snippets(rollout),
        }
        for name, value in row.items():
            self.columns[name].append(value)

    def _snippets(self, rollout: KeptRollout) -> dict[str, str]:
        """The end of what was asked, and the beginning of the first answer."""
        if not rollout.sequences:
            return {"prompt": "", "answer": ""}
        first = rollout.sequences[0]
        begin = first.trained.find(1)
        places = self._vocabulary.places(first)[max(0, begin - 4 * _SNIPPET) : begin + _SNIPPET].tolist()
        begin = min(begin, 4 * _SNIPPET)
        answer = []
        for place, trained in zip(places[begin:], first.trained[first.trained.find(1) :], strict=False):
            if not trained or self._vocabulary.special[place]:
                break
            answer.append(self._vocabulary.pieces[place])
        return {
            "prompt": self._question(places[:begin])[-_SNIPPET:],
            "answer": _line(text(answer))[:_SNIPPET],
        }

    def _question(self, places: list[int]) -> str:
        """The last message of a prompt: between special tokens, before the header of the model's own turn."""
        messages: list[list[bytes]] = [[]]
        for place in places:
            if self._vocabulary.special[place]:
                messages.append([])
            else:
                messages[-1].append(self._vocabulary.pieces[place])
        texts = [told for message in messages[:-1] if (told := text(message)).strip()]
        return _line(_ROLE.sub("", (texts or [text(messages[-1])])[-1]))


def _chunked(steps: Sequence[KeptStep]) -> Iterator[list[tuple[KeptStep, KeptRollout]]]:
    members: list[tuple[KeptStep, KeptRollout]] = []
    tokens = 0
    for step in steps:
        for rollout in step.rollouts:
            members.append((step, rollout))
            tokens += _length(rollout)
            if len(members) >= _CHUNK_ROLLOUTS or tokens >= _CHUNK_TOKENS:
                yield members
                members, tokens = [], 0
    if members:
        yield members


def _chunk(members: Sequence[tuple[KeptStep, KeptRollout]], vocabulary: _Vocabulary) -> bytes:
    described = [
        {"metrics": _finite(rollout.metrics), "sequences": [_described(s) for s in rollout.sequences]}
        for _, rollout in members
    ]
    sequences = [(step, sequence) for step, rollout in members for sequence in rollout.sequences]
    header = json.dumps({"token_bytes": vocabulary.bytes, "rollouts": described}).encode()
    arrays = [
        b"".join(vocabulary.written(sequence) for _, sequence in sequences),
        b"".join(sequence.trained for _, sequence in sequences),
        _whole([_engine(sequence) for _, sequence in sequences], 1e3),
        _whole([_difference(step, sequence) for step, sequence in sequences], 1e4),
    ]
    return b"".join(map(_padded, [len(header).to_bytes(4, "little"), header, *arrays]))


def _described(sequence: KeptSequence) -> list[Any]:
    spans = [[span.start, span.end, span.version] for span in sequence.spans]
    return [
        sequence.document,
        len(sequence.trained),
        len(sequence.logprobs) // 4,
        sequence.temperature,
        spans,
    ]


def _engine(sequence: KeptSequence) -> np.ndarray:
    return np.frombuffer(sequence.logprobs, dtype="<f4")


def _difference(step: KeptStep, sequence: KeptSequence) -> np.ndarray:
    """Trainer − engine, of each sampled token; not a number where the trainer's is not known."""
    engine, trainer = _engine(sequence), step.logprobs.get(sequence.document)
    if trainer is None or len(trainer) != len(engine):
        return np.full(len(engine), np.nan, dtype="<f4")
    return trainer - engine


def _mean_difference(step: KeptStep, rollout: KeptRollout) -> float | None:
    """The mean size of the difference over the rollout's sampled tokens; None where none is known."""
    parts = [np.abs(_difference(step, sequence)) for sequence in rollout.sequences]
    known = np.concatenate([part[np.isfinite(part)] for part in parts] or [np.empty(0)])
    return _short(float(known.mean())) if len(known) else None


def _whole(parts: Sequence[np.ndarray], scale: float) -> bytes:
    """Fixed-point numbers in int16; what does not fit is the nearest that does."""
    values = np.concatenate([np.empty(0, dtype="<f4"), *parts]) * np.float32(scale)
    whole = values.round().clip(_NONE + 1, -_NONE - 1)
    return np.where(np.isnan(values), _NONE, whole).astype("<i2").tobytes()


def _padded(part: bytes) -> bytes:
    return part + b"\0" * (-len(part) % 4)


def _finite(metrics: dict[str, float]) -> dict[str, float]:
    """JSON has no NaN and no infinity."""
    return {name: _short(value) for name, value in metrics.items() if math.isfinite(value)}


def _line(message: str) -> str:
    return re.sub(r"\s+", " ", message).strip()


def _short(value: float) -> float:
    """Six digits are enough to look at, and shorter to write."""
    return float(f"{value:.6g}")

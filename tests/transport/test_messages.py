"""Messages survive the wire exactly, and what is not a message is refused with a reason."""

from __future__ import annotations

import contextlib
import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stackrl.runtime.transport import messages
from stackrl.runtime.transport.messages import (
    NO_ROUTE,
    Ack,
    End,
    Hello,
    Logprobs,
    MessageError,
    MicroBatch,
    Sample,
    Span,
    Version,
    decode,
    encode,
)


def sample(**changes):
    fields = {
        "rollout": "0-1",
        "group": 0,
        "environment": "reverse",
        "tokens": np.array([5, 6, 7, 8], dtype="<i4"),
        "loss_mask": np.array([0, 0, 1, 1], dtype="|u1"),
        "logprobs": np.array([0, 0, -0.5, -1.25], dtype="<f4"),
        "spans": [Span(2, 3, Version(1, 4)), Span(3, 4, Version(1, 5))],
    }
    return Sample(**fields | changes)


def test_a_sample_survives_the_wire():
    sent = sample(advantage=0.25)
    got = decode(encode(sent), Sample)
    for name in ("tokens", "loss_mask", "logprobs"):
        before, after = getattr(sent, name), getattr(got, name)
        assert after.dtype == before.dtype and after.tolist() == before.tolist()
    assert got.spans == sent.spans and got.advantage == 0.25
    assert got.oldest() == Version(1, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": np.array([5, 6, 7, 8], dtype="<i8")}, "tokens is <i8"),
        ({"tokens": np.array([5.0, 6, 7, 8], dtype="<f4")}, "tokens is <f4"),
        ({"logprobs": np.zeros(3, dtype="<f4")}, "logprobs is <f4 \\[3\\]"),
        ({"loss_mask": np.array([1, 0, 1, 1], dtype="|u1")}, "first token"),
        ({"loss_mask": np.array([0, 1, 4, 1], dtype="|u1")}, "marked 4"),
        ({"reference": np.zeros(3, dtype="<f4")}, "reference"),
        ({"advantage": float("nan")}, "not finite"),
        ({"spans": [Span(2, 4, Version(1, 4)), Span(3, 4, Version(1, 5))]}, "does not follow"),
        ({"spans": [Span(2, 9, Version(1, 4))]}, "does not follow"),
    ],
)
def test_a_sample_that_does_not_add_up_is_refused(changes, reason):
    with pytest.raises(ValueError, match=reason):
        sample(**changes)


def test_lengths_of_a_micro_batch_add_up():
    parts = {
        "tokens": np.arange(5, dtype="<i4"),
        "loss_mask": np.ones(5, dtype="|u1"),
        "logprobs": np.zeros(5, dtype="<f4"),
        "advantages": np.zeros(2, dtype="<f4"),
        "temperatures": np.ones(2, dtype="<f4"),
        "documents": ["0-1", "0-1/1"],
    }
    MicroBatch(lengths=np.array([2, 3], dtype="<i4"), **parts)
    with pytest.raises(ValueError, match="do not add up"):
        MicroBatch(lengths=np.array([2, 2], dtype="<i4"), **parts)
    with pytest.raises(ValueError, match="empty document"):
        MicroBatch(lengths=np.array([5, 0], dtype="<i4"), **parts)
    with pytest.raises(ValueError, match="1 names for 2 documents"):
        MicroBatch(lengths=np.array([2, 3], dtype="<i4"), **parts | {"documents": ["0-1"]})


@pytest.mark.parametrize("dtype", ["|i1", "<i2"])
def test_routes_survive_the_wire(dtype):
    routes = np.arange(24, dtype=dtype).reshape(4, 3, 2)
    routes[0] = NO_ROUTE
    got = decode(encode(sample(routes=routes)), Sample).routes
    assert got.dtype == routes.dtype and got.tolist() == routes.tolist()
    assert decode(encode(sample()), Sample).routes is None


@pytest.mark.parametrize(
    ("routes", "reason"),
    [
        (
            np.zeros((3, 3, 2), "|i1"),
            r"routes is \|i1 \[3, 3, 2\], expected \|i1 or <i2 \[4, layers, experts",
        ),
        (np.zeros((4, 6), "|i1"), r"routes is \|i1 \[4, 6\]"),
        (np.zeros((4, 3, 2), "|u1"), r"routes is \|u1 \[4, 3, 2\]"),
        (np.zeros((4, 3, 2), "<i4"), r"routes is <i4 \[4, 3, 2\]"),
    ],
)
def test_routes_that_do_not_fit_their_tokens_are_refused(routes, reason):
    with pytest.raises(ValueError, match=reason):
        sample(routes=routes)
    with pytest.raises(ValueError, match=reason):
        MicroBatch(
            tokens=np.arange(4, dtype="<i4"),
            lengths=np.array([4], dtype="<i4"),
            loss_mask=np.ones(4, dtype="|u1"),
            logprobs=np.zeros(4, dtype="<f4"),
            advantages=np.zeros(1, dtype="<f4"),
            temperatures=np.ones(1, dtype="<f4"),
            documents=["0-1"],
            routes=routes,
        )


def test_logprobs_add_up():
    parts = {"incarnation": 1, "index": 3, "rank": 0, "documents": ["0-1", "demonstration"]}
    lengths = np.array([2, 0], dtype="<i4")
    sent = Logprobs(lengths=lengths, logprobs=np.array([-1.5, -2], dtype="<f4"), **parts)
    got = decode(encode(sent), Logprobs)
    assert got.documents == sent.documents and got.logprobs.tolist() == [-1.5, -2]
    with pytest.raises(ValueError, match=r"logprobs is <f4 \[3\], expected <f4 \[2\]"):
        Logprobs(lengths=lengths, logprobs=np.zeros(3, dtype="<f4"), **parts)
    with pytest.raises(ValueError, match="negative length"):
        Logprobs(lengths=-lengths, logprobs=np.zeros(0, dtype="<f4"), **parts)
    with pytest.raises(ValueError, match=r"lengths is"):
        Logprobs(lengths=lengths[:1], logprobs=np.zeros(2, dtype="<f4"), **parts)


def test_only_the_expected_kinds_are_read():
    with pytest.raises(MessageError, match=r"a 'End' came where Ack or Hello was expected"):
        decode(encode(End(reason="finished")), Ack, Hello)


def test_another_wire_version_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "WIRE_VERSION", 1)
    data = encode(End(reason="finished"))
    monkeypatch.undo()
    with pytest.raises(MessageError, match="wire version 1, this side speaks 5"):
        decode(data, End)


def test_a_message_over_the_limit_is_refused(monkeypatch):
    monkeypatch.setattr(messages, "MAX_MESSAGE_BYTES", 50)
    with pytest.raises(MessageError, match="over the limit of 50"):
        decode(encode(End(reason="x" * 100)), End)


def test_pickles_and_foreign_arrays_are_refused():
    with pytest.raises(MessageError):
        decode(pickle.dumps(sample()), Sample)
    for array, reason in (
        (["|O", [1], b"x" * 8], "dtype"),
        (["<i4", [1 << 40], b"1234"], "bytes of the array"),
        (["<i4", [-1], b"1234"], "shape"),
        (["<i4", [2], b"1234"], "bytes of the array"),
    ):
        body = msgspec.to_builtins(sample(), enc_hook=messages._encode_array) | {"tokens": array}
        envelope = [messages.WIRE_VERSION, "Sample", body]
        with pytest.raises(MessageError, match=reason):
            decode(msgspec.msgpack.encode(envelope), Sample)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.integers(min_value=0, max_value=10_000))
def test_garbage_is_refused_and_nothing_else_happens(noise, place):
    data = encode(sample())
    place %= len(data)
    for damaged in (noise, data[:place], data[:place] + noise + data[place + len(noise) :]):
        with contextlib.suppress(MessageError):
            decode(damaged, Sample)


@pytest.mark.parametrize("text", ["", "1", "1.", ".1", "1.2.3", "-1.2", "a.b", "default"])
def test_what_is_no_version(text):
    with pytest.raises(MessageError):
        Version.parse(text)


def test_versions_are_ordered_by_incarnation_first():
    assert Version.parse("2.41") == Version(2, 41)
    assert str(Version(2, 41)) == "2.41"
    assert Version(1, 900) < Version(2, 0) < Version(2, 1)

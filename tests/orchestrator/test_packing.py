"""Packing and batches: everything is in exactly once, nothing overflows, ranks stay in step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as renamed

from stackrl.runtime.orchestrator.batching import Layout, Place, build, document_names, micro_batch
from stackrl.runtime.orchestrator.packing import causal_cost, pack
from stackrl.runtime.transport.messages import Sample, Span, Version

COST = causal_cost(64)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 100), max_size=60),
    ranks=st.integers(1, 5),
    spare=st.integers(0, 200),
)
def test_a_packing_is_whole_and_even(lengths, ranks, spare):
    capacity = max(lengths, default=1) + spare
    dealt = pack(lengths, capacity, ranks, COST)
    assert len(dealt) == ranks
    assert len({len(bins) for bins in dealt}) == 1 and dealt[0]
    assert sorted(i for bins in dealt for content in bins for i in content) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in content) <= capacity for bins in dealt for content in bins)
    # first-fit leaves at most one bin half empty; then ranks get as many each
    assert len(dealt[0]) * ranks < 2 * sum(lengths) / capacity + 1 + ranks


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 100), min_size=20, max_size=60), ranks=st.integers(2, 4))
def test_ranks_have_about_the_same_to_do(lengths, ranks):
    dealt = pack(lengths, 1000, ranks, COST)
    loads = [sum(COST(lengths[i]) for content in bins for i in content) for bins in dealt]
    assert max(loads) - min(loads) <= 2 * COST(100), "within a longest sequence or two"


def test_long_sequences_cost_more_than_their_length():
    lengths = [800, 100, 100, 100, 100, 100, 100, 100, 100]
    [[long], [short]] = pack(lengths, 2000, 2, causal_cost(8))
    assert long == [0] and len(short) == 8


def test_a_sequence_over_the_capacity_is_an_error():
    with pytest.raises(ValueError, match="a sequence of 65 tokens does not fit micro-batches of 64"):
        pack([3, 65], 64, 1, COST)


def sample(number, length, advantage):
    sampled = length // 2
    return Sample(
        rollout=f"{number}-0",
        group=number,
        environment="e",
        tokens=np.arange(length, dtype="<i4") + 1000 * number,
        loss_mask=np.array([0] * (length - sampled) + [1] * sampled, dtype="|u1"),
        logprobs=-np.arange(length, dtype="<f4"),
        spans=[Span(length - sampled, length, Version(1, 0))],
        advantage=advantage,
        temperature=0.5 + number,
    )


def test_documents_keep_their_own_arrays():
    samples = [sample(n, 4 + 3 * n, advantage=n / 8) for n in range(5)]
    place = Place(1, 7, 4, "main", 2, checkpoint=True, last_of_stage=False)
    batches = build(samples, place, Layout(capacity=20, ranks=2, cost=COST))
    found = {}
    for batch in batches:
        assert (batch.index, batch.step, batch.stage, batch.checkpoint, batch.ranks) == (
            7,
            4,
            "main",
            True,
            2,
        )
        assert batch.tokens == sum(int(s.loss_mask.sum()) for s in samples) and batch.sequences == 5
        for part in batch.micro_batches:
            starts = np.cumsum(part.lengths) - part.lengths
            for d, (start, length) in enumerate(zip(starts, part.lengths, strict=True)):
                here = slice(start, start + length)
                found[int(part.tokens[start]) // 1000] = (part, d, here)
    assert sorted(found) == list(range(5))
    for number, (part, d, here) in found.items():
        assert part.tokens[here].tolist() == samples[number].tokens.tolist()
        assert part.loss_mask[here].tolist() == samples[number].loss_mask.tolist()
        assert part.logprobs[here].tolist() == samples[number].logprobs.tolist()
        assert part.advantages[d] == samples[number].advantage
        assert part.temperatures[d] == samples[number].temperature
        assert part.documents[d] == samples[number].rollout


def test_routes_stand_beside_their_tokens_and_none_where_a_sample_has_none():
    samples = [sample(n, 4 + n, 0.0) for n in range(3)]
    narrow = np.arange(16, dtype="|i1").reshape(4, 2, 2)
    wide = np.arange(200, 224, dtype="<i2").reshape(6, 2, 2)
    mixed = [renamed(samples[0], routes=narrow), samples[1], renamed(samples[2], routes=wide)]
    routes = micro_batch(mixed, ["a", "b", "c"]).routes
    assert routes.dtype.str == "<i2"
    assert routes.tolist() == narrow.tolist() + [[[-1, -1]] * 2] * 5 + wide.tolist()
    assert micro_batch(mixed[:2], ["a", "b"]).routes.dtype.str == "|i1"
    assert micro_batch(samples, ["a", "b", "c"]).routes is None
    other = renamed(samples[1], routes=np.zeros((5, 3, 2), "|i1"))
    with pytest.raises(
        ValueError, match=r"routes through different layers or experts: \[\(2, 2\), \(3, 2\)\]"
    ):
        micro_batch([mixed[0], other], ["a", "b"])


def test_documents_are_named_after_their_rollouts():
    """A rollout may have several; a demonstration is nobody's."""
    samples = [
        renamed(sample(n, 6, 0.0), rollout=name) for n, name in enumerate(["0-1", "0-2", "0-1", "0-1"])
    ]
    shown = renamed(sample(4, 6, 0.0), rollout="demonstration", spans=[])
    assert document_names([*samples, shown, shown]) == [
        "0-1",
        "0-2",
        "0-1/1",
        "0-1/2",
        "demonstration",
        "demonstration",
    ]


def test_ranks_that_share_micro_batches_get_the_same():
    samples = [sample(n, 4 + 3 * n, advantage=n / 8) for n in range(5)]
    place = Place(1, 7, 4, "main", 2, checkpoint=True, last_of_stage=False)
    apart = build(samples, place, Layout(capacity=20, ranks=2, cost=COST))
    shared = build(samples, place, Layout(capacity=20, ranks=4, cost=COST, context=2))
    assert [(batch.rank, batch.ranks) for batch in shared] == [(rank, 4) for rank in range(4)]
    for batch in shared:
        expected = apart[batch.rank // 2].micro_batches
        assert [micro.documents for micro in batch.micro_batches] == [micro.documents for micro in expected]
        assert (batch.tokens, batch.sequences) == (apart[0].tokens, 5)


def test_each_token_knows_how_old_it_is_and_what_the_reference_says():
    samples = [sample(n, 4 + n, 0.0) for n in range(3)]
    aged = [
        renamed(samples[0], spans=[Span(1, 3, Version(1, 2)), Span(3, 4, Version(2, 4))]),
        renamed(samples[1], spans=[]),
        renamed(samples[2], reference=np.arange(6, dtype="<f4")),
    ]
    packed = micro_batch(aged, ["a", "b", "c"], 5)
    assert packed.ages[:9].tolist() == [0, 3, 3, 1] + [0] * 5
    assert np.isnan(packed.reference[:9]).all() and packed.reference[9:].tolist() == list(range(6))
    plain = micro_batch([renamed(s, spans=[]) for s in samples], ["a", "b", "c"])
    assert plain.ages is None and plain.reference is None


def test_each_component_has_its_own_denominator():
    marked = [np.array(mask, "|u1") for mask in ([0, 2, 1, 1], [0, 0, 2, 2], [0, 3, 3, 0], [0, 0, 0, 0])]
    samples = [renamed(sample(n, 4, 0.0), loss_mask=mask) for n, mask in enumerate(marked)]
    place = Place(1, 7, 4, "main", 2, checkpoint=True, last_of_stage=False)
    for batch in build(samples, place, Layout(capacity=20, ranks=2, cost=COST)):
        assert (batch.tokens, batch.sequences) == (2, 1)
        assert (batch.ce_tokens, batch.ref_kl_tokens) == (3, 2)


def test_a_rank_without_work_gets_an_empty_micro_batch():
    place = Place(1, 0, 0, "main", 0, checkpoint=False, last_of_stage=False)
    _, idle = build([sample(0, 6, 1.0)], place, Layout(capacity=20, ranks=2, cost=COST))
    [part] = idle.micro_batches
    assert len(part.tokens) == len(part.lengths) == 0 and idle.tokens == 3

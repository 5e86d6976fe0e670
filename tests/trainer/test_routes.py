"""Replayed routes: the experts that were recorded are taken, with weights that the router computes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tiny_models import BYTES, tiny_config, tiny_model
from torch import Tensor
from torch.nn import functional as F
from trainer_ranks import OBJECTIVES
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer.models import folder
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.documents import layout
from stackrl.runtime.trainer.models.families import shape_of
from stackrl.runtime.trainer.models.mlp import Mixture, Traffic
from stackrl.runtime.trainer.models.shape import Experts
from stackrl.runtime.trainer.routing import Routing, routers
from stackrl.runtime.trainer.step import accumulate
from stackrl.runtime.transport.messages import NO_ROUTE

KINDS = {
    "softmax": tiny_config("qwen3-moe", num_hidden_layers=3, mlp_only_layers=[1]),
    "sigmoid in groups": tiny_config("glm4-moe", num_hidden_layers=3),
}
LENGTHS = np.array([9, 30, 2, 17])
CPU = torch.device("cpu")


@pytest.fixture(params=KINDS)
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    torch.set_num_threads(1)
    model = tiny_model(KINDS[request.param])
    with torch.no_grad():
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias.add_(torch.randn_like(bias) * 0.1)
    model.save_pretrained(tmp_path)
    decoder = Decoder(shape_of(tmp_path))
    folder.load(decoder, tmp_path)
    return decoder


def logits(decoder: Decoder) -> Tensor:
    tokens = torch.randint(BYTES, (int(LENGTHS.sum()),), generator=torch.Generator().manual_seed(1))
    return decoder.model(tokens, layout(LENGTHS)) @ decoder.head_weight.T


@contextmanager
def recorded(decoder: Decoder) -> Iterator[dict[int, Tensor]]:
    """The experts of each token in each layer that has some, int64 [T, k], of what runs within."""
    chosen: dict[int, Tensor] = {}
    hooks = [
        router.register_forward_hook(lambda _, __, result, layer=layer: chosen.update({layer: result[1]}))
        for layer, router in routers(decoder).items()
    ]
    yield chosen
    for hook in hooks:
        hook.remove()


def routes_of(decoder: Decoder, chosen: dict[int, Tensor]) -> Tensor:
    """int16 [T, L, k], with numbers that mean nothing in layers without experts."""
    (some, *_) = chosen.values()
    none = torch.full_like(some, 99)
    layers = [chosen.get(layer, none) for layer in range(len(decoder.model.layers))]
    return torch.stack(layers, 1).to(torch.int16)


def with_gradients(decoder: Decoder, routes: Tensor | None) -> tuple[Tensor, dict[str, Tensor]]:
    routing = Routing(decoder, CPU)
    routing.begin(torch.ones(int(LENGTHS.sum()), dtype=torch.bool), routes)
    result = logits(decoder)
    result.square().mean().backward()
    routing.end()
    gradients = {name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None}
    decoder.zero_grad()
    return result.detach(), gradients


def test_what_was_recorded_replays_bit_for_bit(decoder: Decoder) -> None:
    with recorded(decoder) as chosen:
        free, free_gradients = with_gradients(decoder, None)
    replayed, gradients = with_gradients(decoder, routes_of(decoder, chosen))
    assert torch.equal(free, replayed)
    assert gradients.keys() == free_gradients.keys()
    assert all(torch.equal(gradients[name], free_gradients[name]) for name in gradients)


def test_replay_keeps_the_experts_of_the_old_weights(decoder: Decoder) -> None:
    with recorded(decoder) as old:
        logits(decoder)
    routes = routes_of(decoder, old)
    with torch.no_grad():
        for router in routers(decoder).values():
            router.weight.add_(torch.randn_like(router.weight) * 0.05)
    with recorded(decoder) as free:
        free_logits = logits(decoder)
    with recorded(decoder) as kept:
        replayed, _ = with_gradients(decoder, routes)
    assert not torch.allclose(free_logits, replayed)
    for layer in old:
        assert torch.equal(kept[layer], old[layer])
        assert not torch.equal(free[layer].sort().values, old[layer].sort().values)


def test_tokens_without_routes_take_what_the_router_chooses(decoder: Decoder) -> None:
    with recorded(decoder) as own:
        free = logits(decoder)
    tokens, (layer, *_) = int(LENGTHS.sum()), own
    experts = torch.stack([torch.randperm(8)[: own[layer].shape[1]] for _ in range(tokens)])
    routes = routes_of(decoder, {layer: experts for layer in own})
    routes[: tokens // 2] = -1
    routes[-1, :, 0] = -1  # a part of it is as good as none
    with recorded(decoder) as taken:
        routing = Routing(decoder, CPU)
        counted = torch.ones(tokens, dtype=torch.bool)
        counted[:5] = False
        routing.begin(counted, routes)
        mixed = logits(decoder)
        routing.end()
    first = min(own)
    assert torch.equal(taken[first][: tokens // 2], own[first][: tokens // 2])
    assert torch.equal(taken[first][-1], own[first][-1])
    assert torch.equal(taken[first][tokens // 2 : -1], experts[tokens // 2 : -1])
    without = slice(LENGTHS[0])  # a document without routes
    torch.testing.assert_close(mixed[without], free[without])
    replayed = tokens - tokens // 2 - 1
    assert routing.metrics()["routes_replayed"] == pytest.approx(replayed / (tokens - 5))


@pytest.mark.parametrize("decoder", ["sigmoid in groups"], indirect=True)
def test_routes_travel_with_the_tokens_of_their_documents(decoder: Decoder, mesh: object) -> None:
    """What each document alone was routed through is taken in packed micro-batches, by other weights too."""
    samples = []
    for sample in make_samples(9, seed=3):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))
        with recorded(decoder) as chosen, torch.no_grad():
            decoder.model(tokens, layout(np.array([len(tokens)])))
        routes = routes_of(decoder, chosen).to(torch.int8).numpy()
        routes[-1] = NO_ROUTE  # as an engine leaves it
        samples.append(msgspec.structs.replace(sample, routes=routes))
    (batch,) = make_batches(samples, capacity=80, report=True)
    free = [msgspec.structs.replace(micro, routes=None) for micro in batch.micro_batches]
    objective = OBJECTIVES["aipo, token"]
    same = accumulate(decoder, batch, objective)
    expected = accumulate(decoder, msgspec.structs.replace(batch, micro_batches=free), objective)
    np.testing.assert_allclose(same.logprobs(), expected.logprobs(), atol=1e-5)
    tokens = sum(len(sample.tokens) for sample in samples)
    assert same.metrics()["routes_replayed"] == pytest.approx(1 - len(samples) / tokens)

    with torch.no_grad():
        for router in routers(decoder).values():
            router.weight.neg_()
    for micro in batch.micro_batches:
        lone = msgspec.structs.replace(batch, micro_batches=[micro])
        with recorded(decoder) as taken:
            accumulate(decoder, lone, objective)
        known = torch.from_numpy(micro.routes[:, 1, 0] >= 0)
        for layer, experts in taken.items():
            assert torch.equal(experts[known], torch.from_numpy(micro.routes[:, layer].astype(int))[known])


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalized", [True, False])
def test_given_experts_are_weighted_by_the_routers_own_scores(score: str, normalized: bool) -> None:
    torch.manual_seed(0)
    shape = Experts(6, 2, 8, score, corrected=score == "sigmoid", normalized=normalized, scale=1.5)
    mixture = Mixture(shape, 16)
    with torch.no_grad():
        for parameter in mixture.parameters():
            parameter.normal_(0.0, 0.3)
    states = torch.randn(20, 16)
    given = torch.stack([torch.randperm(6)[:2] for _ in range(20)])
    mixture.gate.traffic = Traffic(torch.ones(20, dtype=torch.bool), given.to(torch.int8))
    result = mixture(states)
    result.square().sum().backward()

    expected, gradients = by_hand(mixture, states, given)
    torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
    for name, gradient in gradients.items():
        found = mixture.get_parameter(name).grad.double()
        assert (found - gradient).norm() / gradient.norm() < 1e-5, name


def by_hand(mixture: Mixture, states: Tensor, given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """In float64, token by token and expert by expert: the sum, and the gradients of its square's sum."""
    leaves = {n: p.detach().double().requires_grad_() for n, p in mixture.named_parameters()}
    shape, results = mixture.gate.shape, []
    for token, experts in zip(states.double(), given.tolist(), strict=True):
        raw = leaves["gate.weight"] @ token
        scores = raw.softmax(0) if shape.score == "softmax" else raw.sigmoid()
        total = sum(scores[expert] for expert in experts) if shape.normalized else 1.0
        result = torch.zeros(16, dtype=torch.float64)
        for expert in experts:
            gate, up = (leaves["experts.gate_up_proj"][expert] @ token).chunk(2)
            output = leaves["experts.down_proj"][expert] @ (F.silu(gate) * up)
            result = result + shape.scale * scores[expert] / total * output
        results.append(result)
    expected = torch.stack(results)
    expected.square().sum().backward()
    return expected.detach(), {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize(
    ("shape", "expert", "reason"),
    [
        ((5, 2, 2), 0, "routes of 2 layers and 2 experts per token do not fit layer 2"),
        ((5, 3, 4), 0, "4 experts per token do not fit layer 0 of the model, where a token goes through 2"),
        ((5, 3, 2), 8, "routes name expert 8, which the model does not have"),
    ],
)
@pytest.mark.parametrize("decoder", ["softmax"], indirect=True)
def test_routes_of_another_model_are_refused(decoder: Decoder, shape, expert: int, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Routing(decoder, CPU).begin(torch.ones(5, dtype=torch.bool), torch.full(shape, expert))


def test_a_rank_without_tokens_counts_none(decoder: Decoder) -> None:
    routing, (router, *_) = Routing(decoder, CPU), routers(decoder).values()
    layers, experts = len(decoder.model.layers), router.shape.chosen
    routing.begin(torch.ones(0, dtype=torch.bool), torch.zeros(0, layers, experts, dtype=torch.int16))
    for gate in routers(decoder).values():
        gate(torch.zeros(0, 64))
    routing.end()
    assert routing.metrics() == {}

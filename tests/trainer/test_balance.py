"""Loads of experts: counted once over all ranks, and balanced by the bias of the choice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from routing_ranks import BALANCE_RATE, TWO_RANKS, Steps, on_two_ranks, steps
from tiny_models import tiny_config, tiny_model
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer_ranks import OBJECTIVES
from trainer_runs import make_batches, make_samples

from stackrl.runtime.trainer import checkpoint
from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.models.decoder import Decoder
from stackrl.runtime.trainer.models.families import ModelError, shape_of
from stackrl.runtime.trainer.models.mlp import Mixture
from stackrl.runtime.trainer.models.shape import Experts
from stackrl.runtime.trainer.optimizer import make_optimizer
from stackrl.runtime.trainer.parallelize import build, gathered
from stackrl.runtime.trainer.protocol import Progress
from stackrl.runtime.trainer.routing import Routing, routers
from stackrl.runtime.trainer.step import accumulate, train_step
from stackrl.runtime.transport.messages import Batch
from stackrl.schemas.mixture import Mixture as Settings
from stackrl.schemas.optimizers import AdamW
from stackrl.schemas.trainer import Trainer

CPU = torch.device("cpu")
LAYERS = [1, 2]
"""Of the tiny model, those with experts."""
EXPERTS = 16


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model whose routers have a bias."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("mixture")
    tiny_model(tiny_config("glm4-moe", num_hidden_layers=3)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def alone(mixture: Path, mesh: Meshes) -> Steps:
    return steps(mesh, mixture)


def one_step(decoder: Decoder, batch: Batch, **options) -> dict[str, float]:
    optimizer = make_optimizer(decoder, AdamW())
    objective = OBJECTIVES["aipo, token"]
    return train_step(decoder, optimizer, batch, objective, rate=1e-3, limit=1.0, **options).metrics


def whole(parameter: Tensor) -> Tensor:
    return (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach()


def choices(decoder: Decoder, batch: Batch) -> dict[int, tuple[Tensor, Tensor]]:
    """Layer → scores float64 [T, E] and experts [T, k] of all tokens of ``batch``."""
    inputs: dict[int, list[Tensor]] = {layer: [] for layer in LAYERS}
    chosen: dict[int, list[Tensor]] = {layer: [] for layer in LAYERS}
    hooks = []
    for layer, router in routers(decoder).items():

        def note(_: object, given: tuple[Tensor], result: tuple[Tensor, Tensor], layer: int = layer) -> None:
            inputs[layer].append(given[0].detach())
            chosen[layer].append(result[1])

        hooks.append(router.register_forward_hook(note))
    accumulate(decoder, batch, OBJECTIVES["aipo, token"])
    decoder.zero_grad()
    for hook in hooks:
        hook.remove()
    weights = {layer: whole(router.weight) for layer, router in routers(decoder).items()}
    return {
        layer: (
            (torch.cat(inputs[layer]).double() @ weights[layer].double().T).sigmoid(),
            torch.cat(chosen[layer]),
        )
        for layer in LAYERS
    }


def test_metrics_and_biases_follow_from_the_choices_of_all_tokens(mixture: Path, mesh: Meshes) -> None:
    decoder = build(mixture, Trainer(), "float32", mesh)
    (batch,) = make_batches(make_samples(13, seed=3), capacity=64)
    assert len(batch.micro_batches) > 2
    before = {
        layer: router.e_score_correction_bias.numpy().copy() for layer, router in routers(decoder).items()
    }
    seen = choices(decoder, batch)
    metrics = one_step(decoder, batch, balance_rate=BALANCE_RATE)
    tokens = sum(len(micro.tokens) for micro in batch.micro_batches)
    imbalances, confidences = [], []
    for layer, (scores, chosen) in seen.items():
        assert len(chosen) == tokens
        load = np.bincount(chosen.flatten().numpy(), minlength=EXPERTS)
        imbalances.append(load.max() / load.mean())
        assert metrics[f"load_imbalance/{layer}"] == pytest.approx(imbalances[-1], rel=1e-12)
        confidences.append(scores.gather(1, chosen).sum(1) / scores.sum(1))
        bias = routers(decoder)[layer].e_score_correction_bias
        expected = before[layer] + (BALANCE_RATE * np.sign(load.mean() - load)).astype(np.float32)
        assert bias.dtype == torch.float32 and np.array_equal(bias.numpy(), expected)
        assert len(set(np.sign(load.mean() - load))) > 1
    assert metrics["load_imbalance"] == max(imbalances) > 1
    assert metrics["router_confidence"] == pytest.approx(float(torch.cat(confidences).mean()), rel=1e-6)
    assert metrics["routes_replayed"] == 0
    assert {name for name in metrics if "/" in name} == {f"load_imbalance/{layer}" for layer in LAYERS}


def test_a_load_that_is_the_mean_leaves_the_bias(mixture: Path) -> None:
    decoder = Decoder(shape_of(mixture))
    routing = Routing(decoder, CPU)
    per_layer = [torch.full((EXPERTS,), 3), torch.tensor([3] * 14 + [2, 4])]
    routing.begin(torch.ones(16, dtype=torch.bool))
    for router, load in zip(routers(decoder).values(), per_layer, strict=True):
        router.traffic.load, router.traffic.confidence = load, torch.tensor(8.0, dtype=torch.float64)
    routing.end()
    routing.balance(0.25)
    level, tilted = (router.e_score_correction_bias.tolist() for router in routers(decoder).values())
    assert level == [0.0] * 16
    assert tilted == [0.0] * 14 + [0.25, -0.25]
    assert routing.metrics()["load_imbalance/2"] == pytest.approx(4 / 3)
    assert routing.metrics()["router_confidence"] == 0.5


def test_padding_counts_for_nothing(mixture: Path) -> None:
    decoder = Decoder(shape_of(mixture))
    router = routers(decoder)[1]
    torch.nn.init.normal_(router.weight)
    states, counted = torch.randn(12, 64), torch.tensor([True] * 7 + [False] * 2 + [True] * 3)
    routing = Routing(decoder, CPU)
    routing.begin(counted)
    for gate in routers(decoder).values():
        gate(states)
    confidence, load = router.traffic.confidence, router.traffic.load
    routing.begin(torch.ones(10, dtype=torch.bool))
    router(states[counted])
    assert torch.equal(router.traffic.load, load) and int(load.sum()) == 10 * router.shape.chosen
    torch.testing.assert_close(router.traffic.confidence, confidence)


def test_balance_evens_out_a_lopsided_router() -> None:
    """A fixed stream of tokens, as in the paper: the worst expert's excess all but vanishes."""
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"1": Mixture(Experts(8, 2, 8, "sigmoid", corrected=True), 16)})
    router = routers(model)[1]
    with torch.no_grad():
        router.weight.normal_(0.0, 0.5)
    imbalances = []
    for _ in range(150):
        routing = Routing(model, CPU)
        routing.begin(torch.ones(512, dtype=torch.bool))
        router(torch.randn(512, 16) + 0.5)
        routing.end()
        routing.balance(0.01)
        imbalances.append(routing.metrics()["load_imbalance"])
    assert np.mean(imbalances[:5]) > 1.5 and np.mean(imbalances[-30:]) < 1.25


def test_a_layer_that_is_computed_again_counts_once(mixture: Path, mesh: Meshes, alone: Steps) -> None:
    (batch,) = make_batches(make_samples(8, seed=3), capacity=64)
    recomputing = Trainer(activation_checkpointing="full")
    decoder = build(mixture, recomputing, "float32", mesh)
    tokens = sum(len(micro.tokens) for micro in batch.micro_batches)
    for load in accumulate(decoder, batch, OBJECTIVES["aipo, token"]).routing.loads().values():
        assert int(load.sum()) == tokens * 3
    again = steps(mesh, mixture, settings=recomputing)
    for kept, recomputed in zip(alone.metrics, again.metrics, strict=True):
        assert {n: v for n, v in kept.items() if n.startswith("load")} == {
            n: v for n, v in recomputed.items() if n.startswith("load")
        }
        assert kept["router_confidence"] == pytest.approx(recomputed["router_confidence"], rel=1e-6)
    assert all(torch.equal(alone.biases[layer], again.biases[layer]) for layer in LAYERS)


@pytest.mark.slow
def test_two_ranks_count_and_balance_as_one_does(mixture: Path, alone: Steps, tmp_path: Path) -> None:
    found = on_two_ranks(mixture, tmp_path)
    assert found.keys() == TWO_RANKS.keys()
    assert any(bias.any() for bias in alone.biases.values())
    assert 0.5 < alone.metrics[0]["routes_replayed"] < 1 and alone.metrics[1]["routes_replayed"] == 0
    for name, ranks in found.items():
        assert ranks[0].metrics == ranks[1].metrics, name
        for rank in ranks:
            for layer in LAYERS:
                assert torch.equal(rank.biases[layer], alone.biases[layer]), (name, layer)
            for ours, expected in zip(rank.metrics, alone.metrics, strict=True):
                assert ours.keys() == expected.keys()
                for key in ("load_imbalance", "load_imbalance/1", "load_imbalance/2", "routes_replayed"):
                    assert ours[key] == expected[key], (name, key)
                for key in ("router_confidence", "loss", "gradient_norm", "entropy"):
                    assert ours[key] == pytest.approx(expected[key], rel=1e-4), (name, key)


def test_without_a_rate_and_after_a_skipped_step_biases_stay(mixture: Path, mesh: Meshes) -> None:
    decoder = build(mixture, Trainer(), "float32", mesh)
    one_step(decoder, make_batches(make_samples(8, seed=3))[0])
    (bad,) = make_batches(make_samples(8, seed=3))
    bad.micro_batches[0].logprobs = np.full_like(bad.micro_batches[0].logprobs, np.nan)
    metrics = one_step(decoder, bad, balance_rate=0.5)
    assert metrics["skipped"] == 1 and metrics["load_imbalance"] > 1
    assert not any(router.e_score_correction_bias.any() for router in routers(decoder).values())


def test_a_moved_bias_is_in_checkpoints_and_goes_to_the_engines_whole(
    mixture: Path, mesh: Meshes, tmp_path: Path
) -> None:
    decoder = build(mixture, Trainer(), "float32", mesh)
    optimizer = make_optimizer(decoder, AdamW())
    third = 1 / 3  # no number of bfloat16
    train_step(
        decoder,
        optimizer,
        make_batches(make_samples(8, seed=3))[0],
        OBJECTIVES["aipo, token"],
        rate=1e-3,
        limit=1.0,
        balance_rate=third,
    )
    moved = {layer: router.e_score_correction_bias.clone() for layer, router in routers(decoder).items()}
    assert set(moved[1].abs().tolist()) <= {0.0, float(np.float32(third))} and moved[1].any()
    published = dict(gathered(decoder, torch.bfloat16))
    for layer, bias in moved.items():
        sent = published[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
        assert sent.dtype == torch.float32 and torch.equal(sent, bias)
    saver = checkpoint.Saver("cpu")
    saver.begin(tmp_path, checkpoint.state_of(decoder, optimizer), Progress(), {}, lambda: None)
    saver.settle()
    fresh = build(mixture, Trainer(), "float32", mesh)
    checkpoint.load(tmp_path, fresh, make_optimizer(fresh, AdamW()))
    for layer, router in routers(fresh).items():
        assert torch.equal(router.e_score_correction_bias, moved[layer])


def test_a_frozen_router_stays_and_everything_else_is_trained(mixture: Path, mesh: Meshes) -> None:
    frozen = Trainer(mixture=Settings(frozen_router=True))
    decoder = build(mixture, frozen, "float32", mesh)
    optimizer = make_optimizer(decoder, AdamW())
    before = {name: whole(p).clone() for name, p in decoder.named_parameters()}
    (batch,) = make_batches(make_samples(8, seed=3))
    train_step(decoder, optimizer, batch, OBJECTIVES["supervised"], rate=1e-2, limit=1.0)
    for name, parameter in decoder.named_parameters():
        still = torch.equal(whole(parameter), before[name])
        assert still == name.endswith("mlp.gate.weight"), name
        assert (parameter in optimizer.state) != still, name


@pytest.mark.parametrize("key", ["balance_rate", "frozen_router", "router_replay"])
def test_a_model_without_experts_takes_none_of_it(model: Path, mesh: Meshes, key: str) -> None:
    settings = Trainer(mixture=Settings(**{key: 0.5 if key == "balance_rate" else True}))
    with pytest.raises(
        ModelError, match=rf"trainer\.mixture\.{key}: the model has no experts; remove the key"
    ):
        build(model, settings, "float32", mesh)


def test_balance_needs_a_bias(mesh: Meshes, tmp_path: Path) -> None:
    tiny_model(tiny_config("qwen3-moe")).save_pretrained(tmp_path)
    settings = Trainer(mixture=Settings(balance_rate=0.001))
    with pytest.raises(ModelError, match=r"balance_rate: the model's routers lack the bias that would move"):
        build(tmp_path, settings, "float32", mesh)
    decoder = build(tmp_path, Trainer(), "float32", mesh)
    metrics = one_step(decoder, make_batches(make_samples(4, seed=3))[0])
    assert metrics["load_imbalance"] >= 1 and 2 / 8 < metrics["router_confidence"] < 1

"""Each optimizer on two ranks steps as on one, and goes on from a checkpoint of any number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from optimizer_ranks import (
    OPTIMIZERS,
    Weights,
    differences,
    net,
    on_two_ranks,
    resumed,
    step,
    trained,
    weights,
)

from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.optimizer import make_optimizer

pytestmark = pytest.mark.slow

EVERY = pytest.mark.parametrize("name", OPTIMIZERS)


@dataclass(frozen=True)
class Seen:
    """Weights after four steps, by optimizer."""

    alone: dict[str, Weights]
    """One rank."""
    together: dict[str, Weights]
    """Two ranks."""
    one_to_two: dict[str, Weights]
    """Two ranks, from what one saved after two steps."""
    two_to_one: dict[str, Weights]


@pytest.fixture(scope="module")
def seen(mesh: Meshes, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    of_one, of_two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    alone = {name: trained(mesh.dense, settings, of_one / name) for name, settings in OPTIMIZERS.items()}
    together, one_to_two = on_two_ranks(saved=of_one, save=of_two)
    two_to_one = {name: resumed(mesh.dense, settings, of_two / name) for name, settings in OPTIMIZERS.items()}
    return Seen(alone, together, one_to_two, two_to_one)


@EVERY
def test_one_rank_steps_as_an_unsharded_model(seen: Seen, name: str) -> None:
    assert max(differences(trained(None, OPTIMIZERS[name]), seen.alone[name]).values()) <= 1e-6


@EVERY
def test_two_ranks_step_as_one(seen: Seen, name: str) -> None:
    assert max(differences(seen.alone[name], seen.together[name]).values()) <= 1e-5


@EVERY
def test_one_ranks_checkpoint_goes_on_with_two(seen: Seen, name: str) -> None:
    assert max(differences(seen.alone[name], seen.one_to_two[name]).values()) <= 1e-5


@EVERY
def test_two_ranks_checkpoint_goes_on_with_one(seen: Seen, name: str) -> None:
    assert max(differences(seen.alone[name], seen.two_to_one[name]).values()) <= 1e-5


@EVERY
def test_every_parameter_has_moved(seen: Seen, name: str) -> None:
    assert min(differences(weights(net()), seen.alone[name]).values()) > 1e-3


def test_momentum_is_what_a_checkpoint_restores(seen: Seen, mesh: Meshes, tmp_path: Path) -> None:
    """Without it the steps after a checkpoint would be others: the tests above could not pass by chance."""
    model = net(mesh.dense)
    settings = OPTIMIZERS["muon"]
    for numbers in ((0, 1), (2, 3)):
        optimizer = make_optimizer(model, settings)
        for number in numbers:
            step(model, optimizer, number, settings)
    forgetful = differences(seen.alone["muon"], weights(model))
    assert min(forgetful.values()) > 1e-4

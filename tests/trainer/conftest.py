from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rank_processes import alone
from trainer_runs import TINY, make_run, make_stack

from stackrl.runtime.trainer.meshes import Meshes
from stackrl.runtime.trainer.models.prepare import prepare
from stackrl.schemas.degrees import Degrees


@pytest.fixture(scope="module")
def mesh() -> Iterator[Meshes]:
    """This process as the only rank."""
    with alone():
        yield Meshes.of(Degrees(1), "cpu")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model."""
    return _model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `model`, with one matrix for embedding and head."""
    return _model(tmp_path_factory.mktemp("tied"), tie_word_embeddings=True)


def _model(path: Path, **config: object) -> Path:
    source = {"init": "random", "architecture": "qwen3", "config": TINY | {"initializer_range": 0.1} | config}
    run = make_run(path, make_stack(model=source))
    prepare(run)
    return run.model

"""A home and a tokenizer for recovery trials."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_roles import fresh_home

from stackrl.runtime.trainer.models.byte_tokenizer import byte_tokenizer


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with fresh_home(tmp_path, monkeypatch):
        yield


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the orchestrator needs of a model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(256).save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "qwen3", "hidden_size": 32}')
    return folder

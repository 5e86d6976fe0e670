from __future__ import annotations

import pytest


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries at once."""
    monkeypatch.setattr("stackrl.runtime.orchestrator.reinforcement._RETRY_AFTER", 0.0)
    monkeypatch.setattr("stackrl.runtime.orchestrator.engine_life.RETRY_AFTER", 0.0)

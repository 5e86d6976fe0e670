from __future__ import annotations

import pytest
from whole_runs import PROMPTS


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small evaluations, and retries at once."""
    monkeypatch.setattr("stackrl.runtime.orchestrator.evaluation.PROMPTS", PROMPTS)
    monkeypatch.setattr("stackrl.runtime.orchestrator.reinforcement._RETRY_AFTER", 0.0)
    monkeypatch.setattr("stackrl.runtime.orchestrator.engine_life.RETRY_AFTER", 0.0)

"""A real Slurm for the tests of this folder, and a home whose runs lie on its nodes' disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_roles import fresh_home
from slurm_cluster import Cluster, cluster, lacking

from stackrl.runtime.launch.slurm import commands as slurm_commands


@pytest.fixture(scope="session")
def tower() -> Iterator[Cluster]:
    if why := lacking():
        pytest.skip(f"no Slurm here: {why}")
    with cluster() as made:
        yield made


@pytest.fixture
def slurm(tower: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, with a home and a working directory of this test; its jobs end with it."""
    for name, value in tower.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    slurm_commands.cluster.cache_clear()
    with fresh_home(tmp_path, monkeypatch):
        yield tower
        tower.cancel_all()

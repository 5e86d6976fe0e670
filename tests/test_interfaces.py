"""Interfaces by which libraries are told where they may listen."""

from __future__ import annotations

from pathlib import Path

import pytest

import stacks
from stackrl.runtime.inference import disaggregation
from stackrl.runtime.inference.server import environment
from stackrl.runtime.interfaces import collectives_at, interface_of, rdma_ports
from stackrl.schemas.loader import load

HERE = "http://127.0.0.1:8123"


@pytest.mark.parametrize(
    ("address", "interface"),
    [("127.0.0.1", "lo"), ("127.0.0.9", "lo"), ("localhost", "lo"), ("203.0.113.7", "")],
)
def test_an_address_has_an_interface_where_it_is_ones_own(address: str, interface: str) -> None:
    assert interface_of(address) == interface
    names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert collectives_at(address) == (dict.fromkeys(names, interface) if interface else {})


def test_rdma_ports_are_named_as_ucx_names_them(tmp_path: Path) -> None:
    for port in ("mlx5_1/ports/1", "mlx5_0/ports/1", "mlx5_0/ports/2"):
        (tmp_path / port).mkdir(parents=True)
    assert rdma_ports(tmp_path) == ["mlx5_0:1", "mlx5_0:2", "mlx5_1:1"]
    assert rdma_ports(tmp_path / "none") == []


def test_an_engine_is_told_where_its_libraries_may_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = load(stacks.ROOT / "stacks" / "reverse-text-cpu.yaml").stack
    found = environment(stack, HERE, {})
    assert found["VLLM_HOST_IP"] == "127.0.0.1"
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "lo"
    assert environment(stack, HERE, {"GLOO_SOCKET_IFNAME": "eth7"})["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setattr(disaggregation, "rdma_ports", lambda: ["mlx5_0:1"])
    assert disaggregation.environment(stack, HERE)["UCX_NET_DEVICES"] == "lo,mlx5_0:1"

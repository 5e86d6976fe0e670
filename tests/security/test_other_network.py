"""Strangers in another network: what real engines let them reach, and what they answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import engine_pair
import pytest
from engine_pair import EnginePair
from engine_server import TOKEN, RealEngine
from other_network import Network, other_network

from stackrl.runtime.launch.sockets import listening
from stackrl.runtime.processes import descendants

pytestmark = pytest.mark.slow

WRONG = "Bearer another-token-for-tests"
RIGHT = f"Bearer {TOKEN}"
CONTROLS = {"/pause", "/resume", "/collective_rpc", "/update_weights", "/inference/v1/generate", "/metrics"}
"""Some of what must be among the routes."""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with other_network() as network:
        yield network


@pytest.fixture(scope="module")
def pair(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    """Engines at an address that the other network reaches, as those of a run on several nodes."""
    with engine_pair.served(tmp_path_factory.mktemp("pair"), host=network.here) as pair:
        yield pair


def routes_in(log: Path) -> list[tuple[str, str]]:
    """Method and path of every route that vLLM's server says it has."""
    found = re.findall(r"Route: (\S+), Methods: (.*)", log.read_text())
    return [(method, path) for path, methods in found for method in methods.split(", ")]


def logs(pair: EnginePair) -> list[Path]:
    return [pair.run.path / f"{pool}-{number}.log" for number, pool in enumerate(pair.pools)]


def sockets_of(pid: int) -> list[tuple[str, int]]:
    return [(address, port) for address, port, _ in listening([pid, *descendants(pid)])]


def test_no_port_of_an_engine_on_one_machine_is_reached(network: Network, real_engine: RealEngine) -> None:
    sockets = sockets_of(real_engine.pid)
    assert urlsplit(real_engine.url).port in {port for _, port in sockets}
    assert {ip_address(address).is_loopback for address, _ in sockets} == {True}
    assert network.reached([(network.here, port) for _, port in sockets]) == []


@pytest.mark.nightly
def test_no_route_answers_a_stranger_and_the_attempt_is_logged_once(
    network: Network, pair: EnginePair
) -> None:
    for url, log in zip(pair.urls, logs(pair), strict=True):
        routes = routes_in(log)
        assert {path for _, path in routes} > CONTROLS
        port = urlsplit(url).port
        shown = ("", WRONG, "Bearer ", f"Basic {TOKEN}", TOKEN)
        requests = [(method, path, header) for method, path in routes for header in shown]
        requests += [("OPTIONS", "/pause", ""), ("HEAD", "/health", ""), ("GET", "/no-such-route", "")]
        said = dict(zip(requests, network.ask(port, requests), strict=True))
        assert {request: status for request, status in said.items() if status != "401"} == {}
        known = network.ask(port, [("GET", "/weight_info", RIGHT), ("GET", "/is_paused", RIGHT)])
        assert known == ["200", "200"]
        assert log.read_text().count(f"refused {network.there} without the run's token") == 1


@pytest.mark.nightly
async def test_engines_listen_where_the_run_says_and_nowhere_else(network: Network, pair: EnginePair) -> None:
    prefill, decode = pair.clients()
    prompt = [token % 250 for token in range(300)]
    made = await prefill.prefill(prompt, salt="a", request_id="p")
    rest = dict(max_tokens=4, temperature=1.0, seed=0, salt="a", stop_token_ids=[], request_id="d")
    await decode.generate(prompt, prefilled=made, **rest)  # its keys have come this way
    for client, process in zip((prefill, decode), pair.processes, strict=True):
        await client.close()
        sockets = sockets_of(process.pid)
        outside = {address for address, _ in sockets if not ip_address(address).is_loopback}
        assert outside == {network.here}
        door = (network.here, urlsplit(client.url).port)
        assert network.reached([door]) == [door]

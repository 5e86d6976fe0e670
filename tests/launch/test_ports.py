"""Free ports are different, free, and not ones that the kernel gives away."""

from __future__ import annotations

import socket

from stackrl.runtime.launch import ports


def test_ports_are_different_and_free() -> None:
    found = ports.free_ports(20)
    assert len({*found}) == 20
    for port in found:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", port))


def test_a_taken_port_is_never_given(monkeypatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.free_ports(1)[0]))
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_LOWEST", port)
        monkeypatch.setattr(ports, "_first_ephemeral", lambda: port + 3)
        assert port not in ports.free_ports(1)


def test_ports_lie_below_those_of_outgoing_connections() -> None:
    assert max(ports.free_ports(50)) < ports._first_ephemeral()

"""Ports on 127.0.0.1 for servers of tests."""

from stackrl.runtime.launch.ports import free_ports


def free_port() -> int:
    """Below those that the kernel deals to outgoing connections: one of them could be given it before its
    server has it."""
    return free_ports(1)[0]

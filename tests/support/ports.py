"""Ports for servers of tests, which start on them again after a stop."""

from __future__ import annotations

import socket


def reserved_port() -> int:
    """Return a port of the loopback interface that the kernel gives to nothing else until this process ends.
    A server can listen there if it sets SO_REUSEADDR; until then connections to it are refused."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = int(held.getsockname()[1])
    held.detach()  # stays open
    return port

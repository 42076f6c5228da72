"""Bind the address that a server listens on. This module imports nothing of what answers there."""

from __future__ import annotations

import socket

# Connections that the kernel keeps for us; it keeps no more than net.core.somaxconn, 4,096 by default. A client that
# finds the line full tries again after 1 s at the earliest.
BACKLOG = 8192
MAX_HEAD_BYTES = 1 << 16


def bind_listener(host: str, port: int) -> socket.socket:
    """Return a listening socket. Its protocol is named, so that asyncio sets TCP_NODELAY and no token is held up.
    Raises OSError if the address cannot be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener

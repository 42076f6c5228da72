"""TCP keepalive for connections between servers and daemons: a peer that vanished is noticed within a minute."""

from __future__ import annotations

import socket

# Of a connection whose other end may vanish without a word: after 30 s of silence it is asked, three times.
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}


def kept_alive(connection: socket.socket) -> socket.socket:
    """One whose other end is gone is noticed, and small frames are sent at once."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection

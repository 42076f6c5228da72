"""Watches shards in other processes while no request needs them.

Without this, a server whose shard is gone would notice at its next request only, and a load balancer that has heard so
from `/health` sends none. One thread looks at every connection. It has the lane examine those that have ended: there
the executor learns that rows are lost, and there the shard is started again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from attrs import define, field

from adapters.device.lane.lane import DeviceLane, LaneClosed
from adapters.remote.client.peer import Peer
from adapters.watched_thread import WatchedThread

log = logging.getLogger("rekindle.shard")
LOOK_S = 0.25
SHARE = 4  # of the time that a try took, until the next one: of one that starts processes in vain, a fifth is spent
MOST_S = 60.0


@define(eq=False)
class ShardWatch:
    """Watches the target's shards in other processes. lane: the thread on which they are used."""

    peers: Sequence[Peer]
    lane: DeviceLane
    thread: WatchedThread = field(init=False)
    _closing: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.thread = WatchedThread("shard-watch", self._watch, restarts=3)

    def start(self) -> None:
        if self.peers:
            self.thread.start()

    def close(self) -> None:
        self._closing.set()

    def _watch(self) -> None:
        wait = LOOK_S
        while not self._closing.wait(wait):
            wait = LOOK_S
            for peer in self.peers:
                if peer.has_ended:
                    began = time.monotonic()
                    self._check_peer(peer)
                    wait = max(wait, min(MOST_S, SHARE * (time.monotonic() - began)) if peer.gone else 0)

    def _check_peer(self, peer: Peer) -> None:
        """Examine a connection on the lane, and wait for that."""
        done = threading.Event()

        def look() -> None:
            try:
                peer.check_connection()
            finally:
                done.set()

        def log_failure(error: BaseException) -> None:
            log.error("a shard could not be checked: %s", error, exc_info=error)
            done.set()

        with suppress(LaneClosed):
            # A launch that goes on ends first: it may have rows that are lost with the shard.
            self.lane.post(look, log_failure, between_steps=False)
            while not (done.wait(LOOK_S) or self._closing.is_set()):
                pass

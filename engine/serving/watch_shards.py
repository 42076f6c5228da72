"""A target's shards in other processes, looked after while nobody asks them anything.

A server whose shard is gone would not know it before the next request, and a balancer that has heard so from `/health`
sends none. So one thread looks at every connection, and has the lane look at those that have ended: there everybody is
told that rows are lost, and there the shard is had again.
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
from adapters.watched_thread import Watched

log = logging.getLogger("rekindle.shard")
LOOK_S = 0.25
SHARE = 4  # of the time that a try took, until the next one: of one that starts processes in vain, a fifth is spent
MOST_S = 60.0


@define(eq=False)
class ShardWatch:
    """peers: of the target's shards. lane: on which they are asked."""

    peers: Sequence[Peer]
    lane: DeviceLane
    thread: Watched = field(init=False)
    _ended: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.thread = Watched("shard-watch", self._watch, restarts=3)

    def start(self) -> None:
        if self.peers:
            self.thread.start()

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        wait = LOOK_S
        while not self._ended.wait(wait):
            wait = LOOK_S
            for peer in self.peers:
                if peer.ended:
                    began = time.monotonic()
                    self._look(peer)
                    wait = max(wait, min(MOST_S, SHARE * (time.monotonic() - began)) if peer.gone else 0)

    def _look(self, peer: Peer) -> None:
        """In the lane's turn, and wait for it."""
        done = threading.Event()

        def look() -> None:
            try:
                peer.look()
            finally:
                done.set()

        def failed(error: BaseException) -> None:
            log.error("a shard could not be looked after: %s", error, exc_info=error)
            done.set()

        with suppress(LaneClosed):
            self.lane.post(look, failed, between_steps=False)
            while not (done.wait(LOOK_S) or self._ended.is_set()):
                pass

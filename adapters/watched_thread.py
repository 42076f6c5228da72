"""A thread that cannot die unseen: it logs what it died of, keeps it for /health, and tells whoever must act on it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("rekindle.threads")


class Watched(threading.Thread):
    """Runs `work` until it returns. An exception that gets out of it is a bug, whatever its type.

    restarts: how often `work` is called anew after one; it must have let go of what it was at. died: called on this
    thread when that was once too often, so that nobody goes on waiting for it. trouble: the last exception in one line,
    empty as long as there was none.
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], object],
        *,
        died: Callable[[], object] = lambda: None,
        restarts: int = 0,
        daemon: bool = True,
    ) -> None:
        super().__init__(name=name, daemon=daemon)
        self._work, self._died, self._restarts = work, died, restarts
        self.trouble = ""
        self.dead = False

    def run(self) -> None:
        for left in range(self._restarts, -1, -1):
            try:
                self._work()
            except BaseException as error:
                self.trouble = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                log.critical("the thread %s %s", self.name, "starts again" if left else "has died", exc_info=error)
            else:
                return
        self.dead = True
        self._died()

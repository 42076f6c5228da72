"""A thread whose death is always noticed: it logs the exception, keeps it for /health, and calls a function."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("rekindle.threads")


class WatchedThread(threading.Thread):
    """Runs `work` until it returns. Any exception that leaves `work` is a bug.

    restarts: how often `work` is called again after an exception. It must have released everything it held.
    died: called on this thread after the last restart failed, so that no caller waits for the thread for ever.
    trouble: the last exception in one line. Empty as long as there was none.
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
        self._work = work
        self._died = died
        self._restarts = restarts
        self.trouble = ""
        self.is_dead = False
        self._listeners: list[Callable[[], object]] = []
        self._lock = threading.Lock()

    def call_on_death(self, listener: Callable[[], object]) -> None:
        """Call a function when the thread has died: on this thread, or at once if it is dead already."""
        with self._lock:
            if not self.is_dead:
                self._listeners.append(listener)
                return
        listener()

    def run(self) -> None:
        for left in range(self._restarts, -1, -1):
            try:
                self._work()
            except BaseException as error:
                self.trouble = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                log.critical("the thread %s %s", self.name, "starts again" if left else "has died", exc_info=error)
            else:
                return
        with self._lock:
            self.is_dead = True
        self._died()
        for listener in self._listeners:
            listener()

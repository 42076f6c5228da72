"""Clients that send the requests of the logs by their timestamps, and never before the answer that they wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from attrs import define

from engine.tools.simulation.logs.logged_requests import Agent, Request, Session
from engine.tools.simulation.virtual_clock import Clock

# Takes the request, and the function to call when it is answered.
Send = Callable[[Request, Callable[[], None]], None]


@define(eq=False)
class Clients:
    """All sessions at once, or `together` of them at a time, in rounds.

    The clocks of a round's sessions start together. If all sessions run at once, those with absolute times keep to
    them.
    """

    sessions: Sequence[Session]
    clock: Clock
    send: Send
    together: int = 0  # sessions of a round; 0: all
    _next: int = 0  # the first session that has not started
    _open: int = 0  # requests of this round without an answer

    def start(self) -> None:
        """Start the next round, if there is one."""
        stop = len(self.sessions) if not self.together else self._next + self.together
        group = self.sessions[self._next : stop]
        self._next += len(group)
        self._open = sum(session.count for session in group)
        zero = min((session.start_ns for session in group if session.absolute), default=0)
        for session in group:
            shift = zero if session.absolute and not self.together else session.start_ns
            for agent in session.agents:
                Sender(agent, self.clock, self.clock.now - shift, self.send, self._on_answered).next()

    def _on_answered(self) -> None:
        self._open -= 1
        if not self._open:
            self.start()


@define(eq=False)
class Sender:
    """One agent. offset: it is added to the agent's times."""

    agent: Agent
    clock: Clock
    offset: int
    send: Send
    answered: Callable[[], None]
    _sent: int = 0

    def next(self) -> None:
        """Put the next request on the clock, if there is one."""
        if self._sent < len(self.agent.requests):
            request = self.agent.requests[self._sent]
            pause = self._sent > 0
            self._sent += 1
            at = max(self.offset + request.at_ns, self.clock.now + request.pause_ns * pause)
            self.clock.at(at, partial(self.send, request, self._on_answered))

    def _on_answered(self) -> None:
        self.next()
        self.answered()

"""What a daemon has been asked without waiting, in the order of its answers, and what is kept for it until then."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import define, field, frozen

from adapters.remote.protocol.channel import Channel, failure, is_failure
from adapters.remote.protocol.messages import Op

MOST_POSTED = 8  # at once: so few answers find room on the way while nobody reads them
MOST_LENT = 32 << 20  # bytes of rows that it reads where they lie, at once: a few milliseconds


class PostedRefused(Exception):
    """Something that was asked without waiting was refused, and why."""


@frozen(eq=False)
class PostedQuestion:
    """keep: is referred to until it is answered. nbytes: of rows in there that the daemon reads."""

    op: Op
    request: int
    keep: Sequence[object]
    nbytes: int


@define(eq=False)
class Posted:
    """Of one connection; with the lock of whoever asks over it."""

    _questions: deque[PostedQuestion] = field(factory=deque[PostedQuestion])

    def add(self, question: PostedQuestion) -> None:
        self._questions.append(question)

    def is_crowded(self, nbytes: int) -> bool:
        """Are answers to be read before another one is asked, of so many bytes?"""
        lent = sum(one.nbytes for one in self._questions)
        return len(self._questions) >= MOST_POSTED or (lent > 0 and lent + nbytes > MOST_LENT)

    def answers(self, channel: Channel, seconds: float) -> str:
        """Read all of them. Return why the first refused one was refused; empty if none was.

        Raises ConnectionBroken, also where one has failed: nobody can say what that left. A refusal has changed nothing
        there, so the process goes on; but rows here and there are not the same any more.
        """
        refused = ""
        while self._questions:
            asked = self._questions[0]  # what is kept is kept meanwhile
            frame = channel.answer(asked.op, asked.request, seconds)
            if is_failure(frame):
                error = failure(channel, frame)
                why = f"{asked.op.name.lower()}: {error}"
                if not isinstance(error, ValueError):
                    raise channel.broken(why)
                refused = refused or why
            self._questions.popleft()
        return refused

    def clear(self) -> None:
        """The connection has ended: nothing in there is read any more."""
        self._questions.clear()

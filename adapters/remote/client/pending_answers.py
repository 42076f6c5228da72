"""The requests whose answers have not been read yet, in order, and the memory that is kept for them until then."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from attrs import define, field, frozen

from adapters.remote.protocol.channel import Channel, is_failure, read_failure
from adapters.remote.protocol.messages import Op

MOST_POSTED = 8  # requests without a read answer: the buffers of the connection hold so few unread answers
MOST_LENT = 32 << 20  # bytes of lent rows that a daemon is asked to copy before an answer is read: a few milliseconds


class PostedRefused(Exception):
    """A posted request was refused. The message says why."""


@frozen(eq=False)
class PostedQuestion:
    """A posted request. keep: objects that are kept until its answer. nbytes: of lent rows that the daemon reads."""

    op: Op
    request: int
    keep: Sequence[object]
    nbytes: int


@define(eq=False)
class Posted:
    """The posted requests of one connection. Used under the lock of its `Peer`."""

    _questions: deque[PostedQuestion] = field(factory=deque[PostedQuestion])

    def add(self, question: PostedQuestion) -> None:
        self._questions.append(question)

    def is_crowded(self, nbytes: int) -> bool:
        """Must answers be read before another request is posted? nbytes: of lent rows in that request."""
        lent = sum(question.nbytes for question in self._questions)
        return len(self._questions) >= MOST_POSTED or (lent > 0 and lent + nbytes > MOST_LENT)

    def read_answers(self, channel: Channel, seconds: float) -> str:
        """Read all answers. Return why the first refused request was refused; empty if none was.

        A refusal has changed nothing in the process, so it can go on, but its rows are no longer those that the server
        expects. Raises ConnectionBroken, also for a request that failed, because its effects are unknown.
        """
        refused = ""
        while self._questions:
            asked = self._questions[0]  # stays in the queue, and keeps its memory, until it is answered
            frame = channel.answer(asked.op, asked.request, seconds)
            if is_failure(frame):
                error = read_failure(channel, frame)
                why = f"{asked.op.name.lower()}: {error}"
                if not isinstance(error, ValueError):
                    raise channel.abort(why)
                refused = refused or why
            self._questions.popleft()
        return refused

    def clear(self) -> None:
        """Forget all requests after the connection has ended."""
        self._questions.clear()

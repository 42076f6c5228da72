"""What a client gets to see. Nobody awaits these: they are done at once, in order, and never block."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from attrs import frozen

from effects.decode import Logprob
from effects.ids import Tokens
from effects.job import Report

# Why a stream ended. `stop`: a stop token, or a stop string (cancelled by the edge); `length`: max_tokens reached;
# `dead_end`: the request's grammar let no token follow; `too_long`: not enough of its prompt could be left out;
# `uncompressed`: it would have to be, and the drafter failed; `lost`: the process that has rows of it is gone.
Finish: TypeAlias = Literal[
    "stop",
    "length",
    "cancelled",
    "deadline",
    "shutdown",
    "queue_full",
    "dead_end",
    "too_long",
    "uncompressed",
    "lost",
    "failed",
]


@frozen
class ReportProgress:
    """`done` of `total` prompt tokens are in place, `cached` of them restored. The first one says: accepted."""

    outcomes: ClassVar = ()
    done: int
    total: int
    cached: int


@frozen
class EmitTokens:
    outcomes: ClassVar = ()
    tokens: Tokens
    logprobs: tuple[Logprob, ...] = ()


@frozen
class CloseStream:
    """The last thing that a client hears. Snapshotting and parking follow behind its back."""

    outcomes: ClassVar = ()
    finish: Finish
    report: Report
    detail: str = ""  # what failed, for the log and the error object


@frozen
class Abandon:
    """Stop what is in flight for this request as soon as may be: a flag is set, and the real outcome still comes.

    The flag goes with that outcome: a snapshot or a parking that is asked for later is carried out.
    """

    outcomes: ClassVar = ()


@frozen
class StopLaunch:
    """Others wait for the lane: what goes on alone there ends with the step that it is at, or with the chunks that have
    begun, and its outcome says so.

    Whose launch has ended meanwhile hears nothing of it.
    """

    outcomes: ClassVar = ()

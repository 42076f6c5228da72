"""Effects that a client sees, and those that stop work in flight. They are done at once, in order, and never block."""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

from attrs import frozen

from effects.decode import Logprob
from effects.ids import Tokens
from effects.job import Report

# Why a stream ended. `stop`: a stop token, or a stop string (cancelled by the edge); `length`: max_tokens reached;
# `dead_end`: the request's grammar let no token follow; `too_long`: not enough of its prompt could be left out;
# `uncompressed`: it would have to be compressed, and the prompt scorer failed;
# `lost`: the process that has rows of the request is gone.
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
    """Report that `done` of `total` prompt tokens are in place, and that `cached` of them were not computed.

    Their rows were in the slot already, or were loaded from host memory or disk.

    The first report says that the request is accepted.
    """

    outcomes: ClassVar = ()
    done: int
    total: int
    cached: int


@frozen
class EmitTokens:
    """Send tokens of the answer."""

    outcomes: ClassVar = ()
    tokens: Tokens
    logprobs: tuple[Logprob, ...] = ()


@frozen
class CloseStream:
    """End the stream. The client gets nothing after this, although rows may still be saved and models unloaded."""

    outcomes: ClassVar = ()
    finish: Finish
    report: Report
    detail: str = ""  # what failed, for the log and the error object


@frozen
class Abandon:
    """Stop what is in flight for this request as soon as possible. A flag is set, and the real outcome still comes.

    The flag is cleared with that outcome, so a snapshot or an unload that is asked for later is carried out.
    """

    outcomes: ClassVar = ()


@frozen
class StopLaunch:
    """End a launch that continues alone, because other effects wait for its lane.

    The launch ends with its current step, or with the chunks that have begun, and its outcomes say so. If it has ended
    already, nothing happens.
    """

    outcomes: ClassVar = ()

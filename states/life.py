"""The states of a request, in the order of its life, and what they carry.

    New -> Waiting -> LookingUp -> Restoring -> Compressing -> Unparking -> Prefilling -> Speculating
        -> Snapshotting -> Parking -> Done;     cancelled or failed with work in flight: Draining

A state has exactly the data that is valid in its phase. `Hold` is what a request holds from admission to its end.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import evolve, field, frozen

from effects.all import Outcome
from effects.ids import SlotId, Tier, Tokens
from effects.job import Job, Report
from effects.ports import CancelReason
from effects.stream import Finish
from states.pace import Pace
from states.rates import Rates
from states.settings import Settings


@frozen
class Submitted:
    job: Job


@frozen
class Cancelled:
    """The client left, the deadline passed, a stop string was seen, the server stops: all the same here."""

    reason: CancelReason


@frozen
class Admitted:
    """Derived by the world: a slot is free, and these rows of it, or of `source`, can be kept."""

    slot: SlotId
    source: SlotId
    keep: int
    settings: Settings
    rates: Rates = field(factory=Rates)


@frozen
class Refused:
    """Derived by the world: the queue is full."""

    waiting: int


External: TypeAlias = Submitted | Cancelled
Derived: TypeAlias = Admitted | Refused
Event: TypeAlias = External | Derived | Outcome


@frozen
class Hold:
    """A slot, and how far the request has come in it."""

    job: Job
    settings: Settings
    slot: SlotId
    prompt: Tokens  # what is served: the job's prompt, or what compression made of it
    valid: int  # rows [0, valid) of the slot are acknowledged
    restored: int  # prompt rows that were kept or loaded, not computed
    tier: Tier
    miss: str = ""
    compressed: bool = False  # compression was tried, or remembered; once is enough
    draft: bool = False  # the draft is leased
    pace: Pace | None = None  # what is known of it, while it is
    answer: Tokens = ()
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0  # proposals that became tokens of the answer
    speculation: str = ""  # why nothing (more) is proposed; empty while something is
    shared: int = 0  # tokens that the job's prompt begins with as the likest of the recent prompts does
    stored: int = 0  # rows that host memory or disk have, by what is known; 0 after one could not be restored
    rates: Rates = field(factory=Rates)  # as they were at admission

    @property
    def target(self) -> int:
        """Rows that prefill computes: all but the last token, which the first decode step feeds."""
        return len(self.prompt) - 1

    @property
    def rows(self) -> Tokens:
        """What the slot's valid rows stand for."""
        return (self.prompt + self.answer)[: self.valid]

    @property
    def report(self) -> Report:
        raw = len(self.job.prompt)
        return Report(
            prompt_tokens=len(self.prompt),
            restored_tokens=self.restored,
            tier=self.tier,
            miss=self.miss,
            completion_tokens=len(self.answer),
            decode_steps=self.decode_steps,
            proposed=self.proposed,
            accepted=self.accepted,
            speculation=self.speculation,
            compressed_from=raw if raw != len(self.prompt) else 0,
        )


@frozen
class New: ...


@frozen
class Waiting:
    """For a slot."""

    job: Job


@frozen
class LookingUp:
    """For more of the prompt than the slot has already, in host memory and on disk."""

    hold: Hold


@frozen
class Restoring:
    """Rows `[front, stop)` are loaded while `[valid, front)` is computed."""

    hold: Hold
    front: int
    stop: int
    tier: Tier  # where they are loaded from
    loading: bool = True
    computing: bool = False
    loaded: bool = False


@frozen
class Compressing:
    hold: Hold


@frozen
class Unparking:
    hold: Hold


@frozen
class Prefilling:
    """Chunk after chunk; one is in flight."""

    hold: Hold


@frozen
class Speculating:
    """Step after step, with proposals or without; one is in flight."""

    hold: Hold


@frozen
class Snapshotting:
    """The stream is closed. The slot's new rows are copied out to be kept."""

    hold: Hold


@frozen
class Parking:
    """The draft is given back."""

    hold: Hold


@frozen
class Draining:
    """The stream is closed. What is in flight answers first."""

    hold: Hold
    flying: int  # effects that have not answered


@frozen
class Done:
    """Leaves the world at once. `hold` tells the slots what rows stay; None: it never had a slot."""

    hold: Hold | None = None


State: TypeAlias = (
    New
    | Waiting
    | LookingUp
    | Restoring
    | Compressing
    | Unparking
    | Prefilling
    | Speculating
    | Snapshotting
    | Parking
    | Draining
    | Done
)
Held: TypeAlias = (
    LookingUp | Restoring | Compressing | Unparking | Prefilling | Speculating | Snapshotting | Parking | Draining
)

FINISH: dict[CancelReason, Finish] = {
    "client_gone": "cancelled",
    "deadline": "deadline",
    "stop_string": "stop",
    "shutdown": "shutdown",
}


def whole_blocks(settings: Settings, tokens: int) -> int:
    """The last cache position at or before `tokens`."""
    return tokens // settings.block_size * settings.block_size


def kept(hold: Hold) -> int:
    """Rows that may be continued from later: decoded ones only where they equal prefilled ones."""
    return hold.valid if hold.settings.keep_decoded else min(hold.valid, hold.target)


def left(hold: Hold) -> Tokens:
    """What a slot keeps of a sequence. Positional state that went past its end takes all of it along."""
    rows = kept(hold)
    return () if hold.settings.stateful and rows < hold.valid else hold.rows[:rows]


def usable(hold: Hold, length: int) -> int:
    """How many of `length` restorable tokens are worth having: the last prompt token is always computed."""
    return whole_blocks(hold.settings, min(length, hold.target))


def serve(hold: Hold, prompt: Tokens) -> Hold:
    """From now on `prompt` is what is served; only rows that it shares with the old one stay valid."""
    valid = continued(hold.settings, hold.rows, prompt)
    hold = evolve(hold, prompt=prompt, compressed=True, stored=0)
    return evolve(hold, valid=valid, restored=min(hold.restored, valid), tier=hold.tier if valid else "none")


def continued(settings: Settings, rows: Tokens, prompt: Tokens) -> int:
    """How many of a slot's rows, which stand for these tokens, a prompt can be continued from.

    Whole blocks of what both begin with; or, where the model has state at the last row only, all of them or none. The
    last prompt token is always computed.
    """
    most = len(prompt) - 1
    if not settings.stateful:
        return whole_blocks(settings, min(common(settings.block_size, rows, prompt), most))
    whole = len(rows) <= most and prompt[: len(rows)] == rows
    return len(rows) if whole and (settings.keep_decoded or len(rows) % settings.block_size == 0) else 0


def common(block_size: int, one: Tokens, other: Tokens) -> int:
    """Tokens that both begin with, in whole blocks."""
    limit = min(len(one), len(other)) // block_size * block_size
    for start in range(0, limit, block_size):
        if one[start : start + block_size] != other[start : start + block_size]:
            return start
    return limit


def alike(one: Tokens, other: Tokens) -> int:
    """Tokens that both begin with, exactly."""
    start = common(64, one, other)
    for mine, its in zip(one[start : start + 64], other[start : start + 64], strict=False):
        if mine != its:
            break
        start += 1
    return start

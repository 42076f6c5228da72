"""The states of a request, in the order of its life, and what they are made of.

    New -> Waiting -> LookingUp -> Restoring -> Fetching -> Compressing -> Releasing -> Unparking -> Prefilling
        -> Speculating -> Snapshotting -> Parking -> Done;     cancelled or failed with work in flight: Draining
    its slot's rows lost, once: Recovering -> Yielding -> Waiting

A state has exactly the data that is valid in its phase.
"""

from __future__ import annotations

from typing import TypeAlias

from attrs import frozen

from effects.compression import Compressed, remaining, taken
from effects.decode import Logprob
from effects.ids import ModelName, SlotId, Tier, Tokens
from effects.job import Job
from effects.ports import CancelReason
from effects.stream import Finish
from states.sequences import continued, whole_blocks
from states.settings import Settings
from states.speculation_control import SpeculationControl


@frozen
class SlotLease:
    """A slot, and how far its rows can be believed.

    Where the model has positional state, it is the one behind row `valid`: the next row to be computed is that one.
    """

    slot: SlotId
    valid: int = 0  # rows [0, valid) are acknowledged
    restored: int = 0  # prompt rows that were kept or loaded, not computed
    tier: Tier = "none"  # where most of these came from
    ahead: int = 0  # rows from `valid` on that are there too, only the state behind them is not; until one is computed

    @property
    def rows(self) -> int:
        """Rows [0, rows) are there."""
        return self.valid + self.ahead

    def loaded(self, start: int, stop: int, tier: Tier) -> SlotLease:
        """Rows `[start, stop)` came from this tier, with the state behind them; those before them were there."""
        restored = self.restored + stop - self.valid
        most = tier if 2 * (stop - start) > restored else "device" if self.tier == "none" else self.tier
        return SlotLease(self.slot, stop, restored, most, max(0, self.rows - stop))

    def computed(self, stop: int) -> SlotLease:
        """Rows up to there are acknowledged; computing has overwritten what followed."""
        return SlotLease(self.slot, stop, self.restored, self.tier)


@frozen
class Prompt:
    """What is served, where it came from, and what is known of it elsewhere."""

    job: Job
    tokens: Tokens  # the job's prompt, or what compression made of it
    compressed: bool = False  # compression was tried, or remembered; once is enough
    compression: Compressed | None = None  # what came of it, once it was tried here
    shared: int = 0  # tokens that the job's prompt begins with as the likest of the recent prompts does
    stored: int = 0  # rows that host memory or disk have, by what is known; 0 after one could not be restored
    miss: str = ""  # why no (more) rows were restored
    logprobs: tuple[Logprob, ...] = ()  # of its tokens but the first, as far as they were asked for and are known
    heard: Tokens | None = None  # of the answer, when the rows of its slot were lost; None: that has not happened yet

    @property
    def target(self) -> int:
        """Rows that prefill computes: all but the last token, which the first decode step feeds."""
        return len(self.tokens) - 1


@frozen
class Drafted:
    """The draft is leased."""

    control: SpeculationControl  # what is known of it
    reason: str = ""  # why nothing is proposed now; empty while something is


@frozen
class Undrafted:
    """Nothing is proposed."""

    reason: str


Speculation: TypeAlias = Drafted | Undrafted


@frozen
class Generated:
    """The answer so far, and what it took."""

    tokens: Tokens = ()
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0  # proposals that became tokens of the answer

    def room(self, job: Job) -> int:
        """For proposals: tokens that may follow the next one."""
        return job.max_tokens - len(self.tokens) - 1


@frozen
class RequestRemainder:
    """What a request leaves behind once its stream is closed: the rows of a slot, and perhaps a lease of a model."""

    seat: SlotLease
    prompt: Prompt
    answer: Tokens = ()
    leased: ModelName | None = None

    @property
    def rows(self) -> Tokens:
        """What the slot's valid rows stand for."""
        prompt, valid = self.prompt.tokens, self.seat.valid
        return prompt[:valid] if valid <= len(prompt) else prompt + self.answer[: valid - len(prompt)]


@frozen
class New: ...


@frozen
class Waiting:
    """For a slot."""

    prompt: Prompt


@frozen
class LookingUp:
    """For more of the prompt than the slot has already, in host memory and on disk."""

    seat: SlotLease
    prompt: Prompt


@frozen
class Restoring:
    """Rows `[front, stop)` are loaded while `[valid, front)` is computed.

    Where the model has positional state, that at `stop` is loaded, and nothing is computed meanwhile.
    """

    seat: SlotLease
    prompt: Prompt
    front: int
    stop: int
    tier: Tier  # where they are loaded from
    loading: bool = True
    computing: bool = False
    loaded: bool = False


@frozen
class Fetching:
    """The drafter is brought in."""

    seat: SlotLease
    prompt: Prompt


@frozen
class Compressing:
    """Chunk after chunk is scored; one is in flight. The drafter is leased."""

    seat: SlotLease
    prompt: Prompt


@frozen
class Releasing:
    """The drafter is given back."""

    seat: SlotLease
    prompt: Prompt  # that will be served


@frozen
class Unparking:
    seat: SlotLease
    prompt: Prompt


@frozen
class Prefilling:
    """Chunk after chunk; one is in flight."""

    seat: SlotLease
    prompt: Prompt
    speculation: Speculation


@frozen
class Speculating:
    """Step after step, with proposals or without; one is in flight."""

    seat: SlotLease
    prompt: Prompt
    speculation: Speculation
    answer: Generated


@frozen
class Snapshotting:
    """The stream is closed. The slot's new rows are copied out to be kept."""

    remains: RequestRemainder


@frozen
class Parking:
    """The draft is given back."""

    remains: RequestRemainder


@frozen
class Draining:
    """The stream is closed. What is in flight answers first."""

    remains: RequestRemainder
    flying: int  # effects that have not answered
    lost: bool = False  # the slot's rows are gone, whatever is acknowledged yet


@frozen
class Recovering:
    """The rows of its slot are gone. What is in flight answers first; then it waits for a slot again."""

    remains: RequestRemainder
    flying: int  # effects that have not answered


@frozen
class Yielding:
    """The same; the draft is given back first."""

    remains: RequestRemainder


@frozen
class Done:
    """Leaves the world at once. None: it never had a slot."""

    remains: RequestRemainder | None = None


State: TypeAlias = (
    New
    | Waiting
    | LookingUp
    | Restoring
    | Fetching
    | Compressing
    | Releasing
    | Unparking
    | Prefilling
    | Speculating
    | Snapshotting
    | Parking
    | Draining
    | Recovering
    | Yielding
    | Done
)
Early: TypeAlias = (
    LookingUp | Restoring | Fetching | Compressing | Releasing | Unparking
)  # nothing is generated, no draft is there
Open: TypeAlias = Early | Prefilling | Speculating  # the client waits, the slot is held
Leaving: TypeAlias = Snapshotting | Parking | Draining | Recovering | Yielding  # the slot, if not the request
Held: TypeAlias = Open | Leaving

FINISH: dict[CancelReason, Finish] = {
    "client_gone": "cancelled",
    "deadline": "deadline",
    "stop_string": "stop",
    "shutdown": "shutdown",
}


def remains(state: Held) -> RequestRemainder:
    """If it ended now."""
    match state:
        case Speculating(seat, prompt, speculation, answer):
            return RequestRemainder(seat, prompt, answer.tokens, leased(speculation))
        case Prefilling(seat, prompt, speculation):
            return RequestRemainder(seat, prompt, leased=leased(speculation))
        case Compressing(seat, prompt) | Releasing(seat, prompt):
            return RequestRemainder(seat, prompt, leased="drafter")
        case LookingUp() | Restoring() | Fetching() | Unparking():
            return RequestRemainder(state.seat, state.prompt)
        case _:
            return state.remains


def leased(speculation: Speculation) -> ModelName | None:
    return "draft" if isinstance(speculation, Drafted) else None


def kept(settings: Settings, left: RequestRemainder) -> int:
    """Rows that may be continued from later: decoded ones only where they equal prefilled ones."""
    return left.seat.valid if settings.keep_decoded else min(left.seat.valid, left.prompt.target)


def sequence(settings: Settings, left: RequestRemainder) -> Tokens:
    """What a slot keeps."""
    if left.seat.ahead:
        return left.prompt.tokens[: left.seat.rows]
    return left.rows[: kept(settings, left)]


def live(settings: Settings, left: RequestRemainder) -> int:
    """Where the slot itself has the positional state that what it keeps can be gone on from; 0: nowhere.

    It has the one at its last block's end. Where decoded rows are not believed, blocks may be longer than what the
    model's own state is apart: then only a prefill that stopped there has left it there.
    """
    valid = left.seat.valid
    at = whole_blocks(settings, valid)
    there = at <= kept(settings, left) and (settings.keep_decoded or at == valid)
    return at if settings.stateful and there else 0


def usable(settings: Settings, prompt: Prompt, length: int) -> int:
    """How many of `length` restorable tokens are worth having: the last prompt token is always computed."""
    return whole_blocks(settings, min(length, prompt.target))


def begun(job: Job) -> Prompt:
    """What is served of it at first: messages that were frozen before are what they were frozen to."""
    spans = remaining(job.compression.parts, len(job.prompt))
    if spans == ((0, len(job.prompt)),):
        return Prompt(job, job.prompt)
    told = Compressed(len(job.prompt), "", spans, keep=job.compression.keep)
    return Prompt(job, taken(job.prompt, spans), compression=told)


def continuing(settings: Settings, seat: SlotLease, held: Tokens, tokens: Tokens) -> SlotLease:
    """The seat as these tokens can be continued from it, which has rows of those: at a cache position."""
    rows = continued(settings, held, tokens)
    valid = rows if not settings.stateful else seat.valid if seat.valid <= rows else 0
    tier = seat.tier if valid else "none"
    return SlotLease(seat.slot, valid, min(seat.restored, valid), tier, rows - valid)

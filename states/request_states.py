"""The states of a request, in the order of its life, and what they are made of.

    New -> Waiting -> LookingUp -> Restoring -> LoadingScorer -> Compressing -> UnloadingScorer -> UnparkingDraft
        -> Prefilling -> Speculating -> Snapshotting -> Parking -> Done
    cancelled or failed with work in flight: Draining
    its slot's rows lost, once: Recovering -> Yielding -> Waiting

A state has exactly the data that is valid in its phase. Phases that are not needed are skipped (`states/phases.py`).
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

from attrs import frozen

from effects.compression import Compressed
from effects.decode import Logprob
from effects.ids import ModelName, SlotId, Tier, Tokens
from effects.job import Job
from effects.packed_tokens import pack_tokens
from effects.ports import CancelReason
from effects.stream import Finish
from states.speculation_plan import SpeculationControl


@frozen
class SlotLease:
    """A slot that a request holds, and how many of its rows can be trusted.

    Where the model has positional state, the slot has the one behind row `valid_rows`, and computes on from there.
    """

    slot: SlotId
    valid_rows: int = 0  # rows [0, valid_rows) are acknowledged, with the state behind them
    reused_rows: int = 0  # rows of the prompt that were not computed: the slot had them, or they were loaded
    tier: Tier = "none"  # where most of the reused rows came from
    rows_ahead: int = 0  # further rows that are there without the state behind them; computing overwrites them

    @property
    def rows(self) -> int:
        """The number of rows that are there, whether or not the state behind them is."""
        return self.valid_rows + self.rows_ahead

    def with_loaded_rows(self, start: int, stop: int, tier: Tier) -> SlotLease:
        """Return the lease after rows `[start, stop)` came from a tier, with the state behind them.

        The rows before `start` were there already.
        """
        reused_rows = self.reused_rows + stop - self.valid_rows
        most: Tier = "device" if self.tier == "none" else self.tier
        if 2 * (stop - start) > reused_rows:
            most = tier
        return SlotLease(self.slot, stop, reused_rows, most, max(0, self.rows - stop))

    def with_computed_rows(self, stop: int) -> SlotLease:
        """Return the lease after rows up to `stop` were computed. Computing has overwritten what followed."""
        return SlotLease(self.slot, stop, self.reused_rows, self.tier)


@frozen
class Followed:
    """Rows that a request waited for while another one computed them, and the price at which it chose to wait."""

    rows: int
    waiting_ns: int = 0  # until they are there, as estimated when the request began to follow; 0: no time was measured
    computing_ns: int = 0  # that the request would have taken to compute them itself


@frozen
class Prompt:
    """The tokens that are served of a job's prompt, and what is known of its rows elsewhere."""

    job: Job
    tokens: Tokens  # that are served: the job's prompt, or what compression made of it
    compression_tried: bool = False  # it is tried once at most
    compression: Compressed | None = None  # what came of it, or of earlier freezing
    shared_tokens: int = 0  # that the job's prompt has in common with the most similar recent prompt
    stored_rows: int = 0  # that host memory or disk are known to have; 0 after one could not be restored
    miss_reason: str = ""  # why no rows, or no more rows, were restored
    followed: Followed | None = None  # rows that another request computed while this one waited for them
    awaited_rows: Tokens = ()  # rows that other requests wait for, to go on from them; in no order
    logprobs: tuple[Logprob, ...] = ()  # of its tokens but the first, as far as they were asked for and are known
    # Tokens of the answer that the client had when the slot's rows were lost. None: no loss.
    heard_tokens: Tokens | None = None

    @cached_property
    def packed_tokens(self) -> bytes:
        """The tokens as bytes (`effects.packed_tokens`)."""
        return self.job.packed_prompt if self.tokens is self.job.prompt else pack_tokens(self.tokens)

    @property
    def prefill_rows(self) -> int:
        """Rows that prefill computes: all but the last token, which the first decode step feeds."""
        return len(self.tokens) - 1


@frozen
class MayPropose:
    """The request may propose tokens: of the draft that it has leased, or copies of earlier text, or both."""

    control: SpeculationControl  # how well its proposals do
    reason: str = ""  # why nothing is proposed now; empty while something is


@frozen
class ProposesNothing:
    """The request proposes nothing."""

    reason: str


Speculation: TypeAlias = MayPropose | ProposesNothing


@frozen
class Generated:
    """The answer so far, and what it took."""

    tokens: Tokens = ()
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0  # proposals that became tokens of the answer

    def count_proposable(self, job: Job) -> int:
        """Count the tokens that may follow the next one, which is what a draft may propose at most."""
        return job.max_tokens - len(self.tokens) - 1


@frozen
class RequestRemainder:
    """The rows of a slot, and perhaps a lease of a model, that a request leaves behind once its stream is closed."""

    slot_lease: SlotLease
    prompt: Prompt
    answer: Tokens = ()
    leased_model: ModelName | None = None

    @property
    def valid_tokens(self) -> Tokens:
        """The tokens that the slot's valid rows stand for."""
        prompt = self.prompt.tokens
        valid_rows = self.slot_lease.valid_rows
        if valid_rows <= len(prompt):
            return prompt[:valid_rows]
        return prompt + self.answer[: valid_rows - len(prompt)]


@frozen
class New:
    """The request is not known yet."""


@frozen
class Waiting:
    """The request waits for a slot."""

    prompt: Prompt


@frozen
class LookingUp:
    """Host memory and disk are searched for more of the prompt than the slot has."""

    slot_lease: SlotLease
    prompt: Prompt


@frozen
class Restoring:
    """Rows `[load_start, stop)` are loaded while `[valid_rows, load_start)`, the front, is computed.

    Where the model has positional state, the state at `stop` is loaded, and nothing is computed meanwhile. Loading
    starts behind `rows_ahead` then.
    """

    slot_lease: SlotLease
    prompt: Prompt
    load_start: int
    stop: int
    tier: Tier  # that they are loaded from
    loading: bool = True
    computing: bool = False
    loaded: bool = False


@frozen
class LoadingScorer:
    """The prompt scorer is loaded."""

    slot_lease: SlotLease
    prompt: Prompt


@frozen
class Compressing:
    """The prompt is scored chunk by chunk; one chunk is in flight. The prompt scorer is leased."""

    slot_lease: SlotLease
    prompt: Prompt


@frozen
class UnloadingScorer:
    """The prompt scorer is given back."""

    slot_lease: SlotLease
    prompt: Prompt  # that will be served


@frozen
class UnparkingDraft:
    """The draft is loaded."""

    slot_lease: SlotLease
    prompt: Prompt


@frozen
class Prefilling:
    """The prompt is computed chunk by chunk; one effect is in flight."""

    slot_lease: SlotLease
    prompt: Prompt
    speculation: Speculation


@frozen
class Speculating:
    """The answer is decoded step by step; one effect is in flight.

    This is the state of every request that decodes. Where nothing is proposed, as without a draft, `speculation` is
    `ProposesNothing`. Answers, metrics and /slots show the name of this state as a stage (`Stage` in
    `effects/ports.py`), and those names are a public format.
    """

    slot_lease: SlotLease
    prompt: Prompt
    speculation: Speculation
    answer: Generated


@frozen
class Snapshotting:
    """The stream is closed. The slot's new rows are copied out to be kept."""

    remainder: RequestRemainder


@frozen
class Parking:
    """The stream is closed. The leased model is given back."""

    remainder: RequestRemainder


@frozen
class Draining:
    """The stream is closed. Effects that are in flight answer first."""

    remainder: RequestRemainder
    in_flight: int  # effects that have not answered
    rows_lost: bool = False  # the slot's rows are gone, whatever is acknowledged yet


@frozen
class Recovering:
    """The slot's rows are lost. Effects that are in flight answer first; then the request waits for a slot again."""

    remainder: RequestRemainder
    in_flight: int  # effects that have not answered


@frozen
class Yielding:
    """The slot's rows are lost. The leased model is given back before the request waits for a slot again."""

    remainder: RequestRemainder


@frozen
class Done:
    """The request leaves the world at once."""

    remainder: RequestRemainder | None = None  # None: it never had a slot


State: TypeAlias = (
    New
    | Waiting
    | LookingUp
    | Restoring
    | LoadingScorer
    | Compressing
    | UnloadingScorer
    | UnparkingDraft
    | Prefilling
    | Speculating
    | Snapshotting
    | Parking
    | Draining
    | Recovering
    | Yielding
    | Done
)
# The request has a slot. Nothing is generated yet, and no draft is leased.
PreparingState: TypeAlias = LookingUp | Restoring | LoadingScorer | Compressing | UnloadingScorer | UnparkingDraft
# The request has a slot, and its client waits for the answer.
AnsweringState: TypeAlias = PreparingState | Prefilling | Speculating
# The request still has a slot, and will give it up.
ReleasingState: TypeAlias = Snapshotting | Parking | Draining | Recovering | Yielding
StateWithSlot: TypeAlias = AnsweringState | ReleasingState

FINISH: dict[CancelReason, Finish] = {
    "client_gone": "cancelled",
    "deadline": "deadline",
    "stop_string": "stop",
    "shutdown": "shutdown",
}


def get_remainder(state: StateWithSlot) -> RequestRemainder:
    """Return what the request would leave behind if it ended now."""
    match state:
        case Speculating(slot_lease, prompt, speculation, answer):
            return RequestRemainder(slot_lease, prompt, answer.tokens, get_leased_draft(speculation))
        case Prefilling(slot_lease, prompt, speculation):
            return RequestRemainder(slot_lease, prompt, leased_model=get_leased_draft(speculation))
        case Compressing(slot_lease, prompt) | UnloadingScorer(slot_lease, prompt):
            return RequestRemainder(slot_lease, prompt, leased_model="scorer")
        case LookingUp() | Restoring() | LoadingScorer() | UnparkingDraft():
            return RequestRemainder(state.slot_lease, state.prompt)
        case _:
            return state.remainder


def get_leased_draft(speculation: Speculation) -> ModelName | None:
    """Return the name of the draft if the request has leased it; None if it only copies text, or proposes nothing."""
    return "draft" if isinstance(speculation, MayPropose) and speculation.control.widths else None

"""The state of a slot: the tokens that its rows stand for, its valid rows, and how the next token is picked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from attrs import define, field
from torch import Tensor

from adapters.device.sampling.sampler import Sampler
from adapters.models.decoder.shard import Shard
from effects.decode import RunDecode
from effects.ids import DeviceFailed, RequestId, SlotId, Span, Tokens
from effects.job import Sampling
from effects.ports import RowsLost
from effects.prefill import OpenSlot


@define(eq=False)
class SlotState:
    """The state of a slot. Every OpenSlot makes a new one, so nothing of an earlier request stays behind.

    Read and changed on lanes, and on one lane at a time. The exception: rows may be loaded on one lane while those
    before them are computed on another, so `mark_computed` and `add_loaded_rows` change `loaded` and `valid` under a
    lock. `commit` and `set_state_row` need none, because no load is in flight then.

    tokens: the prompt, then the answer.
    valid: rows `[0, valid)` stand for `tokens[:valid]`. What lies behind them is not to be read, except loaded rows.
        To take rows back, `valid` is lowered.
    loaded: a span of rows that came from a store, possibly before the rows in front of it were computed. A later span
        extends it if it begins where this one ends, and replaces it otherwise.
    stops: tokens that end the answer; a decode step keeps nothing past the first of them.
    draft_spans: spans of rows for which the draft has computed its own rows: ascending, and none touches the next.
    rows_ahead: only for a model with positional state, whose state belongs to row `valid`. The slot has the keys and
        values of this many further rows, which are computed again.
    salt: only requests with the same salt may use these rows.
    keeps_answer: as in `OpenSlot`.
    refusal: the failure that this request gets for every effect; the slot's rows are still good for others.
    last_row: the position of the prompt's last token and its hidden state `[bucket, D]`, if that row is computed.
    """

    request: RequestId
    tokens: list[int]
    valid: int
    sampler: Sampler
    loaded: Span = (0, 0)
    stops: frozenset[int] = frozenset()
    draft_spans: tuple[Span, ...] = ()
    rows_ahead: int = 0
    salt: str = ""
    keeps_answer: bool = True
    refusal: DeviceFailed | None = None
    last_row: tuple[int, Tensor] | None = None
    _lock: Lock = field(init=False, factory=Lock)

    @property
    def draft_rows(self) -> Span:
        """The draft's rows right before `valid`, without a gap. The span is empty if the last row is missing."""
        for start, stop in self.draft_spans:
            if start < self.valid <= stop:
                return start, self.valid
        return self.valid, self.valid

    def add_draft_rows(self, start: int, stop: int) -> None:
        """Note that the draft has rows `[start, stop)` now."""
        self.draft_spans = add_span(self.draft_spans, start, stop)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Do the first rows stand for exactly these tokens?"""
        count = len(tokens)
        return self.valid + self.rows_ahead >= count and self.tokens[:count] == list(tokens)

    def add_loaded_rows(self, start: int, stop: int) -> None:
        """Note that rows `[start, stop)` came from a store. They are valid as soon as all rows before them are."""
        with self._lock:
            first, last = self.loaded
            self.loaded = (first, stop) if first < last == start else (start, stop)
            self._mark_computed(self.valid)

    def set_state_row(self, stop: int) -> None:
        """Note that the positional state after rows [0, stop) is in place. Those rows were there already."""
        self.rows_ahead = max(0, self.valid + self.rows_ahead - stop)
        self.valid = stop

    def mark_computed(self, valid: int) -> None:
        """Note that rows up to `valid` are computed. Loaded rows that follow them become valid as well."""
        with self._lock:
            self._mark_computed(valid)

    def _mark_computed(self, valid: int) -> None:
        start, stop = self.loaded
        self.valid = stop if start <= valid < stop else valid

    def commit(self, picked: Tokens) -> None:
        """Append the tokens that a decode step kept.

        The token that was fed has a row now, and so has each of `picked` except the last, which the next step feeds.
        """
        self.valid += len(picked)
        self.rows_ahead = 0
        self.last_row = None
        self.tokens += picked
        self.sampler.append(picked)


def begin_slot(request: RequestId, opening: OpenSlot, make_sampler: Callable[[Sampling, Tokens], Sampler]) -> SlotState:
    """Return the state of a slot that is opened. make_sampler: makes the sampler of the request.

    If no sampler can be made, that is the request's own failure (`refusal`) and not the slot's. Other requests count on
    the rows that the slot is opened with, even if this request has left before it hears of the failure.
    """
    prompt = opening.prompt
    refusal = None
    try:
        sampler = make_sampler(opening.sampling, prompt)
    except Exception as error:  # noqa: BLE001 - the request gets it
        sampler = make_sampler(Sampling(), prompt)
        refusal = opening_failure(opening, error)
    stops = frozenset(opening.stop_tokens)
    return SlotState(
        *(request, list(prompt), opening.keep, sampler),
        stops=stops,
        salt=opening.salt,
        keeps_answer=opening.keeps_answer,
        refusal=refusal,
    )


def opening_failure(opening: OpenSlot, error: BaseException) -> DeviceFailed:
    """Return the failure of everything that is asked of a slot that could not be opened."""
    return DeviceFailed("broken", f"slot {opening.slot} could not be opened: {error}")


def abandoned_failure(request: RequestId) -> DeviceFailed:
    """Return the outcome of work that did not start because its request was given up."""
    return DeviceFailed("abandoned", f"request {request} was abandoned before this started")


def find_lost_slots(error: BaseException | None, slot: SlotId) -> tuple[SlotId, ...]:
    """Return the slots whose rows are not there, if opening `slot` raised this error."""
    if error is None:
        return ()
    return error.slots if isinstance(error, RowsLost) else (slot,)


def check_opening(opening: OpenSlot, shard: Shard) -> None:
    """Raise ValueError for an opening that is impossible whatever the slots hold."""
    slot = opening.slot
    source = opening.source
    keep = opening.keep
    prompt = opening.prompt
    if not (0 <= slot < shard.spec.slots and 0 <= source < shard.spec.slots):
        raise ValueError(f"slots {slot} and {source} are not both in 0..{shard.spec.slots - 1}")
    if not 0 < len(prompt) <= shard.spec.capacity:
        raise ValueError(f"a prompt of {len(prompt)} tokens does not fit 1..{shard.spec.capacity} rows")
    if not 0 <= keep < len(prompt):
        raise ValueError(f"{keep} rows to keep of a prompt of {len(prompt)}; the last one is always computed")
    if not (min(prompt) >= 0 and max(prompt) < shard.spec.vocab_size):
        raise ValueError(f"the prompt has tokens that are not in 0..{shard.spec.vocab_size - 1}")


def check_decode_step(state: SlotState, effect: RunDecode, capacity: int) -> DeviceFailed | None:
    """Return why this cannot be the slot's next decode step; None if it can. capacity: rows of a slot."""
    position = effect.position
    token = effect.token
    tokens = state.tokens
    if position != state.valid or position + 1 != len(tokens) or token != tokens[-1]:
        here = f"slot {effect.slot} has {state.valid} rows for {len(tokens)} tokens, the last {tokens[-1]}"
        return DeviceFailed("broken", f"{here}; a decode step cannot feed {token} at {position}")
    if position >= capacity:
        return DeviceFailed("broken", f"slot {effect.slot} is full: it has {capacity} rows")
    return None


def add_span(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """Return the union of disjoint ascending spans and `[start, stop)`, in the same form."""
    if start >= stop:
        return spans
    before: list[Span] = []
    after: list[Span] = []
    for span in spans:
        if span[1] < start:
            before.append(span)
        elif span[0] > stop:
            after.append(span)
        else:
            start = min(start, span[0])
            stop = max(stop, span[1])
    return (*before, (start, stop), *after)


def clip_spans(spans: tuple[Span, ...], stop: int) -> tuple[Span, ...]:
    """Return the parts of the spans that lie before `stop`."""
    return tuple((first, min(last, stop)) for first, last in spans if first < stop)

"""What a slot serves: the tokens that its rows stand for, how many rows are valid, and how the next token is picked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock

from attrs import define, field

from adapters.device.sampling.sampler import Sampler
from adapters.models.decoder.shard import Shard
from effects.decode import RunDecode
from effects.ids import DeviceFailed, RequestId, SlotId, Span, Tokens
from effects.job import Sampling
from effects.ports import RowsLost
from effects.prefill import OpenSlot


@define(eq=False)
class SlotState:
    """Made anew by every OpenSlot, so nothing of an earlier request can stay behind.

    tokens: the prompt, then the answer. valid: rows `[0, valid)` are those of `tokens[:valid]`; rows past it are
    garbage, but for those that were loaded, and taking rows back is lowering it. loaded: rows that came from a store,
    perhaps while those before them are still computed. stops: a decode step keeps nothing past the first of these.
    context: the rows that a draft has its own for, ascending, none touching the next. ahead: of a model with positional
    state, which is the one behind row `valid`, rows after it that are there too. salt: of whom its rows are. refusal:
    why nothing is done here for the request; its rows are there. Read and changed on lanes only: on one of them at a
    time, but that rows may be loaded on one while those in front of them are computed on another.
    """

    request: RequestId
    tokens: list[int]
    valid: int
    sampler: Sampler
    loaded: Span = (0, 0)
    stops: frozenset[int] = frozenset()
    context: tuple[Span, ...] = ()
    ahead: int = 0
    salt: str = ""
    refusal: DeviceFailed | None = None
    _alone: Lock = field(init=False, factory=Lock)

    @property
    def drafted(self) -> Span:
        """The draft's context: its rows right before `valid`, without a gap; empty if the last one is missing."""
        for start, stop in self.context:
            if start < self.valid <= stop:
                return start, self.valid
        return self.valid, self.valid

    def draft(self, start: int, stop: int) -> None:
        """The draft has rows `[start, stop)` now."""
        self.context = joined(self.context, start, stop)

    def holds(self, tokens: Sequence[int]) -> bool:
        """Do the first rows stand for exactly these?"""
        count = len(tokens)
        return self.valid + self.ahead >= count and self.tokens[:count] == list(tokens)

    def load(self, start: int, stop: int) -> None:
        """Rows `[start, stop)` are in place: they count as soon as all rows before them do."""
        with self._alone:
            first, last = self.loaded
            self.loaded = (first, stop) if first < last == start else (start, stop)
            self._advance(self.valid)

    def resume(self, stop: int) -> None:
        """Rows up to there are in place, and now so is the positional state behind them."""
        self.valid, self.ahead = stop, max(0, self.valid + self.ahead - stop)

    def advance(self, valid: int) -> None:
        """Rows up to `valid` are computed; loaded ones that follow count too."""
        with self._alone:
            self._advance(valid)

    def _advance(self, valid: int) -> None:
        start, stop = self.loaded
        self.valid = stop if start <= valid < stop else valid

    def commit(self, picked: Tokens) -> None:
        """A decode step fed the last token and kept `picked`: all of them but the last have rows now, as has what was
        fed."""
        self.valid, self.ahead = self.valid + len(picked), 0
        self.tokens += picked
        self.sampler.append(picked)


def begun(request: RequestId, opening: OpenSlot, sampler: Callable[[Sampling, Tokens], Sampler]) -> SlotState:
    """A slot that is opened. Where the request's tokens cannot be picked, that is its own failure and not the slot's:
    others count on the rows that it is opened with, also if this request has left before it hears of it.
    """
    prompt, refusal = opening.prompt, None
    try:
        picks = sampler(opening.sampling, prompt)
    except Exception as error:  # noqa: BLE001 - the request is told
        picks, refusal = sampler(Sampling(), prompt), unopened(opening, error)
    stops = frozenset(opening.stop_tokens)
    return SlotState(request, list(prompt), opening.keep, picks, stops=stops, salt=opening.salt, refusal=refusal)


def unopened(opening: OpenSlot, error: BaseException) -> DeviceFailed:
    return DeviceFailed("broken", f"slot {opening.slot} could not be opened: {error}")


def abandoned(request: RequestId) -> DeviceFailed:
    return DeviceFailed("abandoned", f"request {request} was abandoned before this started")


def lost_with(error: BaseException | None, slot: SlotId) -> tuple[SlotId, ...]:
    """The slots whose rows are not there where opening one of them raised this."""
    if error is None:
        return ()
    return error.slots if isinstance(error, RowsLost) else (slot,)


def check(opening: OpenSlot, shard: Shard) -> None:
    """Raises ValueError for what cannot be opened, whatever the slots hold."""
    slot, source, keep, prompt = opening.slot, opening.source, opening.keep, opening.prompt
    if not (0 <= slot < shard.slots and 0 <= source < shard.slots):
        raise ValueError(f"slots {slot} and {source} are not both in 0..{shard.slots - 1}")
    if not 0 < len(prompt) <= shard.capacity:
        raise ValueError(f"a prompt of {len(prompt)} tokens does not fit 1..{shard.capacity} rows")
    if not 0 <= keep < len(prompt):
        raise ValueError(f"{keep} rows to keep of a prompt of {len(prompt)}; the last one is always computed")
    if not (min(prompt) >= 0 and max(prompt) < shard.vocab_size):
        raise ValueError(f"the prompt has tokens that are not in 0..{shard.vocab_size - 1}")


def unfit(state: SlotState, effect: RunDecode, capacity: int) -> DeviceFailed | None:
    """Why this cannot be the slot's next decode step. capacity: rows of a slot."""
    position, token, tokens = effect.position, effect.token, state.tokens
    if position != state.valid or position + 1 != len(tokens) or token != tokens[-1]:
        here = f"slot {effect.slot} has {state.valid} rows for {len(tokens)} tokens, the last {tokens[-1]}"
        return DeviceFailed("broken", f"{here}; a decode step cannot feed {token} at {position}")
    if position >= capacity:
        return DeviceFailed("broken", f"slot {effect.slot} is full: it has {capacity} rows")
    return None


def joined(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """The union of disjoint ascending spans and one more."""
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
            start, stop = min(start, span[0]), max(stop, span[1])
    return (*before, (start, stop), *after)


def clipped(spans: tuple[Span, ...], stop: int) -> tuple[Span, ...]:
    """What of the spans lies before `stop`."""
    return tuple((first, min(last, stop)) for first, last in spans if first < stop)

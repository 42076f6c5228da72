"""Decode steps of a single request in one call of the compiled library each, where it serves every part of them: what a
draft proposes, the target's forward, how far it agrees and the draft's rows of what stays.

What is picked, kept and followed is what `Decoding` comes to in calls of their own, which do whatever is not served
here: batches, trees, log-probabilities, penalties and grammars, positional state, other devices and other drafts.
"""

from __future__ import annotations

import ctypes
import logging
import math
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

from attrs import define, field

from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.out_of_memory import ran_out_of_memory
from adapters.device.sampling.native_draw import factors_at
from adapters.device.sampling.noise import key_of
from adapters.device.sampling.sampler import Sampler
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.draft_context import DraftContext
from adapters.device.speculation.drafting import Drafting, noise_of, warmed
from adapters.device.speculation.proposer import DraftRequest, Proposer
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.decoder.shard import Shard
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.kernels.cpu.native.native_decode import MOST_FED, Addresses, DrawOf, NativePass, NativeRound
from adapters.models.kernels.step import Forward
from effects.ids import Tokens
from effects.job import Sampling

log = logging.getLogger("rekindle.device")

AHEAD = 64  # tokens whose noise is known before they are picked


@define(eq=False)
class NoiseAhead:
    """The keys of the next tokens' noise of one request, for the library to read."""

    seed: int
    _first: int = field(init=False, default=0)  # position of the first of them
    _keys: array[int] = field(init=False, factory=lambda: array("q"))
    _at: int = field(init=False, default=0)

    def at(self, position: int) -> int:
        """The address of those of the tokens from that position on: of as many as a step has rows, and more."""
        place = position - self._first
        if not 0 <= place <= len(self._keys) - MOST_FED:
            self._keys = array("q", [key_of(self.seed, position + one) for one in range(MOST_FED + AHEAD)])
            self._first, self._at, place = position, self._keys.buffer_info()[0], 0
        return self._at + self._keys.itemsize * place


class RoundTaken(NamedTuple):
    """What a step came to, as `Decoded` has it. No tokens: its logits were not finite. followed: a draft, if there is
    one, needs to hear no more of it.
    """

    tokens: Tokens
    proposed: int
    accepted: int
    followed: bool = True


@define(eq=False)
class RoundAtOnce:
    """Steps of one width, for whichever request comes: what the library is told of it stays while it is the same."""

    native: NativeRound
    followed_by: DraftContext[Any] | None = field(init=False, default=None)  # late, where nobody proposes
    _late: Addresses | None = field(init=False, default=None)
    _told: Sampler | None = field(init=False, default=None)
    _noise: NoiseAhead | None = field(init=False, default=None)
    _stops: ctypes.Array[ctypes.c_int64] = field(init=False, factory=(ctypes.c_int64 * 0))

    def run(self, slot: int, state: SlotState, first: int, count: int) -> RoundTaken:
        """Raises as `NativeRound.run` does."""
        of, position = self.native.of, state.valid
        if self._told is not state.sampler:
            self._tell(state)
        of.keys = None if self._noise is None else self._noise.at(position + 1)
        self.native.run(slot, position, first, state.tokens[-1], count)
        return RoundTaken(tuple(of.tokens[: of.kept]), of.proposed, of.accepted)

    def leave(self, late: Addresses | None, row: int = 0) -> None:
        """Where what the target leaves of the next step's row is copied to, if anywhere."""
        if late is not self._late:
            self.native.of.late = self._late = late
        self.native.of.late_row = row

    def _tell(self, state: SlotState) -> None:
        """How its request picks, and where it ends."""
        of, sampler, stops = self.native.of, state.sampler, sorted(state.stops)
        self._stops = (ctypes.c_int64 * len(stops))(*stops)
        of.stops, of.stopping, of.factors = ctypes.addressof(self._stops), len(stops), factors_at()
        vocabulary = self.native.target.logits.shape[1]
        for draw in self.native.draws:
            _describe(draw, sampler.sampling, vocabulary)
        for draw, share in zip(self.native.guesses, noise_of(len(self.native.guesses)), strict=True):
            _describe(draw, warmed(sampler, share), vocabulary)
        self._noise = NoiseAhead(sampler.sampling.seed) if sampler.sampling.temperature else None
        self._told = sampler


def _describe(draw: DrawOf, sampling: Sampling, vocabulary: int) -> None:
    """As `native_draw.found_at_once` does, of all but the row."""
    draw.mask, draw.known, draw.most, draw.told = None, -1, -1, None
    draw.temperature, draw.mass = sampling.temperature, sampling.top_p
    draw.least = math.log(sampling.min_p) if sampling.temperature and sampling.min_p else -math.inf
    draw.limit = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary


@define(eq=False)
class NativeDecodeStep:
    """Those of a target. buckets: row counts that forwards run with, ascending."""

    shard: DenseShard
    buckets: Sequence[int]
    _targets: dict[int, NativePass | None] = field(init=False, factory=dict)  # by rows
    _rounds: dict[tuple[int, int], RoundAtOnce] = field(init=False, factory=dict)  # by rows, of a block too

    def step(self, slot: int, state: SlotState, most: int, proposer: Proposer | None) -> RoundTaken | None:
        """The slot's next one, with up to so many proposals. The draft has rows of what stays, if it proposed; nothing
        else has happened yet. None: it is not served here, or there is no memory for it, and nothing has happened.
        """
        if not state.sampler.cheap or state.sampler.native is None:
            return None
        try:
            return self._step(slot, state, most, proposer)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            log.warning("a decode step in more calls than one: %s", error)
            return None

    def _step(self, slot: int, state: SlotState, most: int, proposer: Proposer | None) -> RoundTaken | None:
        depth, first, count, draft = self.shard.capacity - state.valid - 1, state.valid, 0, None
        if most and depth and proposer is not None:
            if not (type(proposer) is Drafting and isinstance(proposer.draft, DFlashDraft)):
                return None  # somebody else's proposals
            draft = proposer.draft
            if proposer.nodes and most >= draft.block:
                return None  # a tree
            first, count = proposer.room(DraftRequest(slot, state, most, depth))
        round_ = self.of(draft, count)
        if round_ is None:
            return None
        if not count:
            return self._plain(round_, slot, state, proposer)
        taken = round_.run(slot, state, first, count)
        if round_.native.of.followed:
            state.draft(state.valid, state.valid + len(taken.tokens))
        return taken

    def _plain(self, round_: RoundAtOnce, slot: int, state: SlotState, proposer: Proposer | None) -> RoundTaken:
        """Nobody proposes. A draft has the row, to follow it later, where nothing else is to be done for that."""
        late = proposer.next_row(slot, state) if isinstance(proposer, DraftContext) else None
        if late is None or not isinstance(proposer, DraftContext):
            round_.leave(None)
            taken = round_.run(slot, state, state.valid, 0)
            return taken if proposer is None else taken._replace(followed=False)
        if round_.followed_by is not proposer:
            left = round_.native.target.forward.aux_hidden_states
            round_.native.leave([left[layer] for layer in proposer.draft.aux_layers])
            round_.followed_by = proposer
        round_.leave(proposer.late_rows.addresses, late.first + late.count)
        taken = round_.run(slot, state, state.valid, 0)
        late.count += len(taken.tokens)
        return taken

    def left(self, rows: int) -> Forward:
        """What steps of so many rows leave, of those that were served here."""
        target = self._targets[rows]
        assert target is not None
        return target.forward

    def of(self, draft: DFlashDraft | None, count: int) -> RoundAtOnce | None:
        """Steps with so many proposals, of a draft if there are any."""
        rows = bucket_of(self.buckets, 1 + count)
        if rows not in self._targets:
            self._targets[rows] = self.shard.pass_at_once(rows) if rows <= MOST_FED else None
        if (target := self._targets[rows]) is None:
            return None
        native = draft.at_once(count, target) if draft is not None and count else None
        if native is None and count:
            return None
        kind = rows, 0 if native is None else native.block.rows
        known = self._rounds.get(kind)
        draft_now = None if native is None else ref(native)
        if known is None or known.native.draft != draft_now:  # its weights have gone and come back since
            known = self._rounds[kind] = RoundAtOnce(NativeRound(target, draft_now))
        return known


def rounds_of(shard: Shard, buckets: Sequence[int]) -> NativeDecodeStep | None:
    """None for a target that is not on this host as a whole."""
    parts = shard.parts if isinstance(shard, Pipeline) else (shard,)
    if len(parts) > 1 or not isinstance(parts[0], DenseShard) or parts[0].device.type != "cpu":
        return None
    return NativeDecodeStep(parts[0], buckets)

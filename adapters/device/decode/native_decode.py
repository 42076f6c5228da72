"""Decode steps of a single request in one call of the compiled library each, where it serves every part of them: what a
draft proposes, the target's forward, how far it agrees and the draft's rows of what stays.

What is picked, kept and followed is what `Decoding` comes to in calls of their own, which do whatever is not served
here: batches, trees, log-probabilities, penalties and grammars, positional state, other devices and other drafts.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import ref

from attrs import define, field

from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.out_of_memory import ran_out_of_memory
from adapters.device.sampling.sampler import Sampler
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.draft_context import DraftContext
from adapters.device.speculation.drafting import Drafting, noise_of, warmed
from adapters.device.speculation.proposer import DraftRequest, Proposer
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline import Pipeline
from adapters.models.decoder.shard import Shard
from adapters.models.drafts.dflash.draft import DFlashDraft
from adapters.models.kernels.decode_pass import MOST_ROWS, DecodePass, DecodeRound, DraftPass, RoundOutcome
from adapters.models.kernels.step import Forward
from effects.ids import Tokens

log = logging.getLogger("rekindle.device")


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
    """Steps of one width, for whichever request comes. What the round was told of a request holds until another one
    comes. followed_by: the draft that follows rows later, where nobody proposes.
    """

    native: DecodeRound
    draft: ref[DraftPass] | None
    followed_by: DraftContext[Any] | None = field(init=False, default=None)
    _described: Sampler | None = field(init=False, default=None)

    def run(self, slot: int, state: SlotState, first: int, count: int) -> RoundOutcome:
        """Raises as `DecodeRound.run` does."""
        if self._described is not state.sampler:
            sampler = state.sampler
            guesses = [warmed(sampler, share) for share in noise_of(self.native.rows)]
            self.native.describe(sampler.sampling, guesses, sorted(state.stops))
            self._described = sampler
        return self.native.run(slot, state.valid, first, state.tokens[-1], count)


@define(eq=False)
class NativeDecodeStep:
    """Those of a target. buckets: row counts that forwards run with, ascending."""

    shard: DenseShard
    buckets: Sequence[int]
    _targets: dict[int, DecodePass | None] = field(init=False, factory=dict)  # by rows
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
        outcome = round_.run(slot, state, first, count)
        if outcome.followed:
            state.draft(state.valid, state.valid + len(outcome.tokens))
        return RoundTaken(outcome.tokens, outcome.proposed, outcome.accepted)

    def _plain(self, round_: RoundAtOnce, slot: int, state: SlotState, proposer: Proposer | None) -> RoundTaken:
        """Nobody proposes. A draft has the row, to follow it later, where nothing else is to be done for that."""
        late = proposer.next_row(slot, state) if isinstance(proposer, DraftContext) else None
        if late is None or not isinstance(proposer, DraftContext):
            round_.native.copy_late_row(None)
            outcome = round_.run(slot, state, state.valid, 0)
            return RoundTaken(outcome.tokens, outcome.proposed, outcome.accepted, followed=proposer is None)
        if round_.followed_by is not proposer:
            left = self.left(round_.native.rows).aux_hidden_states
            round_.native.leave([left[layer] for layer in proposer.draft.aux_layers])
            round_.followed_by = proposer
        round_.native.copy_late_row(proposer.late_rows.addresses, late.first + late.count)
        outcome = round_.run(slot, state, state.valid, 0)
        late.count += len(outcome.tokens)
        return RoundTaken(outcome.tokens, outcome.proposed, outcome.accepted)

    def left(self, rows: int) -> Forward:
        """What steps of so many rows leave, of those that were served here."""
        target = self._targets[rows]
        assert target is not None
        return target.forward

    def of(self, draft: DFlashDraft | None, count: int) -> RoundAtOnce | None:
        """Steps with so many proposals, of a draft if there are any."""
        rows = bucket_of(self.buckets, 1 + count)
        if rows not in self._targets:
            self._targets[rows] = self.shard.build_pass(rows) if rows <= MOST_ROWS else None
        if (target := self._targets[rows]) is None:
            return None
        native = draft.build_draft_pass(count, target) if draft is not None and count else None
        if native is None and count:
            return None
        kind = rows, 0 if native is None else native.rows
        known = self._rounds.get(kind)
        draft_now = None if native is None else ref(native)
        if known is None or known.draft != draft_now:  # its weights have gone and come back since
            known = self._rounds[kind] = RoundAtOnce(target.build_round(draft_now), draft_now)
        return known


def rounds_of(shard: Shard, buckets: Sequence[int]) -> NativeDecodeStep | None:
    """None for a target that is not on this host as a whole."""
    parts = shard.parts if isinstance(shard, Pipeline) else (shard,)
    if len(parts) > 1 or not isinstance(parts[0], DenseShard) or parts[0].device.type != "cpu":
        return None
    return NativeDecodeStep(parts[0], buckets)

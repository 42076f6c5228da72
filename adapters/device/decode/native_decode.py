"""Decode steps of a single request on the CPU, in one call of the compiled library each.

Theory of operation
-------------------

On a CPU, a decode step of one request with a small model is short. Launching its parts from Python (the draft's
proposals, the target's forward, the picks, the draft's rows of what stays) takes a noticeable share of that time. So
the library can carry out all of it in one call (`rounds.h`). What is picked, kept and followed is what
`DecodeRunner.step` finds with calls of their own, to the bit.

* `NativeDecodeStep` belongs to one target. It makes a `FusedStep` for every pair of row count and draft block size.
* A `FusedStep` keeps what the library knows of a request (its sampling settings, stop tokens and noise keys) as long
  as the same request comes again.
* The draft decides whether its proposals can be made in that call (`Proposer.plan_fused_step`).
* Copies of earlier text are known before the step, so they are given along. So are the masks of a grammar's rows.
* Without proposals a draft still has to follow the row. Where its backlog has room, the library copies the row there
  (`Proposer.find_next_row`); else `NativeStepResult.followed` is false and the caller gives it the row.

`NativeDecodeStep.step` returns None for whatever is not served here, and nothing has happened then: batches, trees,
log-probabilities, penalties, positional state, devices other than the CPU, other kinds of drafts, and a draft's
proposals under a grammar.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple
from weakref import ref

from attrs import define, field

from adapters.device.lane.buckets import bucket_of
from adapters.device.lane.out_of_memory import is_out_of_memory
from adapters.device.sampling.grammar_mask import Mask, Matching
from adapters.device.sampling.sampler import Sampler
from adapters.device.slots.slots import SlotState
from adapters.device.speculation.guesses import draft_sampling, noise_shares
from adapters.device.speculation.proposer import (
    NO_COPIES,
    NO_PROPOSALS,
    CopiedTexts,
    DraftRequest,
    LocalDraft,
    Proposer,
)
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.kernels.interfaces.decode_pass import MOST_ROWS, DecodePass, DecodeRound, DraftPass, RoundOutcome
from adapters.models.kernels.step import Forward
from effects.ids import Tokens

log = logging.getLogger("rekindle.device")


class NativeStepResult(NamedTuple):
    """The result of a step: what it picked and proposed, in the terms of `Decoded`.

    tokens: empty if the logits were not finite. followed: the draft, if there is one, needs nothing more of this step.
    """

    tokens: Tokens
    proposed: int
    accepted: int
    followed: bool = True


class GivenRows(NamedTuple):
    """The facts about a step's rows that are known before it: copies of earlier text, and a grammar's mask for each
    row, if any."""

    copies: Tokens = ()
    masks: Sequence[Mask] = ()


NOTHING_GIVEN = GivenRows()


@define(eq=False)
class FusedStep:
    """The compiled decode step for one number of rows. It serves one request at a time.

    The library gets a request's settings when its first step comes, and not again at each step.

    draft: the part of the step in which a draft proposes, if there is one. row_layers: the auxiliary layers that the
    step copies to a draft's backlog; None before that was set up.
    """

    native: DecodeRound
    draft: ref[DraftPass] | None
    row_layers: Sequence[int] | None = field(init=False, default=None)
    _sampler: Sampler | None = field(init=False, default=None)  # of the request that the step knows

    def run(
        self, slot: int, state: SlotState, first: int, count: int, given: GivenRows = NOTHING_GIVEN
    ) -> RoundOutcome:
        """Run a step with `count` proposals from a draft context that begins at row `first`, or with given copies.

        Raises what `DecodeRound.run` raises.
        """
        if self._sampler is not state.sampler:
            sampler = state.sampler
            guesses = [draft_sampling(sampler, share) for share in noise_shares(self.native.rows)]
            self.native.describe(sampler.sampling, guesses, sorted(state.stops))
            self._sampler = sampler
        self.native.give(given.copies, given.masks)
        return self.native.run(slot, state.valid, first, state.tokens[-1], count)


@define(eq=False)
class NativeDecodeStep:
    """The native steps of one target. buckets: row counts that forwards run with, ascending."""

    shard: DenseShard
    buckets: Sequence[int]
    _targets: dict[int, DecodePass | None] = field(init=False, factory=dict)  # by rows
    _steps: dict[tuple[int, int], FusedStep] = field(init=False, factory=dict)  # by rows, and rows of the draft's block

    def step(
        self, slot: int, state: SlotState, most: int, proposer: Proposer | None, copies: CopiedTexts = NO_COPIES
    ) -> NativeStepResult | None:
        """Take the slot's next step, with its copies of earlier text or with up to `most` proposals of the draft.

        If the draft proposed, it has the rows that stay; nothing else has been committed yet. Returns None, and nothing
        has happened, if the step is not served here or there is no memory for it.
        """
        sampler = state.sampler
        if not sampler.plain or sampler.sampling.logprobs >= 0 or sampler.native is None:
            return None
        if copies.chains and (proposer is not None or copies.branches):
            return None  # the draft has to follow the copies
        try:
            return self._step(slot, state, most, proposer, copies.chains.get(slot, ()))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.warning("decode steps run layer by layer, because the compiled step cannot be used: %s", error)
            return None

    def _step(
        self, slot: int, state: SlotState, most: int, proposer: Proposer | None, copies: Tokens
    ) -> NativeStepResult | None:
        matching = state.sampler.matching
        if matching is not None:
            copies = copies[: matching.count_allowed(copies)]
        depth = self.shard.spec.capacity - state.valid - 1
        plan = NO_PROPOSALS
        if most and depth and proposer is not None and not copies:
            found = proposer.plan_fused_step(DraftRequest(slot, state, most, depth))
            if found is None or (found.count and matching is not None):
                return None  # proposals that have to be made in a call of their own
            plan = found
        step = self.find_fused_step(plan.draft, plan.count or len(copies))
        if step is None:
            return None
        masks = [] if matching is None else list_masks(matching, copies)
        if masks is None:
            # The grammar has come to a dead end. The caller takes the step without the compiled call, and its sampler
            # returns `DeadEnd` for the row.
            return None
        if not plan.count:
            return self._step_without_draft(step, slot, state, proposer, GivenRows(copies, masks))
        outcome = step.run(slot, state, plan.first, plan.count)
        if outcome.followed:
            state.add_draft_rows(state.valid, state.valid + len(outcome.tokens))
        return NativeStepResult(outcome.tokens, outcome.proposed, outcome.accepted)

    def _step_without_draft(
        self, step: FusedStep, slot: int, state: SlotState, proposer: Proposer | None, given: GivenRows
    ) -> NativeStepResult:
        """Take a step without a draft's proposals. The backlog of a draft gets the row in the same call if it can."""
        backlog = None if proposer is None else proposer.find_next_row(slot, state)
        if backlog is None:
            step.native.copy_late_row(None)
            outcome = step.run(slot, state, state.valid, 0, given)
            followed = proposer is None
            return NativeStepResult(outcome.tokens, outcome.proposed, outcome.accepted, followed)
        if step.row_layers != backlog.layers:
            left = self.forward_of(step.native.rows).aux_hidden_states
            step.native.leave([left[layer] for layer in backlog.layers])
            step.row_layers = backlog.layers
        rows = backlog.rows
        step.native.copy_late_row(backlog.addresses, rows.first + rows.count)
        outcome = step.run(slot, state, state.valid, 0, given)
        rows.count += len(outcome.tokens)
        return NativeStepResult(outcome.tokens, outcome.proposed, outcome.accepted)

    def forward_of(self, rows: int) -> Forward:
        """Return what a step of this many rows left. One must have been served here."""
        target = self._targets[rows]
        assert target is not None
        return target.forward

    def find_fused_step(self, draft: LocalDraft | None, count: int) -> FusedStep | None:
        """Return the step with `count` proposals, made on first use; None if the library cannot serve it.

        draft: what makes the proposals; None: they are given.
        """
        rows = bucket_of(self.buckets, 1 + count)
        if rows not in self._targets:
            self._targets[rows] = self.shard.build_pass(rows) if rows <= MOST_ROWS else None
        target = self._targets[rows]
        if target is None:
            return None
        native = draft.build_draft_pass(count, target) if draft is not None and count else None
        if native is None and draft is not None and count:
            return None
        kind = rows, 0 if native is None else native.rows
        known = self._steps.get(kind)
        draft_now = None if native is None else ref(native)
        # A draft whose weights have gone and come back has another native part.
        if known is None or known.draft != draft_now:
            known = FusedStep(target.build_round(draft_now), draft_now)
            self._steps[kind] = known
        return known


def list_masks(matching: Matching, copies: Tokens) -> list[Mask] | None:
    """Return the masks of a step's rows: which tokens may follow the answer so far, and which each of these copies.

    Returns None if the grammar lets no token follow one of them.
    """
    masks: list[Mask] = []
    for count in range(1 + len(copies)):
        mask = matching.mask(copies[:count])
        if isinstance(mask, str):  # the reason why no token may follow
            return None
        masks.append(mask)
    return masks


def make_native_decode(shard: Pipeline, buckets: Sequence[int]) -> NativeDecodeStep | None:
    """Return the native steps of a target; None if it is not on this host's CPU as a whole."""
    first = shard.parts[0]
    if len(shard.parts) > 1 or not isinstance(first, DenseShard) or first.spec.device.type != "cpu":
        return None
    return NativeDecodeStep(first, buckets)

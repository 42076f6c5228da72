"""A draft in a daemon: it follows rows of the target, picks proposals, and returns their token ids."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from attrs import define
from torch import Tensor

from adapters.device.sampling.sampler import Sampler
from adapters.device.speculation.drafting import ProposalPicker, ProposalRequest
from adapters.models.drafts.cached_draft import BlockRequest, CachedDraft
from adapters.models.kernels.step import Step
from adapters.remote.daemon.answer_handlers import OpAnswer, Ops
from adapters.remote.protocol.draft_messages import (
    AskedProposals,
    CopyContext,
    DraftBytes,
    DraftMoved,
    DraftProposed,
    DraftReady,
    DraftStep,
    FollowedRows,
    ProposedTree,
    SendAway,
)
from adapters.remote.protocol.lent_memory import LentTensors
from adapters.remote.protocol.messages import Described, Exported, HeldRows, Nothing, Op, Unacceptable, decode_step
from adapters.remote.protocol.payload_tensors import TensorBytes, describe_tensors
from adapters.remote.protocol.slot_messages import ImportRows, RowSpan
from adapters.sequence_layout import dtype_name
from effects.job import Sampling


@define(eq=False)
class ServedDraft:
    """A draft that a daemon serves.

    vocab: of the target. nodes: of a proposed tree; 0 for chains. weights, facts: digests of its weights and of what
    defines its rows.
    """

    draft: CachedDraft[Any]
    vocab: int
    nodes: int
    weights: str
    facts: str
    _reported: DraftBytes | None = None  # the last sizes that were sent to the server
    ops: ClassVar[Ops]

    @property
    def device(self) -> torch.device:
        return self.draft.device

    def describe_loaded(self, *, shared: bool) -> DraftReady:
        rows = self.draft.rows.spec
        held = HeldRows(rows.names, rows.heads, rows.width, rows.dtype)  # type: ignore[arg-type]
        own = self.weights, self.facts, self.draft.identity
        return DraftReady(*own, held, self._memory(), shared=shared)

    def close(self) -> None:
        self.draft.close()

    def _memory(self) -> DraftBytes:
        held = self.draft.memory()
        self._reported = held["weights"], held["host"], held["kv"], held["buffers"]
        return self._reported

    # --- rows to follow, and proposals ---

    def answer_draft_step(self, asked: DraftStep, given: TensorBytes) -> OpAnswer:
        """Let the draft follow the rows that were sent, and return its proposals."""
        if self.draft.weights_state != "loaded":
            raise Unacceptable(f"the draft's weights are {self.draft.weights_state}")
        began = time.perf_counter_ns()
        reported = self._reported
        self._follow(asked.follow, given)
        trees = self._propose_trees(asked.asked) if asked.asked else ()
        memory = self._memory()
        took = time.perf_counter_ns() - began
        return OpAnswer(DraftProposed(took, tuple(trees), None if memory == reported else memory))

    def _follow(self, follow: Sequence[FollowedRows], given: TensorBytes) -> None:
        rows = sum(len(followed.tokens) for followed in follow)
        dtype = dtype_name(self.draft.dtype)
        accepted = (Described("features", dtype, (rows, self.draft.hidden_size)),) if follow else ()  # type: ignore[arg-type]
        if given.tensors != accepted:
            raise Unacceptable(f"rows that are followed come with their features; here {accepted}")
        features = given.views()["features"] if follow else torch.empty(0)
        for step, tokens in _steps(follow, self.vocab):
            self.draft.extend_projected(step, tokens, features[: step.rows])
            features = features[step.rows :]

    def _propose_trees(self, asked: Sequence[AskedProposals]) -> Iterator[ProposedTree]:
        picker = ProposalPicker([self._following(ask) for ask in asked], self.nodes, self.draft.block)
        blocks = [BlockRequest(ask.slot, ask.first, ask.position, ask.token, ask.count) for ask in asked]
        self.draft.propose(blocks, picker)
        return (ProposedTree(tree.tokens, tree.parents) for tree in picker.trees())

    def _following(self, asked: AskedProposals) -> ProposalRequest:
        """Return the request with a sampler of the server's settings, without those that do not cross."""
        sampling = Sampling(asked.temperature, asked.top_k, asked.top_p, asked.min_p, seed=asked.seed)
        sampler = Sampler(sampling, (), self.vocab, self.device)
        return ProposalRequest(sampler, asked.position, asked.token, asked.most, frozenset(asked.stops))

    # --- rows and weights ---

    def copy(self, asked: CopyContext, _: TensorBytes) -> OpAnswer:
        self.draft.copy_rows(asked.slot, asked.target, asked.start, asked.stop)
        return OpAnswer(Nothing())

    def export_rows(self, asked: RowSpan, _: TensorBytes) -> OpAnswer:
        found = self.draft.rows.export(asked.slot, asked.start, asked.stop)
        return OpAnswer(Exported(describe_tensors(found)), found)

    def import_rows(self, asked: ImportRows, given: TensorBytes | LentTensors) -> OpAnswer:
        self.draft.rows.import_(asked.slot, asked.start, given.views())
        return OpAnswer(Nothing())

    def fetch(self, _: Nothing, __: TensorBytes) -> OpAnswer:
        moved = self.draft.load_back()
        return OpAnswer(DraftMoved(moved, self._memory()))

    def send_away(self, asked: SendAway, _: TensorBytes) -> OpAnswer:
        held = self.draft.memory()["weights"]
        if asked.keep:
            self.draft.offload()
        else:
            self.draft.release()
        return OpAnswer(DraftMoved(held, self._memory()))


ServedDraft.ops = {
    Op.DRAFT_STEP: (DraftStep, ServedDraft.answer_draft_step),
    Op.COPY_CONTEXT: (CopyContext, ServedDraft.copy),
    Op.EXPORT_ROWS: (RowSpan, ServedDraft.export_rows),
    Op.IMPORT_ROWS: (ImportRows, ServedDraft.import_rows),
    Op.FETCH_DRAFT: (Nothing, ServedDraft.fetch),
    Op.SEND_DRAFT_AWAY: (SendAway, ServedDraft.send_away),
}


def _steps(follow: Sequence[FollowedRows], vocab: int) -> Iterator[tuple[Step, Tensor]]:
    for followed in follow:
        step = decode_step(followed.step)
        if step.rows != len(followed.tokens) or max(followed.tokens, default=0) >= vocab:
            raise Unacceptable(
                f"{len(followed.tokens)} tokens for {step.rows} rows, or one that the model does not have"
            )
        yield step, torch.tensor(followed.tokens)

"""The proposals of a draft in another process, for the device executor."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, evolve

from adapters.device.speculation.drafting import DraftProposer
from adapters.device.speculation.proposal_tree import Tree, chain
from adapters.device.speculation.proposer import DraftRequest
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.remote.client.remote_draft import RemoteDraft
from adapters.remote.protocol.draft_messages import AskedProposals


@define(eq=False)
class RemoteDrafting(DraftProposer[RemoteDraft]):
    """Proposes with a draft in another process, which gets the sampling settings of each request.

    Penalties, biases and grammars do not cross. Nothing is proposed while the process is gone.
    """

    def grow_trees(self, requests: Sequence[DraftRequest], asks: Sequence[BlockRequest]) -> list[Tree]:
        asked = [asked_of(one, ask) for one, ask in zip(requests, asks, strict=True)]
        trees = self.draft.round(asked)
        return [chain((ask.token,)) for ask in asks] if trees is None else trees

    def _ask(self, request: DraftRequest) -> BlockRequest:
        ask = super()._ask(request)
        first = self.draft.rows.find_context_start(ask.slot, ask.first, ask.position)
        return evolve(ask, first=first, count=ask.count if first < ask.position else 0)


def asked_of(request: DraftRequest, ask: BlockRequest) -> AskedProposals:
    sampling = request.state.sampler.sampling
    return AskedProposals(
        slot=ask.slot,
        first=ask.first,
        position=ask.position,
        token=ask.token,
        count=ask.count,
        most=request.most,
        stops=tuple(sorted(request.state.stops)),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )

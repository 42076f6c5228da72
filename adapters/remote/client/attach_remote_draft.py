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

    def grow_trees(self, requests: Sequence[DraftRequest], block_requests: Sequence[BlockRequest]) -> list[Tree]:
        asked = [
            asked_of(request, block_request) for request, block_request in zip(requests, block_requests, strict=True)
        ]
        trees = self.draft.send_draft_step(asked)
        return [chain((block_request.token,)) for block_request in block_requests] if trees is None else trees

    def _make_block_request(self, request: DraftRequest) -> BlockRequest:
        block_request = super()._make_block_request(request)
        first = self.draft.rows.find_context_start(block_request.slot, block_request.first, block_request.position)
        return evolve(block_request, first=first, count=block_request.count if first < block_request.position else 0)


def asked_of(request: DraftRequest, block_request: BlockRequest) -> AskedProposals:
    sampling = request.state.sampler.sampling
    return AskedProposals(
        slot=block_request.slot,
        first=block_request.first,
        position=block_request.position,
        token=block_request.token,
        count=block_request.count,
        most=request.most,
        stops=tuple(sorted(request.state.stops)),
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
    )

"""Proposals of a draft: its context follows the target, and it proposes what the target may pick (`guesses.py`)."""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain as join
from itertools import islice
from typing import TypeAlias, TypeVar

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.device.lane.out_of_memory import is_out_of_memory
from adapters.device.sampling.sampler import Draw, Sampler, adjust_logits
from adapters.device.speculation.draft_context import D, DraftContext
from adapters.device.speculation.guesses import launch_guesses, noise_shares, pick_guesses, rank_candidates
from adapters.device.speculation.launched_proposals import LaunchedProposals
from adapters.device.speculation.proposal_tree import Tree, chain, grow_tree, subtree
from adapters.device.speculation.proposer import DraftRequest, FusedPlan, LocalDraft
from adapters.models.drafts.cached_draft import BlockRequest
from effects.ids import DeviceFailed, RequestId
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel

log = logging.getLogger("rekindle.device")

CHILDREN = 8  # of a node; trees of the sizes that pay never reach more


@define(eq=False)
class DraftProposer(DraftContext[D], ABC):
    """Proposals of a draft, wherever it runs.

    A draft that is not loaded, or that finds no memory for its buffers, proposes nothing. nodes: the most proposals of
    a tree. A tree is grown if more proposals are asked for than a chain may have; 0 means never.
    """

    nodes: int = 0

    @abstractmethod
    def grow_trees(self, requests: Sequence[DraftRequest], block_requests: Sequence[BlockRequest]) -> Sequence[Tree]:
        """Return what may follow each of these requests, from the draft. Raises torch.OutOfMemoryError."""

    # --- proposals ---

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        """Return a tree per request; node 0 alone where the draft cannot propose."""
        trees: dict[int, Tree] = {}
        if self.draft.weights_state == "loaded":
            self.catch_up(*[request.slot for request in requests])
            block_requests = {
                index: block_request
                for index, request in enumerate(requests)
                if (block_request := self._make_block_request(request)).count > 0
            }
            try:
                grown = (
                    self.grow_trees([requests[index] for index in block_requests], list(block_requests.values()))
                    if block_requests
                    else ()
                )
                trees.update(zip(block_requests, grown, strict=True))
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                log.warning("the draft proposed nothing for this step: %s", error)
        return [trees.get(index) or chain((request.state.tokens[-1],)) for index, request in enumerate(requests)]

    def find_room(self, request: DraftRequest) -> tuple[int, int]:
        """Follow the slot to its last row. Return the first row of its context, and how many proposals it may have."""
        if self.draft.weights_state != "loaded":
            return request.state.valid, 0
        self.catch_up(request.slot)
        block_request = self._make_block_request(request)
        return block_request.first, block_request.count

    def _make_block_request(self, request: DraftRequest) -> BlockRequest:
        """Return the draft's part of a request. It asks for nothing if the draft has not followed all rows."""
        first, position = request.state.draft_rows
        count = min(request.most, request.depth, self.draft.block - 1) if first < position else 0
        return BlockRequest(request.slot, first, position, request.state.tokens[-1], count)

    # --- residency ---

    def load_back(self, _: RequestId, __: LoadModel) -> ModelLoaded | DeviceFailed:
        """Bring the weights in. Raises torch.OutOfMemoryError. A failure leaves the draft where it was."""
        started = time.perf_counter_ns()
        try:
            moved = self.draft.load_back()
        except (CheckpointError, OSError) as error:
            return DeviceFailed("io", str(error))
        return ModelLoaded(moved, time.perf_counter_ns() - started)

    def offload(self, _: RequestId, effect: UnloadModel) -> ModelUnloaded:
        """Send the weights to host memory, or drop them, once the draft has followed all rows."""
        self.catch_up(*self._deferred)
        started_ns = time.perf_counter_ns()
        weights_bytes = self.draft.memory()["weights"]
        if effect.keep:
            self.draft.offload()
        else:
            self.draft.release()
        return ModelUnloaded(weights_bytes, time.perf_counter_ns() - started_ns)


P = TypeVar("P", bound=LocalDraft)


@define(eq=False)
class Drafting(DraftProposer[P]):
    """A draft of this process."""

    def plan_fused_step(self, request: DraftRequest) -> FusedPlan | None:
        """Plan a chain of proposals. A tree has to be asked for by `propose`."""
        if self.nodes and request.most >= self.draft.block:
            return None
        first, count = self.find_room(request)
        return FusedPlan(self.draft, first, count)

    def grow_trees(self, requests: Sequence[DraftRequest], block_requests: Sequence[BlockRequest]) -> list[Tree]:
        """Return what the picker chose from the draft's logits."""
        wanted = [
            ProposalRequest(one.state.sampler, block_request.position, block_request.token, one.most, one.state.stops)
            for one, block_request in zip(requests, block_requests, strict=True)
        ]
        said = ProposalPicker(wanted, self.nodes, self.draft.block)
        self.draft.propose(block_requests, said)
        return said.trees()

    def launch_proposals(self, requests: Sequence[DraftRequest]) -> LaunchedProposals | None:
        """Launch chains of proposals. The host does not wait, so it must not have to know a token between two picks.

        So there are none for trees, and none with a grammar or penalties. Where the draft has another device than the
        target, nothing is gained.
        """
        samplers = [request.state.sampler for request in requests]
        if (
            self.draft.weights_state != "loaded"
            or any(self.nodes and request.most >= self.draft.block for request in requests)
            or not all(one.plain and one.matching is None for one in samplers)
            or not all(is_same_device(one.device, self.draft.device) for one in samplers)
        ):
            return None
        self.catch_up(*[request.slot for request in requests])
        block_requests = [self._make_block_request(request) for request in requests]
        asking = [index for index, block_request in enumerate(block_requests) if block_request.count > 0]
        if not asking:
            return None

        def launch_picks(logits: Tensor, draft_step: int) -> Tensor:
            rows = [Draw(samplers[at], block_requests[at].position + 1 + draft_step) for at in asking]
            return launch_guesses(logits, rows, noise_shares(1) * len(rows))

        try:
            tokens = self.draft.launch_proposals([block_requests[at] for at in asking], launch_picks)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return None  # `propose` says so, if it finds none either
        counts = {requests[at].slot: block_requests[at].count for at in asking}
        return None if tokens is None else LaunchedProposals(tokens, counts)


@frozen(eq=False)
class ProposalRequest:
    """A request for proposals behind the token at `position`. most: proposals. stops: tokens that end the answer."""

    sampler: Sampler
    position: int
    token: int
    most: int
    stops: frozenset[int]


# The candidates of one position with their log-likelihoods, likeliest first.
Ranked: TypeAlias = list[tuple[int, float]]


@define(eq=False)
class ProposalPicker:
    """Picks the proposals for these requests from a draft's logits. nodes, block: as in `Drafting`.

    drafted: the chain of each request. ranked: of each request with a tree, the candidates that each call brought.
    """

    requests: Sequence[ProposalRequest]
    nodes: int
    block: int
    drafted: list[list[int]] = field(init=False)
    ranked: dict[int, list[list[Ranked]]] = field(init=False, factory=dict[int, list[list[Ranked]]])

    def __attrs_post_init__(self) -> None:
        self.drafted = [[] for _ in self.requests]

    def __call__(self, parts: Sequence[Tensor]) -> list[list[int]]:
        """Pick one token per row of logits `[n, V]`, which the draft gives per request.

        Chains whose picks do not depend on the proposals before them are picked together, on the target's device.
        """
        found: list[list[int]] = [[] for _ in parts]
        together: dict[int, Tensor] = {}
        rows: list[Draw] = []
        noise: list[float] = []
        for index, (part, request) in enumerate(zip(parts, self.requests, strict=True)):
            count = part.shape[0]
            device = request.sampler.device
            logits = part if part.device == device else part.to(device)
            if count and self._wants_tree(request):
                found[index] = self._rank_positions(index, logits)
            elif count and request.sampler.plain:
                together[index] = logits
                rows += self._rows(index, count)
                noise += noise_shares(count)
            elif count:
                found[index] = self._pick_one_by_one(index, logits)
        if together:
            first, *others = together.values()
            tokens = iter(pick_guesses(torch.cat((first, *others)) if others else first, rows, noise))
            for index, logits in together.items():
                found[index] = list(islice(tokens, logits.shape[0]))
        for index, more in enumerate(found):
            self.drafted[index] += more
        return found

    def trees(self) -> list[Tree]:
        """Return all that was picked. Nothing follows a token that ends the answer."""
        return [
            cut_after_stops(self._make_tree(index, request), request.stops)
            for index, request in enumerate(self.requests)
        ]

    def _make_tree(self, index: int, request: ProposalRequest) -> Tree:
        calls = self.ranked.get(index)
        if calls is None:
            return chain((request.token, *self.drafted[index]))
        # What a later call brought was computed after the tokens that were picked in earlier calls.
        nodes = min(request.most, self.nodes)
        return grow_tree(request.token, list(join.from_iterable(calls)), nodes, is_conditional=len(calls) > 1)

    def _wants_tree(self, request: ProposalRequest) -> bool:
        """Is a tree grown for it? Not with penalties, which would depend on the path to each token."""
        return self.nodes > 0 and request.sampler.plain and request.most >= self.block

    def _rows(self, index: int, count: int) -> list[Draw]:
        """Return the draws of the next proposals, which do not depend on those before them."""
        request = self.requests[index]
        first = request.position + 1 + len(self.drafted[index])
        return [Draw(request.sampler, first + row) for row in range(count)]

    def _pick_one_by_one(self, index: int, logits: Tensor) -> list[int]:
        """Pick each proposal as if those before it were part of the answer."""
        request = self.requests[index]
        before = self.drafted[index]
        found = list[int]()
        for number in range(len(logits)):
            path = (*before, *found)
            row = Draw(request.sampler, request.position + 1 + len(path), path)
            found += pick_guesses(
                adjust_logits(logits[number : number + 1], [row]), [row], noise_shares(len(logits))[number:][:1]
            )
        return found

    def _rank_positions(self, index: int, logits: Tensor) -> list[int]:
        """Rank the candidates of the next positions by what a pick compares: noisy logits. Return the likeliest."""
        ids, scores = rank_candidates(logits, self._rows(index, len(logits)), noise_shares(len(logits)))
        values, order = scores.log_softmax(-1).topk(min(CHILDREN, scores.shape[-1]))
        ranked = [
            [(token, value) for token, value in zip(*pair, strict=True) if value > -math.inf]
            for pair in zip(ids.gather(-1, order).tolist(), values.tolist(), strict=True)
        ]
        self.ranked.setdefault(index, []).append(ranked)
        return list(ids.gather(-1, order[:, :1]).flatten().tolist())


def is_same_device(one: torch.device, other: torch.device) -> bool:
    """Are they the same device? One without a number is the first of its type."""
    return one.type == other.type and (one.index or 0) == (other.index or 0)


def cut_after_stops(tree: Tree, stops: frozenset[int]) -> Tree:
    """Return the tree without what follows a token that ends the answer."""
    if stops.isdisjoint(tree.tokens[1:]):
        return tree
    ends = [node for node, token in enumerate(tree.tokens) if node and token in stops]
    keep = {0}
    for node in range(1, len(tree.tokens)):
        if tree.parents[node] in keep and tree.parents[node] not in ends:
            keep.add(node)
    return subtree(tree, keep)

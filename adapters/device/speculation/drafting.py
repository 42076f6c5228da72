"""A draft at work for the executor: its context follows the target, and it proposes what the target may pick.

It proposes with the request's own sampler settings and noise. With coupled noise the target picks the largest of its
logits / temperature + noise; so does the draft, of its own, which agrees far more often than its likeliest token would.
Only the likeliest few are looked at: a proposal need not be exact.
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.device.lane.out_of_memory import ran_out_of_memory
from adapters.device.sampling.sampler import Draw, Sampler, adjusted
from adapters.device.speculation.draft_context import D, DraftContext
from adapters.device.speculation.proposal_tree import Tree, best_first, chain, subtree
from adapters.device.speculation.proposer import DraftHere, DraftRequest
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.kernels.factory import build_sampling
from adapters.models.kernels.noise import gumbel_of
from adapters.models.kernels.truncation import make_column
from effects.ids import DeviceFailed, RequestId
from effects.job import Sampling
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel

log = logging.getLogger("rekindle.device")

CANDIDATES = 64  # tokens that a position's proposal is drawn from, the draft's likeliest
FIRST, NOISE = 0.8, 0.6  # of the target's noise, for the first proposal, and for what is proposed blindly after another
MASS = 0.95  # of what top-p leaves: the tail of a draft is less to be believed than the target's
CHILDREN = 8  # of a node: more are never reached by trees of the sizes that pay


@define(eq=False)
class DraftProposer(DraftContext[D], ABC):
    """A draft wherever it is. nodes: of a tree at most, which is grown where more proposals are asked for than a chain
    may have; 0: never.

    A draft that is not loaded proposes nothing. Neither does one that finds no memory for its buffers.
    """

    nodes: int = 0

    @abstractmethod
    def grown(self, requests: Sequence[DraftRequest], asks: Sequence[BlockRequest]) -> Sequence[Tree]:
        """What the draft says may follow each of these. Raises torch.OutOfMemoryError."""

    # --- proposals ---

    def propose(self, requests: Sequence[DraftRequest]) -> list[Tree]:
        trees: dict[int, Tree] = {}
        if self.draft.state == "loaded":
            self.catch_up(*[request.slot for request in requests])
            asks = {index: ask for index, request in enumerate(requests) if (ask := self._ask(request)).count > 0}
            try:
                grown = self.grown([requests[index] for index in asks], list(asks.values())) if asks else ()
                trees.update(zip(asks, grown, strict=True))
            except Exception as error:
                if not ran_out_of_memory(error):
                    raise
                log.warning("no proposals: %s", error)
        return [trees.get(index) or chain((request.state.tokens[-1],)) for index, request in enumerate(requests)]

    def room(self, request: DraftRequest) -> tuple[int, int]:
        """Where the slot's context begins, once it is followed to the last row; and how many proposals it may have."""
        if self.draft.state != "loaded":
            return request.state.valid, 0
        self.catch_up(request.slot)
        ask = self._ask(request)
        return ask.first, ask.count

    def _ask(self, request: DraftRequest) -> BlockRequest:
        """For nothing, where the draft has not followed up to the last row."""
        first, position = request.state.drafted
        count = min(request.most, request.depth, self.draft.block - 1) if first < position else 0
        return BlockRequest(request.slot, first, position, request.state.tokens[-1], count)

    # --- residency ---

    def load_back(self, _: RequestId, __: LoadModel) -> ModelLoaded | DeviceFailed:
        """Raises torch.OutOfMemoryError; whatever fails leaves the draft where it was."""
        started = time.perf_counter_ns()
        try:
            moved = self.draft.load_back()
        except (CheckpointError, OSError) as error:
            return DeviceFailed("io", str(error))
        return ModelLoaded(moved, time.perf_counter_ns() - started)

    def offload(self, _: RequestId, effect: UnloadModel) -> ModelUnloaded:
        self.catch_up(*self._late)
        started, held = time.perf_counter_ns(), self.draft.memory()["weights"]
        if effect.keep:
            self.draft.offload()
        else:
            self.draft.release()
        return ModelUnloaded(held, time.perf_counter_ns() - started)


P = TypeVar("P", bound=DraftHere)


@define(eq=False)
class Drafting(DraftProposer[P]):
    """One of this process."""

    def grown(self, requests: Sequence[DraftRequest], asks: Sequence[BlockRequest]) -> list[Tree]:
        wanted = [
            Following(one.state.sampler, ask.position, ask.token, one.most, one.state.stops)
            for one, ask in zip(requests, asks, strict=True)
        ]
        said = Choosing(wanted, self.nodes if self.draft.branches else 0, self.draft.block)
        self.draft.propose(asks, said)
        return said.trees()


@frozen(eq=False)
class Following:
    """What is proposed after the token at `position` is picked like this. most: rows. stops: tokens that end it."""

    sampler: Sampler
    position: int
    token: int
    most: int
    stops: frozenset[int]


@define(eq=False)
class Choosing:
    """Picks what is proposed to these requests, as a draft says what may come. nodes, block: as `Drafting` has them."""

    requests: Sequence[Following]
    nodes: int
    block: int
    drafted: list[list[int]] = field(init=False)
    grown: dict[int, Tree] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.drafted = [[] for _ in self.requests]

    def __call__(self, parts: Sequence[Tensor]) -> list[list[int]]:
        """Chains that need no look at what was proposed before are picked together; all where the target's are."""
        found: list[list[int]] = [[] for _ in parts]
        together: dict[int, Tensor] = {}
        rows: list[Draw] = []
        noise: list[float] = []
        for index, (part, request) in enumerate(zip(parts, self.requests, strict=True)):
            count, here = part.shape[0], request.sampler.device
            said = part if part.device == here else part.to(here)
            if count and self._wide(request):
                found[index] = self._tree(index, said)
            elif count and request.sampler.plain:
                together[index] = said
                rows += self._rows(index, count)
                noise += noise_of(count)
            elif count:
                found[index] = self._one_by_one(index, said)
        if together:
            said, *others = together.values()
            tokens = iter(guesses(torch.cat((said, *others)) if others else said, rows, noise))
            for index, said in together.items():
                found[index] = list(islice(tokens, said.shape[0]))
        for index, more in enumerate(found):
            self.drafted[index] += more
        return found

    def trees(self) -> list[Tree]:
        """All that was picked. Nothing follows a token that ends the answer."""
        return [
            cut(self.grown.get(index) or chain((request.token, *self.drafted[index])), request.stops)
            for index, request in enumerate(self.requests)
        ]

    def _wide(self, request: Following) -> bool:
        """Penalties would need the path before each token: there it is a chain all the same."""
        return self.nodes > 0 and request.sampler.plain and request.most >= self.block

    def _rows(self, index: int, count: int) -> list[Draw]:
        """How the next proposals are picked, whatever was proposed before them."""
        request = self.requests[index]
        first = request.position + 1 + len(self.drafted[index])
        return [Draw(request.sampler, first + row) for row in range(count)]

    def _one_by_one(self, index: int, logits: Tensor) -> list[int]:
        """Each proposal is picked as if those before it were part of the answer."""
        request, before, found = self.requests[index], self.drafted[index], list[int]()
        for number in range(len(logits)):
            path = (*before, *found)
            row = Draw(request.sampler, request.position + 1 + len(path), path)
            found += guesses(adjusted(logits[number : number + 1], [row]), [row], noise_of(len(logits))[number:][:1])
        return found

    def _tree(self, index: int, logits: Tensor) -> list[int]:
        """Candidates are ranked by what is compared when one is picked: logits, or noisy ones."""
        request = self.requests[index]
        ids, scores = candidates(logits, self._rows(index, len(logits)), noise_of(len(logits)))
        values, order = scores.log_softmax(-1).topk(min(CHILDREN, scores.shape[-1]))
        ranked = [
            [(token, value) for token, value in zip(*pair, strict=True) if value > -math.inf]
            for pair in zip(ids.gather(-1, order).tolist(), values.tolist(), strict=True)
        ]
        self.grown[index] = best_first(request.token, ranked, min(request.most, self.nodes))
        return list(ids.gather(-1, order[:, :1]).flatten().tolist())


def noise_of(count: int) -> list[float]:
    """How much of the target's noise each of `count` proposals is picked with that a draft says at once.

    All of it would pick the target's own token if the draft were right; the less it knows, the more its odds count. The
    others are said without knowing what was picked before them, which the target knows.
    """
    return [FIRST, *[NOISE] * (count - 1)][:count]


def guesses(logits: Tensor, rows: Sequence[Draw], noise: Sequence[float]) -> list[int]:
    """One token a row, from float32 `[R, V]` with bias and penalties. noise: see `noise_of`."""
    warm = [index for index, row in enumerate(rows) if row.sampler.sampling.temperature]
    if logits.is_cuda:
        kernels = build_sampling(logits.device)
        tokens, found = kernels.find_extremes(logits)
        if warm:
            samplings = [warmed(rows[index].sampler, noise[index]) for index in warm]
            positions = [rows[at].position for at in warm]
            kernels.draw_tokens(logits, found, warm, samplings, positions, tokens=tokens, found=found)
        return list(tokens.tolist())
    if not warm:
        return list(logits.argmax(-1).tolist())
    native = rows[0].sampler.native
    if native is not None:
        wanted = [(warmed(row.sampler, share), row.position, None) for row, share in zip(rows, noise, strict=True)]
        return [int(token) for (token, _, _), _ in native.pick(logits, logits, wanted)]
    ids, scores = candidates(logits, rows, noise)
    return list(ids.gather(-1, scores.argmax(-1, keepdim=True)).flatten().tolist())


def warmed(sampler: Sampler, share: float) -> Sampling:
    """A share of the noise, as if it were all at that share of the temperature. Made once for a request."""
    found, own = sampler.guessing.get(share), sampler.sampling
    if found is None:
        found = evolve(own, temperature=share * own.temperature, top_p=MASS * own.top_p, logprobs=-1)
        sampler.guessing[share] = found
    return found


def candidates(logits: Tensor, rows: Sequence[Draw], noise: Sequence[float]) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, int64 `[R, n]`, and what is compared when one is drawn, float32 `[R, n]`.

    That is logit / temperature + a share of the noise, and -inf where the request truncates; for a greedy row its
    logits.
    """
    found, ids = logits.topk(min(CANDIDATES, logits.shape[-1]))
    asked = [row.sampler.sampling for row in rows]
    samplings = [sampling if sampling.temperature else Sampling(temperature=1) for sampling in asked]
    warmth = make_column([sampling.temperature for sampling in samplings], found)
    scaled = found / warmth
    drawn = gumbel_of([(sampling.seed, row.position) for sampling, row in zip(asked, rows, strict=True)], ids)
    heard = [share * (sampling.temperature > 0) for share, sampling in zip(noise, asked, strict=True)]
    scores = scaled + drawn * make_column(heard, drawn)
    shares = (scaled - (logits / warmth).logsumexp(-1, keepdim=True)).exp()
    before = shares.cumsum(-1) - shares
    most = make_column([sampling.top_k or CANDIDATES for sampling in samplings], ids)
    out = torch.arange(ids.shape[1], device=ids.device) >= most
    out |= before >= make_column([MASS * sampling.top_p for sampling in samplings], before)
    out |= shares < shares[:, :1] * make_column([sampling.min_p for sampling in samplings], shares)
    return ids, scores.masked_fill_(out, -math.inf).float()


def cut(tree: Tree, stops: frozenset[int]) -> Tree:
    """Nothing follows a token that ends the answer."""
    if stops.isdisjoint(tree.tokens[1:]):
        return tree
    ends = [node for node, token in enumerate(tree.tokens) if node and token in stops]
    keep = {0}
    for node in range(1, len(tree.tokens)):
        if tree.parents[node] in keep and tree.parents[node] not in ends:
            keep.add(node)
    return subtree(tree, keep)

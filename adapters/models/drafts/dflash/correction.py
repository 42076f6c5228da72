"""Corrections of a block's logits that depend on the token before: the Markov head of DSpark, the selector of DFlash 2.

A block's forward predicts all places at once, each without knowing the one before it. A correction goes through the
places in order. To the logits of a place it adds what the token before it says. Then a token is chosen for the place.
That costs little, since the layers do not run again.

* The Markov head adds W2 g(W1[token]), where W1 and W2 have few columns. g is the identity (`vanilla`), a gate that
  depends on the hidden state of the place (`gated`), or a recurrence over the block (`rnn`).
* The selector keeps the likeliest tokens c of each place. With A and B of few columns, and P the projection of the
  place's hidden state h, it adds the sum over columns of A[token] * (P h) * B[c]. Other tokens cannot be chosen.

Where DSpark has a confidence head, proposals end before the chance that all of them are right becomes small.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.drafts.cached_draft import BlockRequest, ChooseTokens
from adapters.models.drafts.dflash.parts import DraftParts, MarkovShape, SelectorShape
from adapters.models.kernels.interfaces.layer_interface import Kernels

# Proposals end where the chance that all of them are right is smaller. In the example of docs/SPECULATION.md one row
# more costs 0.05 to 0.17 of a plain step. It gives one token, the gain of a plain step, with this chance.
LEAST_CHANCE = 0.1


@frozen
class BlockOutput:
    """The result of a forward for the places of one request. logits: float32 `[n, V]`. features: `[n, F]`, which
    the draft's correction has projected from hidden states.
    """

    logits: Tensor
    features: Tensor


@frozen
class PaddedProducts:
    """Products of few rows, which are padded to a row count that was proven."""

    kernels: Kernels
    buckets: Sequence[int]

    def multiply(self, x: Tensor, packed: Any) -> Tensor:
        rows = len(x)
        bucket = next(count for count in self.buckets if count >= rows)
        return self.kernels.linear(torch.nn.functional.pad(x, (0, 0, 0, bucket - rows)), packed)[:rows]


class PlaceWalk(ABC):
    """The way through the places of several blocks, one place after the other."""

    @abstractmethod
    def score(self, live: Sequence[int], place: int, tokens: Tensor) -> tuple[list[int], Tensor]:
        """Return which blocks have a proposal for this place, and its float32 logits, one row for each of them.

        live: the numbers of the blocks that had one for the place before. tokens: int64, what was chosen there.
        """


class Correction(ABC):
    """A loaded correction."""

    @abstractmethod
    def count_features(self, hidden: int) -> int:
        """Return the columns of what `project` returns for hidden states of this size."""

    @abstractmethod
    def project(self, kernels: Kernels, x: Tensor) -> Tensor:
        """Return what the walk needs of the block's hidden states `[R, D]`: `[R, F]`. Runs with the block's forward."""

    @abstractmethod
    def begin(self, blocks: Sequence[BlockOutput], products: PaddedProducts) -> PlaceWalk:
        """Return a walk through the places of these blocks."""


def pick_in_order(walk: PlaceWalk, requests: Sequence[BlockRequest], pick: ChooseTokens, device: torch.device) -> None:
    """Choose the proposals of all requests, one place after the other. `pick` is called once for each place."""
    live = list(range(len(requests)))
    tokens = [request.token for request in requests]
    for place in range(max(request.count for request in requests)):
        live = [index for index in live if requests[index].count > place]
        before = torch.tensor([tokens[index] for index in live], device=device)
        with torch.inference_mode():
            live, logits = walk.score(live, place, before)
        if not live:
            return
        parts = [logits[:0]] * len(requests)
        for row, index in enumerate(live):
            parts[index] = logits[row : row + 1]
        picked = pick(parts)
        for index in live:
            [tokens[index]] = picked[index]


@frozen
class MarkovHead(Correction):
    """The Markov head of DSpark, and its confidence head if it has one.

    embeddings: `[V, R]`. out: `[V, R]`, packed. inner, inner_bias: the own projection of a gated or recurrent head.
    confidence: float32 `[D + R]` or `[D]`, and its bias `[1]`.
    """

    shape: MarkovShape
    embeddings: Tensor
    out: Any
    inner: Any = None
    inner_bias: Tensor | None = None
    confidence: tuple[Tensor, Tensor] | None = None

    def count_features(self, hidden: int) -> int:
        return 0 if self.inner is None and self.confidence is None else hidden

    def project(self, kernels: Kernels, x: Tensor) -> Tensor:  # noqa: ARG002 - hidden states are taken as they are
        return x if self.inner is not None or self.confidence is not None else x[:, :0]

    def begin(self, blocks: Sequence[BlockOutput], products: PaddedProducts) -> MarkovWalk:
        return MarkovWalk(self, blocks, products)


@define(eq=False)
class MarkovWalk(PlaceWalk):
    """A walk with a Markov head. chances: for each block, the chance that all proposals so far are right.

    state: `[blocks, R]`, of a recurrent head.
    """

    head: MarkovHead
    blocks: Sequence[BlockOutput]
    products: PaddedProducts
    chances: list[float] = field(init=False)
    state: Tensor = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.chances = [1.0] * len(self.blocks)
        self.state = self.head.embeddings.new_zeros(len(self.blocks), self.head.shape.rank)

    def score(self, live: Sequence[int], place: int, tokens: Tensor) -> tuple[list[int], Tensor]:
        embedded = self.head.embeddings.index_select(0, tokens)
        features = torch.stack([self.blocks[index].features[place] for index in live])
        likely = self._find_likely(live, features, embedded)
        kept = [live[row] for row in likely]
        rows = torch.tensor(likely, dtype=torch.int64, device=tokens.device)
        if not kept:
            return kept, self.blocks[0].logits[:0]
        latent = self._find_latent(kept, features.index_select(0, rows), embedded.index_select(0, rows))
        logits = torch.stack([self.blocks[index].logits[place] for index in kept])
        return kept, logits + self.products.multiply(latent, self.head.out).float()

    def _find_likely(self, live: Sequence[int], features: Tensor, embedded: Tensor) -> list[int]:
        """Return the rows of the blocks whose proposals are likely enough to be right, with this place's."""
        if self.head.confidence is None:
            return list(range(len(live)))
        weight, bias = self.head.confidence
        seen = torch.cat((features, embedded), 1) if self.head.shape.confidence_sees_token else features
        found = ((seen.float() * weight).sum(1) + bias).sigmoid().tolist()
        for index, chance in zip(live, found, strict=True):
            self.chances[index] *= chance
        return [row for row, index in enumerate(live) if self.chances[index] >= LEAST_CHANCE]

    def _find_latent(self, kept: Sequence[int], features: Tensor, embedded: Tensor) -> Tensor:
        """Return `[n, R]`, which the head multiplies with its matrix of all tokens."""
        if self.head.shape.kind == "vanilla":
            return embedded
        if self.head.shape.kind == "gated":
            return self._project((features, embedded)).sigmoid().to(embedded.dtype) * embedded
        rows = torch.tensor(kept, device=embedded.device)
        before = self.state.index_select(0, rows)
        gate, candidate, out = self._project((before, embedded, features)).chunk(3, 1)
        gate = gate.sigmoid()
        after = gate * before.float() + (1 - gate) * candidate.tanh()
        self.state.index_copy_(0, rows, after.to(self.state.dtype))
        return out.tanh().to(embedded.dtype)

    def _project(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Return the head's own projection of the joined inputs, in float32."""
        assert self.head.inner_bias is not None
        return self.products.multiply(torch.cat(inputs, 1), self.head.inner).float() + self.head.inner_bias


@frozen
class Selector(Correction):
    """The selector of DFlash 2. predecessors, successors: A and B, `[V, R]`. projection: P, packed."""

    shape: SelectorShape
    predecessors: Tensor
    successors: Tensor
    projection: Any

    def count_features(self, hidden: int) -> int:  # noqa: ARG002
        return self.shape.rank

    def project(self, kernels: Kernels, x: Tensor) -> Tensor:
        return kernels.linear(x, self.projection)

    def begin(self, blocks: Sequence[BlockOutput], products: PaddedProducts) -> SelectorWalk:  # noqa: ARG002
        return SelectorWalk(self, blocks)


@define(eq=False)
class SelectorWalk(PlaceWalk):
    """A walk through the likeliest tokens of all places. found: for each block their logits and ids, `[n, k]`."""

    selector: Selector
    blocks: Sequence[BlockOutput]
    found: list[tuple[Tensor, Tensor]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        most = min(self.selector.shape.candidates, self.blocks[0].logits.shape[1])
        self.found = []
        for block in self.blocks:
            values, ids = block.logits.topk(most)
            self.found.append((values, ids))

    def score(self, live: Sequence[int], place: int, tokens: Tensor) -> tuple[list[int], Tensor]:
        features = torch.stack([self.blocks[index].features[place] for index in live]).float()
        values = torch.stack([self.found[index][0][place] for index in live])
        ids = torch.stack([self.found[index][1][place] for index in live])
        gated = self.selector.predecessors.index_select(0, tokens).float() * features
        successors = self.selector.successors[ids].float()
        scores = values + (gated.unsqueeze(1) * successors).sum(2)
        logits = scores.new_full((len(live), self.blocks[0].logits.shape[1]), -torch.inf)
        return list(live), logits.scatter_(1, ids, scores)


def load_correction(read: WeightReader, kernels: Kernels, parts: DraftParts) -> Correction | None:
    """Load the draft's correction, or return None if it has none."""
    if parts.selector is not None:
        name = "candidate_selector."
        return Selector(
            parts.selector,
            read(f"{name}predecessor_codebook"),
            read(f"{name}successor_codebook"),
            kernels.pack(read(f"{name}hidden_projection.weight")),
        )
    shape = parts.markov
    if shape is None:
        return None
    confidence = None
    if shape.has_confidence:
        confidence = (read.wide("confidence_head.proj.weight").flatten(), read.wide("confidence_head.proj.bias"))
    inner = None if shape.inner is None else f"markov_head.{shape.inner[0]}."
    return MarkovHead(
        shape,
        read("markov_head.markov_w1.weight"),
        kernels.pack(read("markov_head.markov_w2.weight")),
        inner=None if inner is None else kernels.pack(read(f"{inner}weight")),
        inner_bias=None if inner is None else read.wide(f"{inner}bias"),
        confidence=confidence,
    )

"""Chains of proposals that the device still computes, and that the next forward of the target reads there.

Theory of operation. A draft that continues from the token that was picked before needs one forward and one pick for
each proposal. If the host read every pick, the device would wait for it each time. But nothing on the host depends on
a proposal until the target has verified it. So the host launches the whole chain, then the target's forward, whose
tokens are taken from the chain on the device, and then the target's picks. It reads proposals and picks together.

Example. Two slots have 3 proposals each, behind tokens 7 and 9. The target is fed 7, a1, a2, a3, 9, b1, b2, b3. The
host knows 7 and 9, and `feed_tokens` puts the others between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.device.sampling.side_stream import side_stream
from adapters.device.speculation.proposal_tree import Tree, chain


@define(eq=False)
class LaunchedProposals:
    """Chains of several slots. tokens: int64 `[slots, most]` on the device. counts: of each slot, the length of its
    chain; slots are in the order of the rows.
    """

    tokens: Tensor
    counts: Mapping[int, int]
    _host_tokens: Tensor = field(init=False)
    _arrived: torch.cuda.Event | None = field(init=False, default=None)
    _found: list[list[int]] | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        """Start the copy to the host on a stream of its own. Neither the host nor the device waits for it."""
        self._host_tokens = self.tokens
        if self.tokens.is_cuda:
            with side_stream(self.tokens) as stream:
                there = torch.empty(self.tokens.shape, dtype=self.tokens.dtype, pin_memory=True)
                self._host_tokens = there.copy_(self.tokens, non_blocking=True)
                self._arrived = stream.record_event()

    def find_chain(self, slot: int) -> LaunchedChain | None:
        """Return the chain of a slot; None if it has none."""
        rows = {found: row for row, found in enumerate(self.counts)}
        return LaunchedChain(self, rows[slot], self.counts[slot]) if slot in rows else None

    def read(self, row: int) -> list[int]:
        """Return a row of the tokens. The first call waits for the device."""
        if self._found is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._found = self._host_tokens.tolist()
        return self._found[row]


@frozen(eq=False)
class LaunchedChain:
    """The chain of one slot: the first `count` tokens of a row."""

    proposals: LaunchedProposals
    row: int
    count: int

    def make_stand_in(self, token: int) -> Tree:
        """Return a tree of the chain's shape, with zeros for the tokens that are not known yet. token: it is fed."""
        return chain((token, *[0] * self.count))

    def read_tree(self, token: int) -> Tree:
        """Return the tree with its tokens. Waits for the device."""
        return chain((token, *self.proposals.read(self.row)[: self.count]))


def feed_tokens(tokens: Sequence[int], chains: Mapping[int, LaunchedChain]) -> Tensor:
    """Return what a step feeds: int64 `[rows]`, on the device if a part of it is not known to the host.

    tokens: of all rows, with any numbers where they are not known. chains: by the row of the token that they follow.
    They are all of one launch.
    """
    known = torch.from_numpy(np.array(tokens, np.int64))
    if not chains:
        return known
    proposed = next(iter(chains.values())).proposals.tokens
    width = proposed.shape[1]
    to = [first + 1 + at for first, one in chains.items() for at in range(one.count)]
    source = [one.row * width + at for one in chains.values() for at in range(one.count)]
    device = proposed.device
    rows, places = torch.tensor([to, source]).to(device, non_blocking=True)
    return known.to(device, non_blocking=True).index_copy_(0, rows, proposed.flatten().index_select(0, places))

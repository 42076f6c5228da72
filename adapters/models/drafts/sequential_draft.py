"""The base class of drafts that predict one token after the other, each from the token that was picked before."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from torch import Tensor

from adapters.models.drafts.cached_draft import BlockRequest, CachedDraft, ChooseTokens, L


class SequentialDraft(CachedDraft[L]):
    """A draft that runs one forward for each proposal. See `CachedDraft` for the methods."""

    def propose(self, requests: Sequence[BlockRequest], pick: ChooseTokens) -> None:
        """Run one forward for each proposal. Requests with the fewest proposals leave first."""
        loaded = self._require_weights()
        self._check_requests(requests)
        order = sorted(range(len(requests)), key=lambda index: -requests[index].count)
        asking = [requests[index] for index in order]
        tokens = [request.token for request in asking]
        for draft_step in range(asking[0].count):
            asking = [request for request in asking if request.count > draft_step]
            logits = self._run_draft_step(loaded, asking, tokens, draft_step)
            parts = [logits[:0]] * len(requests)
            for row, index in enumerate(order[: len(asking)]):
                parts[index] = logits[row : row + 1]
            picked = pick(parts)
            tokens = [picked[index][0] for index in order[: len(asking)]]

    def list_rehearsals(self, slots: int, rows: int) -> Iterator[list[BlockRequest]]:
        """Return requests of two proposals each: the first continues from the target, the second from the draft."""
        for count in range(1, min(slots, rows // 2) + 1):
            yield [BlockRequest(slot, 0, 1, 0, 2) for slot in range(count)]

    @abstractmethod
    def _run_draft_step(
        self, loaded: L, asking: Sequence[BlockRequest], tokens: Sequence[int], draft_step: int
    ) -> Tensor:
        """Return float32 logits with one row for each request, in a static buffer.

        tokens: the token that each request continues from, and perhaps more behind them. draft_step: 0 for the first
        proposal.
        """

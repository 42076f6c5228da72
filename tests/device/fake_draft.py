"""A draft that knows the fake shard: with its whole context in place it proposes what that shard picks greedily."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.models.decoder.shard import NamedTensors
from adapters.models.drafts.cached_draft import BlockRequest, ChooseTokens
from adapters.models.drafts.draft_parts import LaunchPicks
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.step import Step
from tests.device.fake_shard import VOCAB, logits_of, mix, row_of


@frozen(eq=False)
class FakeDraftRows:
    cache: Tensor

    def export(self, slot: int, start: int, stop: int) -> NamedTensors:
        return {"draft.layers.0.k": self.cache[slot, start:stop].clone()}


@define(eq=False)
class FakeDraft:
    """Its context rows are the shard's own. noise: how much its logits differ from the shard's. is_sequential: each
    proposal follows the one that was picked before; otherwise a block is predicted at once.
    """

    slots: int = 4
    capacity: int = 256
    block: int = 8
    noise: float = 0.0
    is_sequential: bool = False
    aux_layers: tuple[int, ...] = (0,)
    device: torch.device = field(default="cpu", converter=torch.device)
    weights_state: Literal["loaded", "parked", "released"] = "loaded"
    exhausted: set[str] = field(factory=set)  # what finds no memory: extend, propose, unpark; file: nothing is found
    asked: list[Sequence[BlockRequest]] = field(factory=list)
    launched: list[Sequence[BlockRequest]] = field(factory=list)
    cache: Tensor = field(init=False)
    rows: FakeDraftRows = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.cache = torch.randint(-(2**60), 2**60, (self.slots, self.capacity))
        self.rows = FakeDraftRows(self.cache)

    def extend(self, step: Step, tokens: Tensor, aux_hidden_states: Mapping[int, Tensor]) -> None:
        self._need("extend")
        assert tokens.shape == (step.rows,)
        rows, first = aux_hidden_states[0], 0
        assert rows.shape == (step.bucket, 1), (rows.shape, step)
        for segment in step.segments:
            at = slice(segment.start, segment.start + segment.count)
            self.cache[segment.slot, at] = rows[first : first + segment.count, 0]
            first += segment.count

    def at_once(self, count: int, target: object) -> None:
        return None

    def propose(self, block_requests: Sequence[BlockRequest], pick: ChooseTokens) -> None:
        self._need("propose")
        self.asked.append(list(block_requests))
        assert all(0 < request.count < self.block for request in block_requests)
        generator = make_generator(len(self.asked))
        totals = [self.cache[request.slot, request.first : request.position].sum() for request in block_requests]
        tokens = [request.token for request in block_requests]

        def predict(index: int, draft_step: int) -> Tensor:
            position = block_requests[index].position + draft_step
            totals[index] = totals[index] + row_of(torch.tensor(tokens[index]), torch.tensor(position))
            logits = logits_of(mix(totals[index]).reshape(1, 1), VOCAB)
            tokens[index] = int(logits.argmax())
            return logits + self.noise * torch.randn(1, VOCAB, generator=generator)

        if not self.is_sequential:
            pick([torch.cat([predict(at, step) for step in range(one.count)]) for at, one in enumerate(block_requests)])
            return
        for step in range(max(request.count for request in block_requests)):
            asking = [step < request.count for request in block_requests]
            picked = pick([predict(at, step) if asks else torch.empty(0, VOCAB) for at, asks in enumerate(asking)])
            tokens = [found[0] if found else token for found, token in zip(picked, tokens, strict=True)]

    def launch_proposals(self, block_requests: Sequence[BlockRequest], pick: LaunchPicks) -> Tensor | None:
        if not self.is_sequential:
            return None
        most = max(request.count for request in block_requests)
        chains: list[list[int]] = [[] for _ in block_requests]

        def pick_launched(parts: Sequence[Tensor]) -> list[list[int]]:
            picked = pick(torch.cat(list(parts)), len(chains[0]))
            assert picked.shape == (len(block_requests),), "one token for each row"
            for row, token in enumerate(picked.tolist()):
                chains[row].append(token)
            return [[token] for token in picked.tolist()]

        self.propose([evolve(one, count=most) for one in block_requests], pick_launched)
        self.launched.append(list(block_requests))
        return torch.tensor(chains)

    def copy_rows(self, source: int, target: int, start: int, stop: int) -> None:
        self.cache[target, start:stop] = self.cache[source, start:stop]

    def offload(self) -> int:
        self.weights_state = "parked"
        return 1000

    def load_back(self) -> int:
        if "unpark" in self.exhausted:
            raise torch.OutOfMemoryError("no room for the draft")
        if "file" in self.exhausted:
            raise CheckpointError("the draft's file has gone")
        self.weights_state = "loaded"
        return 1000

    def release(self) -> None:
        self.weights_state = "released"

    def memory(self) -> Mapping[str, int]:
        loaded = self.weights_state == "loaded"
        return {"weights": 1000 * loaded, "host": 0, "kv": self.cache.nbytes, "buffers": 0}

    def _need(self, what: str) -> None:
        assert self.weights_state == "loaded"
        if what in self.exhausted:
            raise torch.OutOfMemoryError(f"no room to {what}")

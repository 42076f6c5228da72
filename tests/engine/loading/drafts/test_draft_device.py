"""A draft on a device that has none of its target's layers: it has copies of the embedding and of the head."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from adapters.models.drafts.cached_draft import BlockRequest, CachedDraft
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.step import Segment, Step
from engine.loading.background_load import load_target
from engine.loading.drafts.find_draft import find_draft
from engine.loading.drafts.load_draft import build_draft, build_own_kernels
from engine.settings.options import build_options

pytestmark = pytest.mark.usefixtures("rates_are_given")

APART = torch.device("cpu", 0)  # not what a target on the processor calls it, so that everything is as on another one


@pytest.fixture(autouse=True)
def a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def proposed(draft: CachedDraft, width: int) -> list[int]:
    """To a slot whose 24 rows of context are random."""
    drawn, said = make_generator(5), list[int]()
    aux = {layer: torch.randn(32, width, generator=drawn).to(torch.bfloat16) for layer in draft.aux_layers}
    draft.extend(Step((Segment(0, 0, 24),), 32), torch.arange(24), aux)

    def pick(parts: Sequence[Tensor]) -> list[list[int]]:
        found = [part.argmax(-1).tolist() for part in parts]
        said.extend(token for tokens in found for token in tokens)
        return found

    draft.propose([BlockRequest(0, 0, 24, 7, 3)], pick)
    return said


@pytest.mark.parametrize("model", ["demo", pytest.param("demo-hybrid", marks=pytest.mark.long)])
async def test_it_proposes_what_one_beside_its_target_does_and_its_copies_come_and_go(model: str) -> None:
    options = build_options(model=model, device="cpu", max_ctx=512, disk_prefix_cache="off", host_cache_budget=0)
    target = await load_target(options)
    try:
        found, shared_draft = find_draft(options, target.checkpoint), target.draft
        assert found is not None
        assert shared_draft is not None
        width = found.shape.hidden_size

        def tried() -> None:
            spec = target.shard.spec
            placement = DraftPlacement(
                device=APART, dtype=spec.dtype, slots=spec.slots, capacity=spec.capacity, buckets=spec.buckets
            )
            kernels = build_own_kernels(
                found, target.checkpoint.config, placement, kept=target.calibrations, fast=False
            )
            apart = build_draft(found, placement, kernels, target.checkpoint)
            expected, head = proposed(shared_draft, width), target.shard.head
            assert proposed(apart, width) == expected
            copied = apart.memory()["weights"] - shared_draft.memory()["weights"]
            assert copied >= head.embedding.nbytes
            assert apart.offload() > copied
            assert apart.memory()["weights"] == 0
            apart.load_back()
            assert apart.memory()["weights"] - shared_draft.memory()["weights"] == copied
            assert proposed(apart, width) == expected
            apart.close()

        await target.lane.run(tried)
    finally:
        await target.close()

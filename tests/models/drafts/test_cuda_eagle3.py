"""EAGLE-3 drafts on CUDA: right by the reference, and the same bits in any pieces and batches, graphs included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.drafts.eagle3.draft import Eagle3Draft
from adapters.models.kernels.factory import build_sampling
from adapters.models.kernels.reference.kernels import ReferenceKernels
from tests.models.checkpoints import same_bits
from tests.models.draft_models import TARGET
from tests.models.drafts.test_eagle3 import ask
from tests.models.eagle3_drafts import CAPACITY, KINDS, SLOTS, follow, proposed, random_eagle3, taps_of, target_head

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
LENGTH = 300
TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-4}


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, TARGET.vocab_size, (LENGTH + 1,), generator=torch.Generator().manual_seed(1))


def made(kernels: Any, kind: str, dtype: torch.dtype, device: torch.device) -> Eagle3Draft:
    config = KINDS[kind]
    head = target_head(kernels, dtype, device)
    placement = DraftPlacement(device=device, dtype=dtype, slots=SLOTS, capacity=CAPACITY)
    return Eagle3Draft(config, random_eagle3(config), kernels, head, placement)


@pytest.mark.parametrize("kind", [*KINDS])
def test_it_says_what_the_reference_says(dtype, tokens, kind):
    taps = taps_of(KINDS[kind], LENGTH, dtype)
    found = []
    for kernels, device in ((triton_cuda.TritonKernels(DEVICE), DEVICE), (ReferenceKernels(), torch.device("cpu"))):
        draft = made(kernels, kind, dtype, device)
        follow(draft, 0, tokens[:LENGTH], taps, [100])
        found.append(proposed(draft, ask(tokens, LENGTH, count=1)).logits[0][0].cpu().double())
    ours, theirs = (row[row.isfinite()] for row in found)
    assert ours.shape == theirs.shape
    assert ((ours - theirs).norm() / theirs.norm()).item() < TOLERANCE[dtype]


def test_bits_are_the_same_in_any_pieces_and_batches_however_often(dtype, tokens):
    kind = "reduced vocabulary"
    draft = made(triton_cuda.TritonKernels(DEVICE), kind, dtype, DEVICE)
    taps = taps_of(KINDS[kind], LENGTH, dtype)
    follow(draft, 0, tokens[:LENGTH], taps, [256])
    [expected] = proposed(draft, ask(tokens, LENGTH)).logits
    for slot, pieces in enumerate(([64], [1, 63, 130, 7], [33, 100, 3]), 1):
        for _ in range(3):  # first without a graph, then recorded, then replayed
            follow(draft, slot, tokens[:LENGTH], taps, pieces)
        assert all(map(same_bits, proposed(draft, ask(tokens, LENGTH, slot)).logits[0], expected))
    requests = [ask(tokens, 130, 3, 2), ask(tokens, LENGTH, 0, 7), ask(tokens, 64, 2, 5), ask(tokens, LENGTH, 1, 1)]
    alone = [proposed(draft, request).logits[0] for request in requests]
    for _ in range(3):
        together = proposed(draft, *requests).logits
        assert all(all(map(same_bits, ours, theirs)) for ours, theirs in zip(together, alone, strict=True))


def test_a_launched_chain_has_the_same_proposals_however_often(dtype, tokens):
    kind = "reduced vocabulary"
    draft = made(triton_cuda.TritonKernels(DEVICE), kind, dtype, DEVICE)
    taps = taps_of(KINDS[kind], LENGTH, dtype)
    requests = [ask(tokens, 130, 3, 2), ask(tokens, LENGTH, 0, 7), ask(tokens, 64, 2, 5), ask(tokens, LENGTH, 1, 1)]
    for request in requests:
        follow(draft, request.slot, tokens[: request.position], taps, [100])
    kernels = build_sampling(DEVICE)
    expected = proposed(draft, *requests).tokens
    for _ in range(3):  # first without a graph, then recorded, then replayed
        found = draft.launch_proposals(requests, lambda logits, _: kernels.find_extremes(logits)[0])
        assert [row[: len(one)].tolist() for row, one in zip(found, expected, strict=True)] == expected
        alone = [draft.launch_proposals([one], lambda logits, _: kernels.find_extremes(logits)[0]) for one in requests]
        assert [row[0].tolist() for row in alone] == expected

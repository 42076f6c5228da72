"""Tests of a model's own prediction head on CUDA: it agrees with the reference, and has the same bits with any other
requests, graphs included.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters import demo
from adapters.models.decoder.layers.embedding import host_table
from adapters.models.decoder.shard import TargetHead
from adapters.models.drafts.cached_draft import BlockRequest
from adapters.models.drafts.draft_parts import DraftPlacement
from adapters.models.drafts.mtp.checkpoint import HeadCheckpoint
from adapters.models.drafts.mtp.draft import MtpDraft
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.open_checkpoint import Checkpoint
from tests.models.checkpoints import same_bits

triton_cuda = pytest.importorskip(
    "adapters.models.kernels.cuda.kernels", reason="Triton comes with CUDA builds of torch"
)

pytestmark = [pytest.mark.cuda, pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
BUCKETS = (4, 8, 16, 32, 64, 128, 512)
LENGTH = 300
TOLERANCE = {torch.bfloat16: 4e-2, torch.float32: 1e-4}


def made(kernels, dtype: torch.dtype, *, away: bool = False) -> MtpDraft:
    """Return the hybrid demo's head, with what it shares with its target. away: the embedding is in host memory."""
    checkpoint = Checkpoint.open(demo.FOLDERS["demo-hybrid"])
    head = HeadCheckpoint.open(checkpoint)
    table = checkpoint.read("model.embed_tokens.weight").to(DEVICE, dtype)
    norm = checkpoint.read("model.norm.weight").to(DEVICE, torch.float32) + 1
    shared = TargetHead(host_table(table) if away else table, kernels.pack(table.clone()), norm)
    placement = {"device": DEVICE, "dtype": dtype, "slots": 4, "capacity": 1024, "buckets": BUCKETS}
    return MtpDraft(head.config, head, kernels, shared, DraftPlacement(**placement))


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request):
    if triton_cuda.TritonKernels(DEVICE).delta is None:
        pytest.skip("these kernels have none for the gate of a head's attention")
    return request.param


@pytest.fixture
def rows(dtype) -> tuple[Tensor, Tensor]:
    """Tokens, and what the target's last layer left for each."""
    generator = make_generator(3)
    tokens = torch.randint(16, 4096, (LENGTH + 1,), generator=generator)
    return tokens, torch.randn(LENGTH, 160, generator=generator).to(DEVICE, dtype)


def fill(draft: MtpDraft, rows: tuple[Tensor, Tensor], pieces: list[int], slot: int = 0, stop: int = LENGTH) -> None:
    """pieces: rows of each step, the last one repeated."""
    tokens, left = rows
    at, index = 0, 0
    while at < stop:
        end = min(at + pieces[min(index, len(pieces) - 1)], stop)
        bucket = next(bucket for bucket in BUCKETS if bucket >= end - at)
        padded = torch.full((bucket, 160), 3e4, device=DEVICE, dtype=left.dtype)
        padded[: end - at] = left[at:end]
        step = Step((Segment(slot, at, end - at),), bucket)
        draft.extend(step, tokens[at:end], {draft.aux_layers[0]: padded})
        at, index = end, index + 1


def said(draft: MtpDraft, tokens: Tensor, *asked: tuple[int, int, int]) -> list[Tensor]:
    """Logits `[count, V]` for each (slot, position, count); the tokens that are picked are always the same."""
    found: list[list[Tensor]] = [[] for _ in asked]

    def pick(parts: list[Tensor]) -> list[list[int]]:
        for index, part in enumerate(parts):
            found[index] += part.clone().unbind(0)
        return [[100 + len(found[index])] * len(part) for index, part in enumerate(parts)]

    draft.propose([BlockRequest(slot, 0, at, int(tokens[at]), count) for slot, at, count in asked], pick)
    return [torch.stack(each) for each in found]


def test_an_embedding_in_host_memory_says_the_same(dtype, rows):
    found = []
    for away in (False, True):
        draft = made(triton_cuda.TritonKernels(DEVICE), dtype, away=away)
        fill(draft, rows, [100])
        found.append([said(draft, rows[0], (0, LENGTH, 6))[0] for _ in range(3)])  # eager, recorded, replayed
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_it_says_what_the_reference_says(dtype, rows):
    ours, theirs = made(triton_cuda.TritonKernels(DEVICE), dtype), made(ReferenceKernels(), dtype)
    for draft in (ours, theirs):
        fill(draft, rows, [100])
    for at in (64, 65, LENGTH):
        found, expected = (said(draft, rows[0], (0, at, 6))[0].double() for draft in (ours, theirs))
        assert ((found - expected).norm() / expected.norm()).item() < TOLERANCE[dtype]


def test_the_same_bits_in_any_pieces_and_company_however_often(dtype, rows):
    draft = made(triton_cuda.TritonKernels(DEVICE), dtype)
    fill(draft, rows, [256])
    [expected] = said(draft, rows[0], (0, LENGTH, 7))
    for slot, pieces in enumerate(([64], [1, 63, 130, 7], [33, 100, 3]), 1):
        for _ in range(3):  # first without a graph, then recorded, then replayed
            fill(draft, rows, pieces, slot)
        assert same_bits(said(draft, rows[0], (slot, LENGTH, 7))[0], expected)
    asked = [(3, 130, 2), (0, LENGTH, 7), (2, 64, 5), (1, LENGTH, 1)]
    alone = [said(draft, rows[0], one)[0] for one in asked]
    for _ in range(3):
        together = said(draft, rows[0], *asked)
        assert all(same_bits(ours, theirs) for ours, theirs in zip(together, alone, strict=True))

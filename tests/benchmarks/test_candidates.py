"""The candidates for Hopper: that they compile, and on a card the bits of the kernels that serve."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from effects.ids import PAGE

candidates = pytest.importorskip(
    "benchmarks.candidates.launches", reason="Triton comes with CUDA builds of torch", exc_type=ImportError
)
compiled = pytest.importorskip(
    "tests.models.kernels.compiled_kernels", reason="Triton comes with CUDA builds of torch", exc_type=ImportError
)

DEVICE = torch.device("cuda")
HALF = [torch.bfloat16, torch.float16]
BODIES = {
    "attention": (compiled.attend(128, 1024, paged=True), "attend_chain_overlapped"),
    "attention of wide heads": (compiled.attend(256, 1024, group=6, paged=True), "attend_chain_overlapped"),
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("body", "kernel"), BODIES.values(), ids=BODIES)
def test_candidates_compile_and_fit_into_shared_memory(body, kernel, pytestconfig):
    traits = compiled.TARGETS["sm_90"]
    with compiled.compile_for(traits, str(pytestconfig.cache.mkdir("triton"))) as found:
        body(candidates.make_candidates(compiled.CPU, traits))
    assert kernel in {one.name for one in found.kernels}
    assert all(one.shared <= traits.shared for one in found.kernels)


@pytest.fixture
def both():
    """The kernels that serve and the candidates, on a Hopper."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels of Hopper's")
    return candidates.TritonKernels(DEVICE), candidates.make_candidates(DEVICE)


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(*shape, generator=generator, device=DEVICE) * scale).to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.cuda
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("geometry", [(32, 8, 128), (6, 2, 64), (24, 4, 256)], ids=str)
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 256)],
        [(0, 1), (63, 200), (255, 2)],
        [(100, 129), (0, 7), (256, 64)],
        [(9 * PAGE - 500, 500)],
        [(700, 1024)],
    ],
    ids=str,
)
def test_attention_has_the_bits_of_that_which_serves(both, spans, geometry, dtype):
    """Steps of several slots and padded rows. Rows of the cache that have not been written hold no numbers."""
    (heads, kv, head) = geometry
    rows = sum(count for _, count in spans)
    bucket = next(bucket for bucket in (256, 512, 1024, 2048) if bucket >= rows)
    of_slot = -(-max(start + count for start, count in spans) // PAGE)
    pages = len(spans) * of_slot
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(1))
    table = order.to(DEVICE, torch.int32).view(len(spans), -1)
    caches = [normal(pages, kv, PAGE, head, dtype=dtype, seed=seed) for seed in (1, 2)]
    for slot, (start, count) in enumerate(spans):
        for number in range(of_slot):
            for cache in caches:
                cache[table[slot, number].item(), :, max(0, start + count - number * PAGE) :] = float("nan")
    q = normal(bucket, heads, head, dtype=dtype, seed=3)
    found = []
    for kernels in both:
        batch = Batch(bucket, DEVICE, pages=table)
        batch.load(Step(tuple(Segment(slot, *span) for slot, span in enumerate(spans)), bucket), [0] * rows)
        kernels.prepare_step(batch)
        found.append(kernels.attend(q, *caches, batch))
    assert found[0][:rows].isfinite().all()
    assert same_bits(*found)

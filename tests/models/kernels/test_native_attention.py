"""Tests of attention in C: it is right, and has the same bits with any other rows, on any threads, in any
instructions.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native import native_library
from adapters.models.kernels.cpu.native.attention import NativeAttention
from adapters.models.kernels.cpu.native.native_library import TILES
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch, BlockBatch

FLOAT, BRAIN, CPU = torch.float32, torch.bfloat16, torch.device("cpu")
SLOTS, CAPACITY = 3, 512
SLOT = torch.tensor([1] * 30 + [2] * 3 + [0] * 7)
HIGH = torch.tensor([*range(220, 250), 500, 501, 512, 1, 2, 3, 4, 5, 0, 0])  # across tiles of 128; two rows see nothing
LOW = torch.tensor([0] * 20 + [129] * 10 + [257, 258, 384] + [0] * 7)
ROWS = len(SLOT)


@pytest.fixture(scope="module")
def own(native_code):
    return NativeAttention(native_code, native_code.level, FLOAT)


def random(*shape, seed=1, dtype=FLOAT):
    return torch.randn(shape, generator=make_generator(seed)).to(dtype)


def case(kv, group, head, dtype=FLOAT):
    caches = [random(SLOTS, kv, CAPACITY, head, seed=seed, dtype=dtype) for seed in (2, 3)]
    return random(ROWS, kv, group, head), *caches


def exact(q, k_cache, v_cache):
    found = torch.zeros(q.shape, dtype=torch.double)
    for row, (slot, low, high) in enumerate(zip(SLOT, LOW, HIGH, strict=True)):
        k, v = (cache[slot, :, low:high].double() for cache in (k_cache, v_cache))
        if high > low:
            found[row] = (q[row].double() @ k.transpose(1, 2)).softmax(-1) @ v
    return found.flatten(1)


def same(found, expected):
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
@pytest.mark.parametrize("shape", [(1, 5, 64), (2, 3, 40), (2, 1, 16), (1, 2, 33), (1, 100, 8)], ids=str)
def test_it_is_right(own, dtype, shape):
    q, *caches = case(*shape, dtype)
    expected = exact(q, *caches)
    assert torch.allclose(own.attend(q, SLOT, (LOW, HIGH), *caches).double(), expected, rtol=1e-4, atol=1e-4)
    rounded = evolve(own, to=BRAIN).attend(q, SLOT, (LOW, HIGH), *caches)
    assert same(rounded, own.attend(q, SLOT, (LOW, HIGH), *caches).to(BRAIN)), "rounded once"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("levels", ["without tiles", "with tiles"])
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
@pytest.mark.parametrize("shape", [(2, 3, 40), (1, 5, 64), (1, 1, 34)], ids=str)
def test_bits_are_a_rows_own(own, dtype, shape, levels):
    """Level 4 has an arithmetic of its own for keys and values in bfloat16, which AVX-512 computes as well."""
    if levels == "with tiles" and own.level < 2:
        pytest.skip("no AVX-512")
    q, *caches = case(*shape, dtype)
    threads = torch.get_num_threads()
    served = [TILES] if levels == "with tiles" else range(min(own.level, TILES - 1) + 1)
    whole = evolve(own, level=served[0]).attend(q, SLOT, (LOW, HIGH), *caches)
    assert torch.allclose(whole.double(), exact(q, *caches), rtol=1e-4, atol=1e-4)
    try:
        for each in [evolve(own, level=level) for level in served]:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                assert same(each.attend(q, SLOT, (LOW, HIGH), *caches), whole)
                for row in range(0, ROWS, 3):
                    at = slice(row, row + 1)
                    alone = each.attend(q[at], SLOT[at], (LOW[at], HIGH[at]), *caches)
                    assert same(alone, whole[at]), "with any neighbours, and whichever thread takes which tile"
    finally:
        torch.set_num_threads(threads)


def test_rows_that_are_no_numbers_and_keys_that_nobody_sees_change_nothing(own):
    q, *caches = case(1, 5, 64)
    whole = own.attend(q, SLOT, (LOW, HIGH), *caches)
    for cache in caches:
        cache[0, :, 5:] = torch.nan
        cache[1, :, 249:] = torch.nan
    q[4] = torch.nan
    found = own.attend(q, SLOT, (LOW, HIGH), *caches)
    assert found[4].isnan().all()
    assert same(found[:4], whole[:4])
    assert same(found[5:], whole[5:])


def test_great_scores_are_no_trouble(own):
    q, k_cache, v_cache = case(1, 2, 16)
    found = own.attend(q * 1e4, SLOT, (LOW, HIGH), k_cache, v_cache)
    assert torch.allclose(found.double(), exact(q * 1e4, k_cache, v_cache), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"k_cache": torch.zeros(2, 1, 8, 8)}, ValueError),
        ({"q": torch.zeros(2, 2, 1, 16)}, ValueError),
        ({"q": torch.zeros(3, 1, 1, 16)}, ValueError),
        ({"q": torch.zeros(2, 1, 16, 1).transpose(2, 3)[:, :, :, ::2]}, ValueError),
        ({"q": torch.zeros(2, 1, 1, 16, dtype=BRAIN)}, TypeError),
        ({"k_cache": torch.zeros(2, 1, 8, 16, dtype=torch.float16), "v_cache": torch.zeros(2, 1, 8, 16)}, TypeError),
        ({"k_cache": torch.zeros(2, 1, 8, 16, dtype=BRAIN)}, ValueError),
    ],
    ids=list("1234567"),
)
def test_what_does_not_go_together_is_refused(own, change, kind):
    cache, number = torch.zeros(2, 1, 8, 16), torch.ones(2, dtype=torch.int64)
    whole = {"q": torch.zeros(2, 1, 1, 16), "k_cache": cache, "v_cache": cache} | change
    with pytest.raises(kind):
        own.attend(whole["q"], number, (None, number), whole["k_cache"], whole["v_cache"])


@pytest.mark.parametrize(
    "wrong",
    [torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.int64), torch.ones(4, dtype=torch.int64)[::2]],
    ids=["shorter numbers", "fewer", "apart"],
)
@pytest.mark.parametrize("name", ["slots", "low", "high"])
def test_what_is_told_of_rows_is_int64_one_behind_the_other(own, name, wrong):
    cache, number = torch.zeros(2, 1, 8, 16), torch.ones(2, dtype=torch.int64)
    told = {"slots": number, "low": number, "high": number} | {name: wrong}
    with pytest.raises((TypeError, ValueError), match="what rows see"):
        own.attend(torch.zeros(2, 1, 1, 16), told["slots"], (told["low"], told["high"]), cache, cache)


@pytest.fixture
def both(own, monkeypatch):
    """Torch's attention and our own."""
    monkeypatch.setattr(native_library, "load_library", lambda: (own.compiled, ""))
    monkeypatch.delenv(native_library.SWITCH, raising=False)
    return CpuKernels(FLOAT, own=False), CpuKernels(FLOAT)


SEGMENTS = (Segment(2, 300, 9), Segment(0, 0, 5), Segment(1, 127, 2))


def test_a_step_attends_as_torch_does(both):
    q, *caches = case(2, 3, 40)
    found = []
    for kernels in both:
        batch = Batch(32, CPU)
        batch.load(Step(SEGMENTS, 32), None)
        kernels.prepare_step(batch)
        found.append(kernels.attend(q[:32].contiguous(), *caches, batch)[:16])
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mask", [AttentionMask(), AttentionMask(True), AttentionMask(True, 70), AttentionMask(window=9)]
)
def test_blocks_attend_as_torch_does(both, mask):
    q, *caches = case(2, 3, 40)
    found = []
    for kernels in both:
        batch = BlockBatch(32, CPU)
        batch.before = (17, 0, 120)
        batch.load(Step(SEGMENTS, 32), None)
        kernels.prepare_step(batch)
        found.append(kernels.attend_block(q[:32].contiguous(), *caches, batch, mask)[:16])
    assert torch.allclose(*found, rtol=1e-4, atol=1e-5)


def test_rows_that_no_cache_has_are_refused(both):
    _, kernels = both
    q, *caches = case(1, 1, 16)
    batch = Batch(16, CPU)
    batch.load(Step((Segment(3, 0, 1),), 16), None)
    kernels.prepare_step(batch)
    with pytest.raises(IndexError, match="3 slots of 512 rows"):
        kernels.attend(q[:16].contiguous(), *caches, batch)

"""Tests of the operations on rows between products, in C: they are right, and have the same bits with any other rows,
in any instructions.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native import native_library
from adapters.models.kernels.cpu.native.rows import NativeRows, PreparedHeads
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch

FLOAT, BRAIN, CPU = torch.float32, torch.bfloat16, torch.device("cpu")
SLOTS, CAPACITY = 3, 64
SEGMENTS = (Segment(2, 5, 3), Segment(0, 60, 4), Segment(1, 0, 1))


@pytest.fixture(scope="module")
def own(native_code):
    return NativeRows(native_code, native_code.level)


def levels(own):
    return [evolve(own, level=level) for level in range(own.compiled.level + 1)]


def random(*shape, seed=1, dtype=FLOAT):
    return torch.randn(shape, generator=make_generator(seed)).to(dtype)


def same(found, expected):
    return torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("dtype", "weighted"), [(FLOAT, FLOAT), (BRAIN, BRAIN), (BRAIN, FLOAT)])
@pytest.mark.parametrize("width", [320, 64, 37, 5])
def test_a_norm_is_right_and_a_row_of_it_its_own(own, two_threads, dtype, weighted, width):
    residual, delta = random(100, width, dtype=dtype), random(100, width, seed=2, dtype=dtype)
    weight, total = random(width, seed=3, dtype=weighted), residual + delta
    exact = torch.rms_norm(total.double(), (width,), weight.double(), 1e-6)
    alone = torch.cat([own.add_norm(row, None, weight, 1e-6) for row in total.split(1)])
    assert torch.allclose(alone.double(), exact, rtol=2e-6 if dtype is FLOAT else 2**-8, atol=1e-9)
    for each in levels(own):
        for rows in (1, 3, 17, 100):
            into = residual[:rows].clone()
            assert same(each.add_norm(into, delta[:rows], weight, 1e-6), alone[:rows])
            assert same(into, total[:rows]), "rounded as torch rounds it"


def test_a_row_that_is_no_number_stays_alone(own):
    x, weight = random(20, 64), torch.ones(64)
    clean = own.add_norm(x, None, weight, 1e-6)
    x[3, 5] = torch.nan
    found = own.add_norm(x, None, weight, 1e-6)
    assert found[3].isnan().all()
    assert same(found[4:], clean[4:])


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"delta": torch.zeros(2, 9)}, ValueError),
        ({"delta": torch.zeros(2, 8, dtype=BRAIN)}, TypeError),
        ({"weight": torch.zeros(9)}, ValueError),
        ({"weight": torch.zeros(8, dtype=BRAIN)}, TypeError),
        ({"residual": torch.zeros(8, 2).t()}, ValueError),
        ({"residual": torch.zeros(2, 8, dtype=torch.float16), "delta": None}, TypeError),
    ],
    ids=str,
)
def test_what_cannot_be_normed_is_refused(own, change, kind):
    whole = {"residual": torch.zeros(2, 8), "delta": torch.zeros(2, 8), "weight": torch.zeros(8)} | change
    with pytest.raises(kind):
        own.add_norm(*whole.values(), 1e-6)


def batch_of(kernels, *segments, bucket=16):
    batch = Batch(bucket, CPU)
    batch.load(Step(segments, bucket), torch.arange(sum(one.count for one in segments)))
    kernels.prepare_step(batch)
    return batch


def prep_of(kind, heads, head, dtype):
    norms = {} if "plain" in kind else {"q_norm": random(head, seed=4, dtype=dtype), "k_norm": random(head, seed=5)}
    return HeadPrep(bias=random(heads * head, seed=6, dtype=dtype) if "bias" in kind else None, eps=1e-6, **norms)


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
@pytest.mark.parametrize(
    "case",
    [
        ((4, 2, 16), 8, "norm"),
        ((5, 1, 64), 32, "bias, plain"),
        ((2, 2, 24), 4, "norm, bias"),
        ((3, 1, 40), 20, "plain"),
    ],
    ids=str,
)
def test_heads_are_what_torch_makes_of_them(own, monkeypatch, dtype, case):
    (queries, kv, head), turned, kind = case
    monkeypatch.setattr(native_library, "load_library", lambda: (own.compiled, ""))
    monkeypatch.delenv(native_library.SWITCH, raising=False)
    heads, angles = queries + 2 * kv, random(CAPACITY, turned, seed=7)
    rope, prep = Rope(angles.cos(), angles.sin()), prep_of(kind, heads, head, dtype)
    projected = random(16, heads * head + 8, seed=8, dtype=dtype)[:, : heads * head]  # columns of a wider tensor
    found = []
    for kernels in (CpuKernels(dtype, own=False), CpuKernels(dtype)):
        caches = [torch.full((SLOTS, kv, CAPACITY, head), 7.0, dtype=dtype) for _ in "kv"]
        batch = batch_of(kernels, *SEGMENTS)
        found.append((kernels.rotate_store(projected, prep, rope, batch, *caches)[:8], *caches))
    for theirs, ours in zip(*found, strict=True):
        assert torch.allclose(ours.double(), theirs.double(), rtol=2**-7 if dtype is BRAIN else 1e-5, atol=1e-5)
    written = torch.zeros(SLOTS, CAPACITY, dtype=torch.bool)
    for slot, start, count in ((one.slot, one.start, one.count) for one in SEGMENTS):
        written[slot, start : start + count] = True
    for cache in found[1][1:]:
        assert (cache.movedim(2, 1)[~written] == 7).all(), "padded rows are kept nowhere"
    assert same(found[1][2], found[0][2]), "values are rounded, and no more"


def test_bits_of_heads_are_the_same_in_any_instructions_and_beside_any_rows(own):
    weight, rope = random(6, 16), Rope(random(CAPACITY, 8, seed=2).cos(), random(CAPACITY, 8, seed=3).sin())
    projected, heads = random(48, 8 * 16, seed=4), PreparedHeads(random(8, 16, seed=5), weight, True, 1e-6)
    slots, positions = torch.arange(48) % SLOTS, torch.arange(48)
    every = []
    for each in levels(own):
        caches = [torch.zeros(SLOTS, 2, CAPACITY, 16) for _ in "kv"]
        whole = each.prepare_heads(projected, heads, rope, (slots, positions), *caches)
        alone = [torch.zeros(SLOTS, 2, CAPACITY, 16) for _ in "kv"]
        for row in range(48):
            at = slice(row, row + 1)
            q = each.prepare_heads(projected[at], heads, rope, (slots[at], positions[at]), *alone)
            assert same(q, whole[at])
        assert all(same(one, other) for one, other in zip(caches, alone, strict=True))
        every.append((whole, *caches))
    for other in every[1:]:
        assert all(same(one, two) for one, two in zip(every[0], other, strict=True))


@pytest.mark.parametrize("segment", [Segment(3, 0, 1), Segment(0, 62, 3)], ids=str)
def test_rows_that_no_cache_has_are_refused_before_anything_is_written(own, monkeypatch, segment):
    monkeypatch.setattr(native_library, "load_library", lambda: (own.compiled, ""))
    monkeypatch.delenv(native_library.SWITCH, raising=False)
    kernels, angles = CpuKernels(FLOAT), torch.zeros(CAPACITY, 8)
    caches = [torch.zeros(SLOTS, 1, CAPACITY, 16) for _ in "kv"]
    with pytest.raises(IndexError, match="3 slots of 64 rows"):
        kernels.rotate_store(torch.zeros(16, 48), HeadPrep(), Rope(angles, angles), batch_of(kernels, segment), *caches)


def test_caches_and_heads_of_other_shapes_are_refused(own):
    rope, at = Rope(torch.zeros(4, 8), torch.zeros(4, 8)), (torch.zeros(1, dtype=torch.int64),) * 2
    caches, heads = [torch.zeros(1, 1, 4, 16) for _ in "kv"], PreparedHeads(None, torch.ones(2, 16), False, 0.0)
    assert own.prepare_heads(torch.zeros(1, 48), heads, rope, at, *caches).shape == (1, 1, 16)
    for wrong in (torch.zeros(1, 64), torch.zeros(1, 50), torch.zeros(1, 16)):
        with pytest.raises(ValueError, match=r"columns|heads"):
            own.prepare_heads(wrong, heads, rope, at, *caches)
    for numbers, kept in ((torch.float16, FLOAT), (FLOAT, torch.float16)):
        with pytest.raises(TypeError, match="cache"):
            own.prepare_heads(torch.zeros(1, 48, dtype=numbers), heads, rope, at, *(cache.to(kept) for cache in caches))
    turned = caches[1].transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="caches"):
        own.prepare_heads(torch.zeros(1, 48), heads, rope, at, caches[0], turned)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("bias", torch.zeros(2, 16)),
        ("bias", torch.zeros(3, 16, dtype=BRAIN)),
        ("weight", torch.ones(2, 16, dtype=BRAIN)),
        ("weight", torch.ones(16, 2).t()),
        ("rope", Rope(torch.zeros(4, 8), torch.zeros(3, 8))),
        ("rope", Rope(torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.float64))),
        ("rope", Rope(torch.zeros(4, 16)[:, ::2], torch.zeros(4, 8))),
        ("at", (torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int32))),
        ("at", (torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))),
        ("at", (torch.zeros(2, dtype=torch.int64)[:1], torch.zeros(2, 2, dtype=torch.int64)[:, 0])),
        ("v_cache", torch.zeros(1, 1, 4, 16, dtype=BRAIN)),
        ("v_cache", torch.zeros(1, 1, 2, 16).as_strided((1, 1, 2, 16), (64, 64, 16, 1))),
    ],
)
def test_what_the_library_would_read_or_write_beside_is_refused(own, name, wrong):
    number = torch.zeros(1, dtype=torch.int64)
    whole = {
        "bias": torch.zeros(3, 16),
        "weight": torch.ones(2, 16),
        "at": (number, number),
        "rope": Rope(torch.zeros(4, 8), torch.zeros(4, 8)),
        "v_cache": torch.zeros(1, 1, 4, 16),
    }

    def prepare(bias, weight, rope, at, v_cache):
        heads = PreparedHeads(bias, weight, False, 0.0)
        return own.prepare_heads(torch.zeros(1, 48), heads, rope, at, torch.zeros(1, 1, 4, 16), v_cache)

    assert prepare(**whole).shape == (1, 1, 16)
    with pytest.raises((TypeError, ValueError)):
        prepare(**whole | {name: wrong})

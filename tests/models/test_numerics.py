"""The numerics probe finds what agrees, and really finds what does not."""

from __future__ import annotations

import json

import pytest
import torch

from adapters.models.config import Qwen3Config
from adapters.models.kernels.torch_cpu import CpuKernels
from adapters.models.numerics import Numerics, boundaries, probe, probe_key

CPU = torch.device("cpu")
CONFIG = Qwen3Config(256, 64, 128, 4, 4, 2, 16, 4096, 1e6)


def measure(kernels, dtype=torch.float32, chunk=64, capacity=1024, config=CONFIG):
    return probe(config, kernels, device=CPU, dtype=dtype, chunk=chunk, capacity=capacity)


class Mutant(CpuKernels):
    """Kernels with one flaw; `fresh` keeps it."""

    def __init__(self):
        super().__init__(torch.float32)

    def fresh(self):
        return type(self)()


def sums_in_halves(x, linear, packed):
    half = x.shape[1] // 2
    left, right = x.clone(), x.clone()
    left[:, half:], right[:, :half] = 0, 0
    return linear(left, packed) + linear(right, packed)


def splits_at(*rungs):
    class Splitting(Mutant):
        def linear(self, x, packed):
            if len(x) in rungs:
                return sums_in_halves(x, super().linear, packed)
            return super().linear(x, packed)

    return Splitting()


class FavoursItsFirstRow(Mutant):
    def linear(self, x, packed):
        found = super().linear(x, packed)
        found[0] = sums_in_halves(x[:1], super().linear, packed)[0]
        return found


class ShortSpans(Mutant):
    kv_tile = 8  # softmax takes 16 keys at a time


class SeesItsNeighbours(Mutant):
    def gated(self, x, packed):
        return super().gated(x + x.abs().sum() * 1e-7, packed)


class ForgetsFarKeys(Mutant):
    """Wrong only where a key tile ends: one value of the tile before is lost to small rungs."""

    def attend(self, q, k_cache, v_cache, batch):
        if batch.rung < 64 and any(segment.start >= self.kv_tile for segment in batch.segments):
            v_cache = v_cache.clone()
            v_cache[:, :, self.kv_tile - 1] = 0
        return super().attend(q, k_cache, v_cache, batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_cpu_kernels_are_a_proven_ladder(dtype):
    found = measure(CpuKernels(dtype), dtype)
    assert (found.mode, found.rungs, found.grain, found.chunk) == ("ladder", (4, 8, 16, 32, 64), 64, 64)
    assert found.failures == ()
    assert found.batch_rows == 64
    assert found.checks > 50
    assert found.threads == torch.get_num_threads()


def test_a_kernel_that_sums_differently_at_one_rung_loses_that_rung():
    found = measure(splits_at(16))
    assert (found.mode, found.rungs, found.grain) == ("ladder", (4, 8, 32, 64), 64)
    assert len(found.failures) == 1
    assert found.failures[0].startswith("rung 16: rows ")


def test_a_ladder_without_its_lowest_rung_starts_at_the_next():
    assert measure(splits_at(4)).rungs == (8, 16, 32, 64)


@pytest.mark.parametrize("mutant", [splits_at(4, 8, 16, 32), splits_at(64), FavoursItsFirstRow(), SeesItsNeighbours()])
def test_kernels_that_cannot_be_trusted_end_in_a_grid_of_whole_chunks(mutant):
    found = measure(mutant)
    assert found.mode == "grid"
    assert found.grain == found.chunk == found.rungs[-1] == 64
    assert found.batch_rows == found.rungs[0]
    assert found.failures


def test_a_grid_decodes_at_a_width_where_rows_are_their_own():
    assert measure(splits_at(64)).rungs == (4, 64)
    assert measure(SeesItsNeighbours()).rungs == (64,)


def test_key_spans_that_are_not_whole_tiles_are_noticed():
    found = measure(ShortSpans(), capacity=1000)
    assert found.mode == "grid"


def test_a_flaw_beyond_the_first_key_tile_is_noticed():
    found = measure(ForgetsFarKeys())
    assert found.rungs == (64,) or found.mode == "grid"
    assert all("rows 2" in failure for failure in found.failures)


def test_the_fingerprint_is_of_the_bits_and_not_of_this_instance():
    first = measure(CpuKernels(torch.float32)).numerics_class
    assert measure(CpuKernels(torch.float32), chunk=128, capacity=600).numerics_class == first
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert measure(CpuKernels(torch.float32)).numerics_class == first
    finally:
        torch.set_num_threads(threads)
    assert measure(SeesItsNeighbours()).numerics_class != first
    assert measure(CpuKernels(torch.bfloat16), torch.bfloat16).numerics_class != first


def test_a_context_shorter_than_the_chunk_is_probed_too():
    assert measure(CpuKernels(torch.float32), chunk=256, capacity=100).mode == "ladder"
    assert measure(CpuKernels(torch.float32), chunk=4, capacity=100).rungs == (4,)


def test_an_outcome_can_be_kept_and_read_again():
    found = measure(splits_at(16))
    assert Numerics.from_json(found.to_json()) == found
    assert json.loads(json.dumps(found.shown()))["rungs"] == [4, 8, 32, 64]


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"rungs": []},
        {"rungs": [8, 4]},
        {"rungs": [4, 8]},
        {"mode": "maybe"},
        {"chunk": "64"},
        {"more": 1},
    ],
)
def test_an_outcome_that_was_not_ours_is_refused(change):
    text = json.dumps({**json.loads(measure(CpuKernels(torch.float32)).to_json()), **change})
    with pytest.raises(ValueError, match="numerics probe"):
        Numerics.from_json(text)


def test_an_outcome_is_kept_under_what_it_depends_on():
    where = {"device": CPU, "dtype": torch.float32, "chunk": 64, "capacity": 1024}
    key = probe_key(CONFIG, CpuKernels(torch.float32), **where)
    assert key == probe_key(CONFIG, CpuKernels(torch.float32), **where)
    assert key != probe_key(CONFIG, CpuKernels(torch.float32), **{**where, "chunk": 128})
    assert key != probe_key(CONFIG, CpuKernels(torch.bfloat16), **{**where, "dtype": torch.bfloat16})


def test_boundaries_are_all_tiles_or_spread_over_them():
    assert boundaries(512, 2000) == [512, 1024, 1536]
    assert boundaries(512, 511) == []
    spread = boundaries(64, 64 * 1000)
    assert len(spread) == 16
    assert (spread[0], spread[-1]) == (64, 64000)
    assert all(at % 64 == 0 for at in spread)

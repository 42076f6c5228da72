"""The numerics probe finds what agrees, and really finds what does not."""

from __future__ import annotations

import json
import math
from functools import cache

import pytest
import torch
from attrs import evolve

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.families.qwen3 import FAMILY, Qwen3Config
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.interfaces.attention_rule import PLAIN
from adapters.models.kernels.interfaces.product_list import Weight, list_spans, span_of
from adapters.models.numerics.layer_bench import boundaries
from adapters.models.numerics.probe import ProbeShape, probe, probe_key
from adapters.models.numerics.probe_result import Numerics, describe_machine
from adapters.models.numerics.synthetic import laid_out

pytestmark = pytest.mark.usefixtures("two_threads")
CPU = torch.device("cpu")
CONFIG = Qwen3Config(256, 64, 128, 4, 4, 2, 16, 4096, 1e6)


def measure(kernels, dtype=torch.float32, chunk=64, capacity=1024, config=CONFIG):
    return probe(FAMILY, config, kernels, ProbeShape(device=CPU, dtype=dtype, chunk=chunk, capacity=capacity))


class Mutant(CpuKernels):
    """Kernels with one flaw, which `using` keeps; in float32 by oneDNN, so that there is nothing to choose."""

    def __init__(self, plan=None):
        super().__init__(torch.float32, plan, own=False)

    def with_plan(self, plan):
        return type(self)(plan)


@cache
def measure_once(build, *args):
    """Return the outcome for kernels that `build` makes. Tests that only read it share it."""
    return measure(build(*args))


@cache
def measure_own(dtype):
    """Return the outcome for the kernels that serve."""
    return measure(CpuKernels(dtype), dtype)


def in_halves(x, weight, multiply):
    """The same sum in another order."""
    half = x.shape[1] // 2
    left, right = x.clone(), x.clone()
    left[:, half:], right[:, :half] = 0, 0
    return multiply(left, weight) + multiply(right, weight)


def splits_at(*rows):
    """Sums cut by M, as by oneDNN's AMX kernels."""

    class Splitting(Mutant):
        def multiply(self, x, weight):
            return in_halves(x, weight, super().multiply) if len(x) in rows else super().multiply(x, weight)

    return Splitting()


class SplitsByColumns(Mutant):
    """Sums cut by N: scores over many keys."""

    def multiply(self, x, weight):
        many = weight.shape[0] > 600 and not weight.is_mkldnn
        return in_halves(x, weight, super().multiply) if many else super().multiply(x, weight)


class SplitsByThreads(Mutant):
    def multiply(self, x, weight):
        alone = torch.get_num_threads() == 1
        return in_halves(x, weight, super().multiply) if alone else super().multiply(x, weight)


class SplitsLongSums(Mutant):
    """Sums cut by K: how many values there are decides where."""

    def multiply(self, x, weight):
        plain = weight.shape[0] == 16 and x.shape[1] in (512, 1024)
        return in_halves(x, weight, super().multiply) if plain else super().multiply(x, weight)


class FavoursItsFirstRow(Mutant):
    def multiply(self, x, weight):
        found = super().multiply(x, weight)
        found[0] = in_halves(x[:1], weight, super().multiply)[0]
        return found


class LeaksWhatIsNoNumber(Mutant):
    """A product with the fault of oneDNN issue 5717: a NaN in one row, such as a padded one, reaches the other rows."""

    def multiply(self, x, weight):
        return super().multiply(x, weight) + x.sum() * 0


class SeesItsNeighbours(Mutant):
    def multiply_gated(self, x, gate, up):
        return super().multiply_gated(x + x.abs().sum() * 1e-7, gate, up)


class ForgetsFarKeys(Mutant):
    """Beyond products, where only the whole layer tells: one value of the tile before is lost to small buckets."""

    def attend(self, q, k_cache, v_cache, batch, rule=PLAIN):
        if batch.bucket < 64 and any(segment.start >= self.kv_tile for segment in batch.segments):
            v_cache = v_cache.clone()
            v_cache[:, :, self.kv_tile - 1] = 0
        return super().attend(q, k_cache, v_cache, batch, rule)


class TwoKinds(Qwen3Config):
    """A model whose second layer seems to be of another kind: it gets hidden states, and has the head behind it."""

    def list_probed_layers(self):
        [(small, first)] = super().list_probed_layers()
        return ((small, first), (small, range(1, 2)))


def test_every_kind_of_layer_is_probed_and_each_has_to_hold():
    config = TwoKinds(256, 64, 128, 4, 4, 2, 16, 4096, 1e6)
    where = {"device": CPU, "dtype": torch.float32, "chunk": 64, "capacity": 1024}
    plain = CpuKernels(torch.float32, own=False)
    one, both = measure(plain), probe(FAMILY, config, plain, ProbeShape(**where))
    assert (both.mode, both.spans) == ("buckets", 2 * one.spans)
    assert both.numerics_class.rpartition("-")[2] not in one.numerics_class

    def build(own, weights, kernels, placement, *, cpu_experts):
        used = ForgetsFarKeys().with_plan(kernels._plan) if placement.layers.start else kernels  # noqa: SLF001
        return DenseShard(own, weights, used, placement)

    found = probe(evolve(FAMILY, build=build), config, plain, ProbeShape(**where))
    assert (found.mode, found.buckets) == ("grid", (4, 64))
    assert any("differ from a chunk" in why for why in found.failures)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_product_of_the_cpu_kernels_can_be_proven_here(dtype):
    found = measure_own(dtype)
    assert (found.mode, found.buckets, found.block_size, found.chunk) == ("buckets", (4, 8, 16, 32, 64), 64, 64)
    assert found.batch_rows == 64
    assert found.checks > 400
    assert found.shapes > 50
    assert found.threads == torch.get_num_threads()
    assert {served.weight for served in found.plan.weights} == {
        Weight(128, 64), Weight(64, 64), Weight(128, 64, gated=True), Weight(64, 128), Weight(256, 64),
    }  # fmt: skip


def test_row_counts_that_sum_differently_are_left_out_and_steps_of_them_multiply_in_others():
    found, as_it_is = measure_once(splits_at, 16), measure_once(splits_at)
    assert (found.mode, found.buckets) == ("buckets", (4, 8, 16, 32, 64))
    for served in found.plan.weights:
        if not served.weight.gated:
            assert 16 not in served.rows or served.rows == (16,)
            assert {served.piece_rows(rows) for rows in found.buckets} <= set(served.rows)
    assert 16 not in found.plan.heads[0].rows
    assert found.numerics_class != as_it_is.numerics_class


def test_decoding_is_padded_where_its_row_counts_agree_with_nothing():
    served = measure(splits_at(4, 8)).plan.weights[0]
    if served.rows == (4, 8):  # as good, where multiplying so many rows in fours is quick
        assert served.piece_rows(64) in {4, 8}
    else:
        assert served.rows[0] == served.piece_rows(4) == 16, (
            "16, and what of 32 and 64 agrees with it on this processor"
        )
        assert served.piece_rows(64) == served.wide


@pytest.mark.parametrize(
    "mutant", [FavoursItsFirstRow, SeesItsNeighbours, LeaksWhatIsNoNumber], ids=lambda one: one.__name__
)
def test_kernels_that_cannot_be_trusted_end_in_a_grid_of_whole_chunks(mutant):
    found = measure_once(mutant)
    assert (found.mode, found.plan) == ("grid", None)
    assert found.block_size == found.chunk == found.buckets[-1] == 64
    assert found.batch_rows == found.buckets[0]
    assert found.failures


def test_a_neighbour_that_is_not_a_number_is_named():
    failures = measure_once(LeaksWhatIsNoNumber).failures
    assert any("a neighbour that is not a number" in failure for failure in failures)


def test_a_grid_decodes_at_a_width_where_rows_are_their_own():
    assert measure_once(SeesItsNeighbours).buckets == (64,)


def test_sums_over_keys_that_depend_on_how_many_there_are_end_in_a_grid():
    found = measure(SplitsByColumns())
    assert found.mode == "grid"
    assert any("keys differ" in failure for failure in found.failures)


def test_values_are_added_up_in_pieces_whose_length_changes_nothing():
    # two halves of 512 are the sums of 256 that a shorter span has; those of 1024 are not
    assert measure(SplitsLongSums()).plan.heads[0].terms <= 512


def test_thread_counts_that_differ_do_not_serve_together():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = measure(SplitsByThreads())
        assert found.plan.threads == (2, 2)
        assert any("threads" in failure for failure in found.failures)
        torch.set_num_threads(3)
        assert measure(SplitsByThreads()).numerics_class != found.numerics_class
        assert measure(splits_at()).plan.threads == (1, 3)
    finally:
        torch.set_num_threads(threads)


def test_a_flaw_outside_of_products_is_noticed_by_the_whole_layer():
    found = measure(ForgetsFarKeys())
    assert found.buckets == (64,) or found.mode == "grid"
    assert any("rows 2" in failure for failure in found.failures)


def test_the_class_is_of_the_bits_and_the_shapes_and_not_of_this_instance():
    first = measure_once(splits_at)
    assert measure(splits_at()).numerics_class == first.numerics_class
    shorter = measure(splits_at(), capacity=600)
    same = shorter.plan.bit_signature() == first.plan.bit_signature()
    assert (shorter.numerics_class == first.numerics_class) == same
    assert measure(splits_at(), chunk=128).numerics_class != first.numerics_class, "other shapes serve"
    assert measure(splits_at(*first.plan.weights[0].rows[:1])).numerics_class != first.numerics_class
    assert measure_own(torch.bfloat16).numerics_class != first.numerics_class


def test_what_a_user_sets_for_the_libraries_is_part_of_the_class(monkeypatch):
    classes = set()
    for cap in ("AVX2", "AVX512_CORE"):
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", cap)
        classes.add(describe_machine(CpuKernels(torch.float32), CPU))
    monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    classes.add(describe_machine(CpuKernels(torch.float32), CPU))
    assert len(classes) == 3


def test_the_outcome_does_not_depend_on_how_long_it_took(monkeypatch):
    first = measure_once(splits_at)
    seconds = iter(range(10**9))
    monkeypatch.setattr("time.perf_counter", lambda: float(next(seconds)))
    slow = measure(splits_at())
    assert (slow.buckets, slow.checks, slow.shapes, slow.spans) == (
        first.buckets,
        first.checks,
        first.shapes,
        first.spans,
    )
    assert slow.numerics_class == first.numerics_class


def test_a_context_shorter_than_the_chunk_is_probed_too():
    assert measure(CpuKernels(torch.float32), chunk=256, capacity=100).mode == "buckets"
    assert measure(CpuKernels(torch.float32), chunk=4, capacity=100).buckets == (4,)


def test_spans_are_few_whole_tiles_and_hold_all_keys():
    for capacity in (256, 1024, 5120, 8192, 40960):
        found = list_spans(capacity)
        assert all(span % 256 == 0 for span in found)
        assert len(found) <= 8 * math.log2(capacity / 128)
        for keys in range(1, capacity + 1, 37):
            assert span_of(keys, capacity) in found
            assert keys <= span_of(keys, capacity) <= max(keys * 1.125 + 256, 256)


def test_an_outcome_can_be_kept_and_read_again():
    found = measure_once(splits_at, 16)
    assert Numerics.from_json(found.to_json()) == found
    shown = json.loads(json.dumps(found.build_report()))
    assert shown["buckets"] == [4, 8, 16, 32, 64]
    assert shown["probe"]["products"] == found.shapes
    assert shown["products"][0].startswith("64 to 128: float32, rows ")


@pytest.fixture(scope="module")
def outcome():
    return measure_own(torch.float32)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 99},
        {"buckets": []},
        {"buckets": [8, 4]},
        {"buckets": [4, 8]},
        {"mode": "maybe"},
        {"chunk": "64"},
        {"more": 1},
        {"plan": {"steps": [4]}},
        {"plan": {"steps": [4], "threads": [1, 1], "weights": [], "heads": [{"rows": []}]}},
    ],
)
def test_an_outcome_that_was_not_ours_is_refused(change, outcome):
    text = json.dumps({**json.loads(outcome.to_json()), **change})
    with pytest.raises(ValueError, match="numerics probe"):
        Numerics.from_json(text)


def test_an_outcome_is_kept_under_what_it_depends_on():
    where = {"device": CPU, "dtype": torch.float32, "chunk": 64, "capacity": 1024}
    key = probe_key(FAMILY, CONFIG, CpuKernels(torch.float32), ProbeShape(**where))
    assert key == probe_key(FAMILY, CONFIG, CpuKernels(torch.float32), ProbeShape(**where))
    assert key != probe_key(FAMILY, CONFIG, CpuKernels(torch.float32), ProbeShape(**{**where, "chunk": 128}))
    assert key != probe_key(
        FAMILY, CONFIG, CpuKernels(torch.bfloat16), ProbeShape(**{**where, "dtype": torch.bfloat16})
    )


def test_boundaries_are_all_tiles_or_spread_over_them():
    assert boundaries(512, 2000) == [512, 1024, 1536]
    assert boundaries(512, 511) == []
    spread = boundaries(64, 64 * 1000)
    assert len(spread) == 16
    assert (spread[0], spread[-1]) == (64, 64000)
    assert all(at % 64 == 0 for at in spread)


def test_a_probed_layer_is_packed_in_every_way_that_some_layer_of_the_model_is() -> None:
    four, eight, table = StepLayout("uint4", 32), StepLayout("int8", 32), StepLayout("iq4", 32)
    ways = {"model.layers.0.mlp.down_proj.weight": eight, "model.layers.3.mlp.down_proj.weight": four}
    ways |= {"model.layers.7.mlp.down_proj.weight": eight, "model.layers.3.self_attn.v_proj.weight": table}
    down, value = "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.v_proj.weight"
    found = laid_out([down, value, "model.layers.0.input_layernorm.weight"], ways | {"lm_head.weight": four})
    assert found == [{down: eight, value: table}, {down: four, value: table}]
    assert laid_out([down], {}) == [{}]

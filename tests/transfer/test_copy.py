"""Runs between host memory and slots: bit for bit, any part of them, from several threads at once."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from adapters.models.decoder.cache.kv_cache import PagedKvCache
from adapters.models.kernels.step import Segment, Step
from adapters.sequence_layout import RowSpec, dtype_name
from adapters.store.files.file_format import Layout
from adapters.store.slab_memory import SlabMemory
from adapters.transfer.copy_rows import NO_CUDA_EVENTS, RowMover, StateMover, create_movers, record_cuda_events
from adapters.transfer.strided_copy import Box, BoxSide, copy_box, make_box_side
from effects.ids import PAGE
from tests.device.fake_shard import FakeShard
from tests.models.recurrent_shard import RecurrentShard

LAYERS, SLOTS, HEADS, CAPACITY, WIDTH = 3, 2, 2, 96, 8
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda])]


class Named:
    """Slots behind names only, as on another machine."""

    is_addressable = False

    def __init__(self, device: str, dtype: torch.dtype, layers: range = range(LAYERS), parts: str = "kv") -> None:
        self.spec = rows_of(dtype, layers, parts)
        self.all = torch.randn(len(layers), len(parts), SLOTS, HEADS, CAPACITY, WIDTH).to(dtype).to(device)

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        return dict(zip(self.spec.names, self.all[:, :, slot].flatten(0, 1), strict=True))

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        raise AssertionError("rows go by their names")

    def export(self, slot: int, start: int, stop: int) -> dict[str, torch.Tensor]:
        return {name: one[:, start:stop].cpu() for name, one in self.tensors(slot).items()}

    def import_runs(self, slot: int, runs: list[tuple[int, torch.Tensor]], keep: list[object]) -> None:
        for start, rows in runs:
            for one, own in zip(self.tensors(slot).values(), rows, strict=True):
                one[:, start : start + own.shape[1]] = own


class Direct(Named):
    """Slots that can be reached where they are."""

    is_addressable = True

    def view(self, slot: int, start: int, stop: int) -> torch.Tensor:
        return self.all[:, :, slot, :, start:stop]


def rows_of(dtype: torch.dtype, layers: range = range(LAYERS), parts: str = "kv") -> RowSpec:
    return RowSpec(tuple(f"layers.{n}.{part}" for n in layers for part in parts), HEADS, WIDTH, dtype_name(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("parts", ["kv", "k"], ids=["keys and values", "rows that are both"])
def test_a_run_comes_back_bit_for_bit(device: str, dtype: torch.dtype, parts: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    slots, layout = Direct(device, dtype, parts=parts), rows_of(dtype, parts=parts)
    mover, memory = RowMover(slots, layout), SlabMemory(1 << 20, pin=device == "cuda")
    truth, other = slots.view(0, 16, 80).clone(), slots.all[:, :, 1].clone()
    assert mover.is_addressable
    buffer = memory.allocate(64 * layout.token_bytes)
    mover.copy_out(0, (16, 80), buffer.data)
    for start, stop in ((16, 80), (16, 32), (64, 80), (31, 50)):
        slots.all[:, :, 0] = 7
        # as the lane does it: its earlier work, here the sevens, comes first
        mover.copy_in(0, (start, stop), buffer.data, 16, record_cuda_events([torch.device(device)]))
        assert torch.equal(slots.view(0, start, stop), truth[..., start - 16 : stop - 16, :])
        assert bool((slots.view(0, 0, start) == 7).all())
        assert bool((slots.view(0, stop, CAPACITY) == 7).all())
    assert torch.equal(slots.all[:, :, 1], other), "another slot's"


@pytest.mark.parametrize("device", DEVICES)
def test_several_runs_at_once(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    slots, layout = Direct(device, torch.bfloat16), rows_of(torch.bfloat16)
    mover, memory, truth = RowMover(slots, layout), SlabMemory(1 << 20, pin=device == "cuda"), slots.all.clone()
    spans = [(slot, start, start + 16) for slot in range(SLOTS) for start in range(0, CAPACITY, 16)]
    buffers = [memory.allocate(16 * layout.token_bytes) for _ in spans]
    for (slot, start, stop), buffer in zip(spans, buffers, strict=True):
        mover.copy_out(slot, (start, stop), buffer.data)
    for after in (
        record_cuda_events([torch.device(device)]),
        NO_CUDA_EVENTS,
    ):  # the second time on new threads that know of no event
        slots.all.zero_()
        if device == "cuda":
            torch.cuda.synchronize()
        with ThreadPoolExecutor(6) as pool:
            moved = [
                pool.submit(mover.copy_in, slot, (start, stop), buffer.data, start, after)
                for (slot, start, stop), buffer in zip(spans, buffers, strict=True)
            ]
        assert all(future.result() is None for future in moved)
        assert torch.equal(slots.all, truth)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_a_run_over_several_pages_of_a_gpu(dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    names, rows = [f"layers.{number}" for number in range(LAYERS)], 3 * PAGE
    cache = PagedKvCache(names, (SLOTS, HEADS, rows, WIDTH), dtype=dtype, device=torch.device("cuda"), pages=7)
    cache.seat(0, 0, 0, (5, 1, 3))
    truth = cache.export(0, 0, rows)  # named as rows are
    for number, one in enumerate(truth.values()):
        one.copy_(torch.arange(one.numel()).view(one.shape) * 7 + number)
    cache.import_(0, 0, truth)

    mover, memory = RowMover(cache, cache.spec), SlabMemory(1 << 20, pin=True)
    begin, stop = PAGE - 32, 2 * PAGE + 16
    buffer = memory.allocate((stop - begin) * cache.spec.token_bytes)
    mover.copy_out(0, (begin, stop), buffer.data)
    cache.seat(1, 0, 0, (0, 6, 2))
    mover.copy_in(1, (PAGE, 2 * PAGE + 8), buffer.data, begin)
    found = cache.export(1, 0, rows)
    for name, one in truth.items():
        assert torch.equal(found[name][:, PAGE : 2 * PAGE + 8], one[:, PAGE : 2 * PAGE + 8])
        assert not found[name][:, :PAGE].any()
        assert not found[name][:, 2 * PAGE + 8 :].any()


def test_what_does_not_fit_into_a_box_is_not_copied() -> None:
    rows = torch.zeros(2, 2, 3, 4, 8)
    with pytest.raises(ValueError, match="does not go to"):
        copy_box(rows, rows)  # both in host memory
    assert make_box_side(rows).pitch == 4 * 8 * 4
    assert make_box_side(rows[..., 1:3, :]).height == 3
    for odd in (rows[..., :7], rows.transpose(2, 3), rows.transpose(0, 1)):
        with pytest.raises(ValueError, match="are no box"):
            make_box_side(odd)


def test_a_box_is_what_the_driver_takes() -> None:
    """`cuda.h`: of 64 bits, its two sides end to end, and three extents."""
    assert (ctypes.sizeof(BoxSide), ctypes.sizeof(Box)) == (88, 200)
    assert [getattr(BoxSide, name).offset for name, _ in BoxSide._fields_] == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80]


def test_slots_behind_names_get_the_same() -> None:
    direct, named = Direct("cpu", torch.float32), Named("cpu", torch.float32)
    layout, memory = rows_of(torch.float32), SlabMemory(1 << 20)
    one, other = RowMover(direct, layout), RowMover(named, layout)
    assert not other.is_addressable
    again, buffer = memory.allocate(32 * layout.token_bytes), memory.allocate(32 * layout.token_bytes)
    one.copy_out(1, (8, 40), buffer.data)
    other.send_runs(0, [((20, 40), buffer.data, 8)], [buffer])
    assert torch.equal(named.all[:, :, 0, :, 20:40], direct.view(1, 20, 40))
    other.send_runs(0, [((8, 40), buffer.data, 8)], [buffer])
    other.copy_out(0, (8, 40), again.data)
    assert torch.equal(buffer.data, again.data)


@pytest.mark.parametrize("device", DEVICES)
def test_a_split_moves_each_part_its_own_way_and_keeps_what_an_undivided_target_does(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    whole, layout, memory = Direct(device, torch.bfloat16), rows_of(torch.bfloat16), SlabMemory(1 << 20)
    near, far = Direct(device, torch.bfloat16, range(2)), Named("cpu", torch.bfloat16, range(2, LAYERS))
    near.all.copy_(whole.all[:2])
    far.all.copy_(whole.all[2:])
    one, two = memory.allocate(32 * layout.token_bytes), memory.allocate(32 * layout.token_bytes)
    (alone,), split = create_movers((whole,), layout), create_movers((near, far), layout)
    assert [mover.is_addressable for mover in split] == [True, False], "the part that can be reached keeps its fast way"
    alone.copy_out(1, (8, 40), one.data)
    for mover in split:
        mover.copy_out(1, (8, 40), two.data)
    assert torch.equal(one.data, two.data), "the reader need not know the writer"
    near.all.zero_()
    far.all.zero_()
    split[0].copy_in(0, (20, 40), one.data, 8, record_cuda_events([torch.device(device)]))  # behind the zeros
    split[1].send_runs(0, [((20, 40), one.data, 8)], [one])
    assert torch.equal(near.all[:, :, 0, :, 20:40], whole.all[:2, :, 1, :, 20:40])
    assert torch.equal(far.all[:, :, 0, :, 20:40], whole.all[2:, :, 1, :, 20:40].cpu())
    assert not near.all[:, :, 0, :, :20].any()


def test_parts_that_are_not_what_is_kept_are_refused_by_name() -> None:
    layout = rows_of(torch.float32)
    with pytest.raises(ValueError, match=r"layers\.2\.k is missing or not expected"):
        create_movers((Direct("cpu", torch.float32, range(2)),), layout)
    with pytest.raises(ValueError, match="their order is another one"):
        create_movers([Direct("cpu", torch.float32, one) for one in (range(1, 3), range(1))], layout)


def test_a_state_comes_from_the_parts_that_have_one_and_goes_back_to_them() -> None:
    plain, hybrid = FakeShard(), RecurrentShard(2, 64, (8,))
    for slot, tokens in enumerate(([3, 1, 4, 1, 5], [9, 2, 6])):
        hybrid.forward(Step((Segment(slot, 0, len(tokens)),), 8, rows_only=True), torch.tensor(tokens))
    layout = Layout("ab" * 16, 8, hybrid.rows.spec, state=hybrid.states.specs)
    mover, buffer = (
        StateMover((plain, hybrid), layout.state),
        SlabMemory().allocate(layout.compute_size("state", 0)),
    )
    mover.write(mover.export(0), buffer.data)
    before = hybrid.states.export(1)
    mover.copy_in(1, mover.stage(buffer.data), 0)
    after, truth = hybrid.states.export(1), hybrid.states.export(0)
    assert all(torch.equal(after[name], truth[name]) for name in truth)
    assert not any(torch.equal(before[name], truth[name]) for name in truth)

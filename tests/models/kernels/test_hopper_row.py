"""Kernels of Hopper's for a step of one row: the bits of those for more rows, without a GPU."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from attrs import evolve

from adapters.checkpoint.packed_matrix import MXFP4
from adapters.models.kernels.activations import CLAMPED, GATES, apply_gate
from adapters.models.kernels.interfaces.experts_interface import BiasedExpertsShape, Experts
from adapters.models.numerics.synthetic import random_matrix
from tests.models.kernels.cuda_numbers import unpack_for_cuda
from tests.models.kernels.gluon_machine import Descriptor, Pointer, block, launch, load_kernels
from tests.models.kernels.test_hopper_schedules import BF16, HOPPER, SPLIT, TILE, attend, normal
from tests.models.kernels.test_packed_sources import CPU, convert, multiply, triton_packed

row_experts = pytest.importorskip("adapters.models.kernels.cuda.rows.row_experts")

TRITON = "adapters.models.kernels.triton"
WINDOWS = (  # the position of the row, the window, heads of a key head, whether there are sinks, and rows of a page
    (300, 128, 8, True, 0),
    (255, 128, 8, True, 0),
    (256, 70, 4, False, 64),
    (5, 128, 8, True, 256),
    (383, 128, 8, False, 256),
    (-1, 128, 8, True, 0),
)


@pytest.fixture(scope="module")
def windows():
    return load_kernels(f"{HOPPER}.rows.window_row")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", WINDOWS, ids=str)
def test_a_row_of_a_window_has_the_bits_of_its_splits(windows, case):
    position, window, group, has_sinks, page = case
    slots, slot, kv, head, capacity = 2, 1, 2, 64, 512
    scale = head**-0.5 * 1.4426950408889634
    keys, values = (normal(slots, kv, capacity, head, seed=seed) for seed in (1, 2))
    for rows in (keys, values):  # behind the row, and before its window, anything may stand
        rows[slot, :, position + 1 :] = float("nan")
        rows[slot, :, : max(0, position - window + 1)] = float("nan")
    table, caches = torch.zeros(1, dtype=torch.int64), (keys, values)
    if page:
        count = capacity // page
        order = torch.randperm(slots * count, generator=torch.Generator().manual_seed(3))
        table = order.view(slots, count)
        caches = tuple(torch.empty(slots * count, kv, page, head, dtype=BF16) for _ in caches)
        for paged, rows in zip(caches, (keys, values), strict=True):
            paged[order] = rows.view(slots, kv, count, page, head).transpose(1, 2).flatten(0, 1)
    q = normal(1, kv * group, head, seed=9)
    sinks = torch.randn(kv * group, generator=torch.Generator().manual_seed(4))
    out = torch.full(q.shape, float("nan"), dtype=BF16)
    launch(
        windows.attend_window, (kv,), position + 1, Pointer(q),
        *(Descriptor(one.view(-1, head), (TILE, head)) for one in caches), Pointer(torch.tensor([slot])),
        Pointer(torch.tensor([position])), Pointer(table), Pointer(out), Pointer(sinks), capacity, scale,
        KV=kv, GROUP=group, SPLIT=SPLIT, TILES=3, PAGE=page, WINDOW=window, SINKS=has_sinks,
        PDL=True, num_warps=4,
    )  # fmt: skip
    if position < 0:
        assert not out.any()
        return
    for kv_head in range(kv):
        part = slice(kv_head * group, (kv_head + 1) * group)
        own = block(sinks[part]) if has_sinks else None
        k, v = (rows[slot, kv_head].nan_to_num() for rows in (keys, values))
        of_rows = torch.full((group,), position)
        expected = attend(q[0, part], k, v, of_rows, scale, window=window, sinks=own)
        assert torch.equal(out[0, part], expected)


WANTED = (2, 0, 1, 2)  # experts in the order in which the row wants them


@pytest.fixture
def on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of one row's experts run on the machine, which has no lanes: the row wants certain experts."""
    kernels, forms = (load_kernels(f"{HOPPER}.rows.row_experts"), load_kernels(f"{TRITON}.packed_levels"))
    monkeypatch.setattr(kernels, "find_wanted", lambda *_: tuple(map(torch.tensor, WANTED)))
    monkeypatch.setattr(kernels, "apply_gate", lambda gate, up, *_: apply_gate(CLAMPED, gate.to(BF16), up.to(BF16)))

    def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        body = getattr(kernels, kernel.fn.__name__)
        parameters = inspect.signature(body).parameters
        kept = {key: convert(one, forms) for key, one in options.items() if key in parameters}
        launch(body, grid, 0, *(convert(one, forms) for one in args), **kept)

    monkeypatch.setattr(row_experts, "launch", run)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.parametrize(("gate", "columns"), [(0, 832), (0, 1024), (GATES[CLAMPED], 832), (GATES[CLAMPED], 2304)])
@pytest.mark.usefixtures("on_the_machine")
def test_experts_of_a_row_are_multiplied_with_their_numbers(processors, gate, columns):
    """Programs begin and end within experts. The last piece of 832 columns is half a block, and 2,304 has three."""
    count, outputs = 3, 64
    matrices = [random_matrix((outputs, columns), MXFP4, f"expert {number}") for number in range(count)]
    each = [triton_packed.pack_steps(one, CPU, converts_e4m3=True) for one in matrices]
    words, levels = (torch.stack([getattr(one, name) for one in each]) for name in ("words", "levels"))
    stacked = evolve(each[0], words=words, levels=levels)
    x = normal(1 if gate else len(WANTED), columns, seed=1)
    bias = normal(count, outputs, seed=2)
    out = torch.full((len(WANTED), outputs // 2 if gate else outputs), float("nan"), dtype=BF16)
    shape = BiasedExpertsShape(count, len(WANTED), outputs // 2, is_normalized=True)
    experts = Experts(shape, None, (), None)
    launcher = row_experts.RowExperts(processors, 227 << 10, True, True)
    choice = torch.zeros(1, count, dtype=BF16), torch.zeros(count)
    launcher._multiply(x, stacked, bias, choice, out, experts, gate=gate)  # noqa: SLF001
    for place, expert in enumerate(WANTED):
        row = x[0 if gate else place][None]
        expected = multiply(row, unpack_for_cuda(matrices[expert], BF16), stacked.pieces, stacked.piece).to(BF16)
        expected = (expected.float() + bias[expert].float()).to(BF16)
        if gate:
            expected = apply_gate(CLAMPED, *expected.chunk(2, 1))
        assert torch.equal(out[place], expected[0]), place

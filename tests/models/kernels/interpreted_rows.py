"""Norms, gates and codes in Triton's interpreter, beside single operations. Runs by itself (`TRITON_INTERPRET=1`)."""

from __future__ import annotations

import torch
from attrs import evolve

from adapters.models.kernels.activations import CLAMPED, GELU, SILU, gate_halves
from adapters.models.kernels.composed_operations import add_normed
from adapters.models.kernels.cuda.chains.unpacked_codes import UnpackedAttention, UnpackedRows
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.formats.row_format import RowLayout, as_bytes, format_of, read_row_types, unpack_codes
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.row_kernels import NormedRows
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch
from effects.ids import PAGE

CPU = torch.device("cpu")
ROWS, WIDTH = 3, 40


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=make_generator(seed)) * 3


def check_norms() -> None:
    """Sums of two, factors, up to three norms of the sum; norms in two dtypes are computed one by one."""
    kernels = TritonKernels(CPU, pdl=False)
    weight, parallel_weight, own, *outer = (random(WIDTH, seed=seed) for seed in range(1, 7))
    rows, parallel, residual = (random(ROWS, WIDTH, seed=seed).half() for seed in (7, 8, 9))
    other = (parallel, parallel_weight, own)
    for delta, norms in (
        (NormedRows(rows, weight), outer),
        (NormedRows(rows, weight, factor=0.37), outer[:1]),
        (NormedRows(rows, weight, other, 0.37), []),
        (NormedRows(rows, weight, other), [outer[0], outer[1].half()]),
    ):
        expected, found = residual.clone(), residual.clone()
        given = evolve(delta, rows=rows.clone())
        sums = add_normed(kernels.add_norm, expected, given, 1e-6, norms)
        own_sums = kernels.add_normed(found, delta, 1e-6, norms)
        assert torch.equal(found, expected)
        assert len(own_sums) == len(norms)
        assert all(map(torch.equal, own_sums, sums))


def check_biases() -> None:
    kernels = TritonKernels(CPU, pdl=False)
    residual, delta = (random(ROWS, WIDTH, seed=seed).half() for seed in (1, 2))
    bias, weight = random(WIDTH, seed=3).half(), random(WIDTH, seed=4)
    expected, found = residual.clone(), residual.clone()
    one = kernels.add_norm(expected, delta + bias, weight, 1e-6)
    assert torch.equal(kernels.add_norm(found, delta, weight, 1e-6, bias=bias), one)
    assert torch.equal(found, expected)


def check_gates() -> None:
    """Compare the gates of all activations with torch. Near zero, torch's 1 + tanh has few exact digits."""
    kernels = TritonKernels(CPU, pdl=False)
    for activation in (SILU, GELU, CLAMPED):
        both, biases = random(ROWS, 2 * WIDTH, seed=1) * 4, random(5, 2 * WIDTH, seed=2)
        if activation == SILU:
            gate, up = both.chunk(2, 1)
            expected = torch.nn.functional.silu(gate) * up
        else:
            expected = gate_halves(activation, both.clone(), None)
        torch.testing.assert_close(kernels.apply_gate(activation, both, None), expected, rtol=2e-6, atol=1e-5)
        biased = kernels.apply_gate(activation, both + biases[3], None)
        assert torch.equal(kernels.apply_gate(activation, both, biases[3]), biased)


if __name__ == "__main__":
    check_norms()
    check_biases()
    check_gates()


def take_apart(cache: torch.Tensor, head: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of rows without their scales, and these: ones where rows are not coded."""
    form = format_of(cache)
    if not form.is_coded:
        return cache, torch.ones(cache.shape[:-1])
    scales = as_bytes(cache).view(torch.uint8)[..., -4:].contiguous().view(torch.float32)[..., 0]
    if form.is_packed:
        return unpack_codes(as_bytes(cache), head, cache.dtype), scales
    return cache[..., :head].float(), scales


def check_unpacked_codes() -> None:
    """Rows of the second slot, in pages that lie anywhere: of both key heads, or of one after the other."""
    head, kv, start, rows = 64, 2, 250, 20
    table = torch.tensor([[0, 5], [3, 1]], dtype=torch.int32)
    tiles = torch.tensor(
        [[0, 16, 1, start, 2, 0, 0, 0], [16, 4, 1, start + 16, 4, 0, 0, 0], [20, 4, 0, -1, 4, 0, 0, 0]]
    )
    for name in ("int8", "int4", "int3.5", "k=int8,v=bf16"):
        layout = RowLayout(read_row_types(name, torch.bfloat16), head)
        drawn = [random(6, kv, PAGE, head, seed=seed).bfloat16() for seed in (1, 2)]
        caches = layout.open_parts([one.view(layout.dtype) for one in layout.encode(drawn.pop)])
        batch = Batch(24, CPU, pages=table)
        batch.load(Step((Segment(1, start, rows),), 24), [0] * rows)
        for heads in (2, 1):
            memory = torch.empty(heads * 2 * 2 * PAGE * (2 * head + 4), dtype=torch.uint8)
            found = UnpackedRows.place(memory, kv, 2 * PAGE, head)
            assert found is not None
            assert found.numbers.shape == (2, heads, 2 * PAGE, head)
            found.numbers.fill_(torch.nan)
            own = UnpackedAttention(caches, batch, torch.tensor(tiles).int(), found, 2, 1, pdl=False)
            for first in range(0, kv, heads):
                own.unpack(first)
                for part, cache in enumerate(caches):
                    own_pages = (one[table[1].long()] for one in take_apart(cache, head))
                    numbers, scales = (one.transpose(0, 1).flatten(1, 2)[first : first + heads] for one in own_pages)
                    seen = start + rows
                    assert torch.equal(found.numbers[part, :, :seen].float(), numbers[:, :seen].float())
                    assert torch.equal(found.scales[part, :, :seen], scales[:, :seen])
                    assert not found.numbers[part, :, seen:320].any()
                    assert not found.scales[part, :, seen:320].any()
    assert UnpackedRows.place(torch.empty(100), kv, 2 * PAGE, head) is None

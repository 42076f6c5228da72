"""Rows of keys and values in fewer than 8 bits, and rows whose keys and values differ: what a code is, wherever it is
written and read, and one sequence's rows in every way that they come about.
"""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve

from adapters.models.decoder.cache.kv_cache import KvCache
from adapters.models.kernels.cpu.kernels import CpuKernels
from adapters.models.kernels.cpu.native.attention import NativeAttention
from adapters.models.kernels.cpu.native.rows import NativeRows, PreparedHeads
from adapters.models.kernels.formats.row_format import (
    DTYPE_NAMES,
    PLANES,
    STEPS,
    RowFormat,
    RowLayout,
    as_bytes,
    name_row_types,
    read_row_types,
    rotate_by_hadamard,
)
from adapters.models.kernels.formats.row_names import KV_TYPES
from adapters.models.kernels.interfaces.layer_interface import Rope
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from tests.models.checkpoints import run, run_in_pieces, same_bits, same_rows, tokens_of
from tests.models.decoder.cache.test_pages import InPages
from tests.models.kernels.test_row_form import CAPACITY, FAMILIES, LENGTH, heads, random, same, shard_of

PACKED = [pytest.param(dtype, id=RowFormat(dtype).name) for dtype in PLANES]
SIZES = (16, 64, 80, 96, 128, 256)
FORMS = {name: RowFormat(dtype) for name, dtype in DTYPE_NAMES.items()}
KINDS = ("int4", "int3.5", "k=int8,v=int4", "k=int4,v=int3.5", "k=bf16,v=fp8", "k=int4")


def types_of(name, dtype=torch.bfloat16):
    return read_row_types(name, dtype)


@pytest.mark.parametrize("size", [*SIZES, 24, 6])
def test_the_rotation_keeps_products_and_undoes_itself(size):
    one, other = random(5, size), random(5, size, seed=2)
    turned = rotate_by_hadamard(one)
    assert torch.allclose(rotate_by_hadamard(turned), one, atol=1e-5)
    assert torch.allclose((turned * rotate_by_hadamard(other)).sum(-1), (one * other).sum(-1), atol=1e-4)
    assert torch.equal(rotate_by_hadamard(one[2:3]), turned[2:3]), "a row's numbers follow from that row"


@pytest.mark.parametrize("dtype", PACKED)
@pytest.mark.parametrize("size", SIZES)
def test_a_packed_number_is_off_by_half_a_step_at_most(dtype, size):
    form, numbers = RowFormat(dtype), heads(size)
    rows = form.encode(numbers)
    assert rows.dtype is dtype
    assert rows.shape == (40, 3, form.row_width(size))
    assert form.head_size(rows.shape[-1]) == size
    found = form.decode(rows)
    turned = form.rotate(numbers)
    step = turned.abs().amax(-1, keepdim=True) / STEPS * 2
    error = (found - turned).abs() * (step > 1e-35)  # rows of smaller numbers become zeros
    assert bool((error[..., : size // 2] <= step / 2 * 1.001).all())
    assert bool((error[..., size // 2 :] <= step / (1 if dtype is torch.int3 else 2) * 1.001).all())
    assert not found[0].any()


@pytest.mark.parametrize("size", SIZES)
def test_bytes_of_a_row(size):
    assert FORMS["int4"].row_width(size) == size // 2 + 4
    assert FORMS["int3.5"].row_width(size) == math.ceil(size * 7 / 16 / 4) * 4 + 4
    mixed = types_of("k=int8,v=int4")
    assert mixed.row_bytes(size) == size + 4 + size // 2 + 4


@pytest.mark.parametrize("dtype", PACKED)
def test_the_rotation_spreads_what_stands_out(dtype):
    numbers = random(200, 128)
    numbers[:, 7] *= 50  # as channels of keys are in real models
    form = RowFormat(dtype)
    found = rotate_by_hadamard(form.decode(form.encode(numbers)))
    usual = torch.arange(128) != 7
    error = (found - numbers)[:, usual].square().mean()
    plain = numbers.abs().amax(-1, keepdim=True) / STEPS  # half a step without rotation is larger than most numbers
    assert error.sqrt() < plain.mean() / 4


@pytest.mark.parametrize("kind", ["int4", "int3.5", "k=int8,v=int4", "k=int3.5,v=fp8", "k=bf16,v=int4"])
@pytest.mark.parametrize("size", [16, 64, 80, 128])
def test_every_instruction_set_writes_and_reads_the_same_packed_rows(native_code, kind, size):
    """The rows are those that torch makes, and attention to them is attention to the numbers that they stand for."""
    types, numbers = types_of(kind), heads(size)
    numbers[2] = 1  # rotation by nothing turns some -0 into 0, in torch's rows alone
    numbers[3] /= 1e30
    count, seen = len(numbers), torch.arange(1, len(numbers) + 1)
    rope = Rope(torch.ones(64, 1), torch.zeros(64, 1))
    slots, both = torch.ones(count, dtype=torch.int64), [types.keys, types.values]
    layout = RowLayout(types, size)
    projected = torch.cat((random(count, 2, size, seed=2), numbers[:, 1:]), 1).flatten(1) + 0.0
    how = PreparedHeads(None, torch.ones(3, size), normed=False, eps=0.0)
    first = None
    for level in range(native_code.level + 1):
        memory = torch.zeros(len(layout.parts), 2, 1, 64, layout.width, dtype=layout.dtype)
        caches = layout.open_parts(tuple(memory))
        q = NativeRows(native_code, level).prepare_heads(projected, how, rope, (slots, seen - 1), *caches)
        asking = projected.view(count, 4, size)[:, :2]
        assert same(q, types.keys.rotate(asking))
        for head, (form, cache) in enumerate(zip(both, caches, strict=True), 1):
            assert same(as_bytes(cache)[1, 0, :count], as_bytes(form.encode(numbers[:, head] + 0.0)))
        attention = NativeAttention(native_code, level, torch.float32)
        found = attention.attend(q.view(count, 1, 2, size), slots, (None, seen), *caches)
        plain = [form.decode(cache).float().contiguous() for form, cache in zip(both, caches, strict=True)]
        expected = attention.attend(q.view(count, 1, 2, size), slots, (None, seen), *plain).view(count, 2, size)
        if types.values.is_packed:
            assert torch.allclose(found.view(count, 2, size), types.values.rotate(expected), atol=1e-5)
        else:
            assert same(found.view(count, 2, size), expected)
        first = found if first is None else first
        assert same(found, first), "every instruction set finds the same"


def packed_families():
    sizes = {"qwen3": 48, "llama": 32, "qwen2": 16}
    return {name: evolve(config, head_dim=sizes[name]) for name, config in FAMILIES.items()}


@pytest.mark.parametrize(("family", "dtype", "kind"), [
    ("qwen3", torch.bfloat16, "int4"),
    ("qwen3", torch.bfloat16, "k=int8,v=int4"),
    ("llama", torch.bfloat16, "int3.5"),
    ("qwen2", torch.float16, "k=int4,v=int3.5"),
])  # fmt: skip
def test_packed_rows_and_answers_are_the_same_however_they_come_about(family, dtype, kind):
    config, types = packed_families()[family], types_of(kind)
    shard, tokens = shard_of(config, dtype, types), tokens_of(LENGTH, config.vocab_size)
    assert shard.memory()["kv"] == 3 * CAPACITY * config.kv_bytes_per_token(types)
    expected = run_in_pieces(shard, tokens, [(256, 256)])
    assert same_bits(run_in_pieces(shard, tokens, [(64, 50), (16, 16), (4, 3), (64, 61)], slot=1), expected)
    assert same_rows(shard, 0, 1, 0, LENGTH), "a row is coded once, from its own numbers"
    shard.rows.import_(2, 0, shard.rows.export(0, 0, 250))
    shard.rows.copy(0, 1, 130)
    both = run(shard, 4, (2, 250, tokens[250:252]), (1, 130, tokens[130:131]))
    assert same_bits(both, torch.cat((expected[250:252], expected[130:131]))), "restored, copied and batched"
    step = Step((Segment(2, 252, 3), Segment(2, 253, 1)), 16)  # a tree: its second branch is what comes next
    branches = torch.cat((tokens[252:253], tokens[:2], tokens[253:254]))
    logits = shard.logits(step, shard.forward(step, branches).hidden)
    assert same_bits(logits[[0, 3]], expected[252:254])
    shard.commit(step, [(0, 3)])
    assert same_rows(shard, 0, 2, 0, 254)
    error = run_in_pieces(shard_of(config, dtype, None), tokens, [(256, 256)]) - expected
    assert 0 < error.abs().mean() < 0.3, "logits are of the size of 1"


@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_in_pages_are_those_in_one_piece(kind):
    config, found, types = packed_families()["qwen3"], [], types_of(kind)
    tokens = tokens_of(100, config.vocab_size)
    for kernels, pages in ((ReferenceKernels(), 0), (InPages(), 7)):
        shard = shard_of(config, torch.float32, types, kernels, pages=pages)
        found.append(run_in_pieces(shard, tokens, [(64, 64)], slot=1))
    assert same_bits(*found)
    native = shard_of(config, torch.float32, types, CpuKernels(torch.float32))
    assert torch.allclose(run_in_pieces(native, tokens, [(64, 64)]), found[0], atol=0.2)


def test_names_are_read_and_written():
    half = torch.float16
    assert ("auto", *DTYPE_NAMES) == KV_TYPES
    assert read_row_types("auto", half).keys.dtype is half
    assert [read_row_types(name, half).values.dtype for name in DTYPE_NAMES] == list(DTYPE_NAMES.values())
    assert read_row_types("v=int4", half).name == "k=float16,v=int4"
    assert read_row_types("v=int3.5,k=int3.5", half).name == "int3.5"
    for name in ("auto", *DTYPE_NAMES, *KINDS):
        types = read_row_types(name, half)
        assert read_row_types(name_row_types(types, half), half) == types
    for odd in ("int2", "", "k=int8,k=int4", "k=int2", "w=int8", "k=int8;v=int4", "k"):
        with pytest.raises(ValueError, match="accepted"):
            read_row_types(odd, half)


def test_heads_that_a_type_does_not_have_are_refused_by_name():
    types_of("int4").check_heads(80, latent=False)
    types_of("int4").check_heads(576, latent=True)
    with pytest.raises(ValueError, match="int4: heads have 24 numbers; accepted: multiples of 16"):
        types_of("int4").check_heads(24, latent=False)
    with pytest.raises(ValueError, match="keys and values at once"):
        types_of("k=int8,v=int4").check_heads(64, latent=True)


def test_rows_of_two_types_are_one_part_of_a_cache():
    layout = RowLayout(types_of("k=int8,v=int4"), 32)
    cache = KvCache(
        ["layers.0"], (2, 3, 64, layout.width), dtype=layout.dtype, device=torch.device("cpu"), layout=layout
    )
    assert cache.spec.names == ("layers.0.kv",)
    assert cache.spec.token_bytes == 3 * layout.types.row_bytes(32)
    keys, values = random(3, 5, 32), random(3, 5, 32, seed=2)
    cache.put(0, 1, 7, layout.types.keys.encode(keys), layout.types.values.encode(values))
    k, v = cache.layers[0]
    assert same(as_bytes(k)[1, :, 7:12], layout.types.keys.encode(keys))
    assert torch.equal(
        layout.types.values.decode(v[1, :, 7:12]), layout.types.values.decode(layout.types.values.encode(values))
    )
    (whole,) = layout.encode(iter((keys, values)).__next__)
    assert torch.equal(cache.export(1, 7, 12)["layers.0.kv"], whole)

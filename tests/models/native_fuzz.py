"""Calls of the compiled library in any shapes that its wrappers accept, at every level of instructions: for sanitizers.

python -m tests.models.native_fuzz FOLDER SECONDS [SEED]     the library of FOLDER, and where to begin

Sizes are next to every bound that the sources have, rows lie in any order, and numbers are as odd as numbers get. All
levels must give the same bits. It ends with the number of cases. A sanitizer would end the process before.
"""

from __future__ import annotations

import ctypes
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import torch
import zstandard
from attrs import evolve
from torch import Tensor

from adapters.device.sampling.grammar_mask import Mask
from adapters.models.kernels.cpu.native import native_library
from adapters.models.kernels.cpu.native.attention import NativeAttention
from adapters.models.kernels.cpu.native.delta import NativeDelta
from adapters.models.kernels.cpu.native.draw import pick_rows
from adapters.models.kernels.cpu.native.native_library import TILES, NativeLibrary
from adapters.models.kernels.cpu.native.products import NativeProducts
from adapters.models.kernels.cpu.native.rows import NativeRows, PreparedHeads
from adapters.models.kernels.formats.row_format import WHOLE, RowLayout, read_row_types
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.delta_interface import CHUNK, DeltaShape, DeltaWeights, LayerStates
from adapters.models.kernels.interfaces.layer_interface import Rope
from adapters.models.kernels.step import UNSETTLED, Segment, Step
from adapters.models.kernels.step_batch import StateBatch
from adapters.store.files.block_sums import BLOCK_BYTES, SUM_BYTES, count_blocks
from adapters.store.files.frames_library import find_address
from adapters.store.files.plain_frames import count_frame_bytes, count_head_bytes
from adapters.store.files.stored_file import FILE_CALL
from effects.job import Sampling
from tests.models.kernels.test_packed import LAYOUTS, random_matrix

FLOAT, BRAIN, CPU = torch.float32, torch.bfloat16, torch.device("cpu")
ROWS = (1, 2, 3, 4, 5, 11, 12, 13, 15, 16, 17, 64, 255, 256, 257)
OUTPUTS = (1, 5, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300)
TERMS = (1, 2, 3, 7, 8, 15, 16, 17, 32, 33, 100, 383, 384, 385, 769)
HEADS = (2, 4, 6, 7, 8, 15, 16, 17, 24, 31, 32, 33, 64, 65, 128, 1023, 1024)
VOCABULARIES = (1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 2048, 4099)
ROW_FORMS = ("k=bf16,v=bf16", "auto", "int8", "fp8")
PACKED_FORMS = ("int4", "int3.5", "k=int8,v=int4", "k=int4,v=int3.5", "k=bf16,v=int4", "k=int3.5,v=fp8")
ODD = (0.0, -0.0, 1e-45, -1e-39, 3e38, -3e38, float("inf"), -float("inf"), float("nan"))

Finds = Callable[[int], "list[Tensor]"]


def numbers(chance: random.Random, *shape: int, dtype: torch.dtype = FLOAT, finite: bool = False) -> Tensor:
    generator = make_generator(chance.randrange(1 << 30))
    found = torch.randn(shape, generator=generator) * chance.choice([1e-3, 1, 1, 30])
    if not finite and found.numel() and chance.random() < 0.2:
        for _ in range(chance.randrange(1, 4)):
            found.view(-1)[chance.randrange(found.numel())] = chance.choice(ODD)
    return found.to(dtype)


def laid(chance: random.Random, rows: Tensor) -> Tensor:
    """The same numbers: as they are, as columns or rows of something larger, or in another order."""
    count, width = rows.shape
    match chance.randrange(5):
        case 0:
            return torch.cat((rows.new_zeros(count, 3), rows), 1)[:, 3:]
        case 1:
            return torch.cat((rows.new_zeros(1, width), rows))[1:]
        case 2:
            return rows.t().contiguous().t()
        case 3 if count > 1:
            return torch.stack((rows, rows), 1)[:, 0]
        case _:
            return rows


def products(chance: random.Random, native: NativeLibrary) -> Finds:
    rows, outputs, terms = chance.choice(ROWS), chance.choice(OUTPUTS), chance.choice(TERMS)
    own = NativeProducts(native, 0, chance.choice([None, BRAIN]))
    dtype = chance.choice([FLOAT, BRAIN])
    weights = [own.pack(laid(chance, numbers(chance, outputs, terms, dtype=dtype))) for _ in range(2)]
    x = laid(chance, numbers(chance, rows, terms, dtype=chance.choice([FLOAT, BRAIN])))
    up = chance.choice([None, weights[1]])

    def found(level: int) -> list[Tensor]:
        if level < TILES or x.dtype is not BRAIN or dtype is not BRAIN:
            return [evolve(own, level=level).multiply(x, weights[0], up)]
        tiles = evolve(own, level=level)  # an arithmetic of their own, the same for each row alone
        together, apart = tiles.multiply(x, weights[0], up), [tiles.multiply(row, weights[0], up) for row in x.split(1)]
        assert same(together, torch.cat(apart)), "rows alone differ from rows together"
        return [own.multiply(x, weights[0], up)]

    return found


def packed(chance: random.Random, native: NativeLibrary) -> Finds:
    layout = chance.choice(LAYOUTS)
    rows, outputs, terms = chance.choice(ROWS), chance.choice(OUTPUTS), layout.span * chance.choice([1, 2, 3, 5])
    own = NativeProducts(native, 0, chance.choice([None, BRAIN]))
    weights = [own.pack_steps(random_matrix(layout, outputs, terms, chance.randrange(99))) for _ in range(2)]
    x = laid(chance, numbers(chance, rows, terms, dtype=BRAIN if weights[0].fixed else chance.choice([FLOAT, BRAIN])))
    up, extra = chance.choice([None, weights[1]]), chance.choice([0, 0, 5])

    def found(level: int) -> list[Tensor]:
        wide = torch.zeros(rows, outputs + extra, dtype=own.to or FLOAT)
        evolve(own, level=level).multiply_packed(x, weights[0], up, wide[:, :outputs])
        return [wide]

    return found


def norms(chance: random.Random, native: NativeLibrary) -> Finds:
    rows, width, dtype = chance.choice(ROWS), chance.choice(HEADS), chance.choice([FLOAT, BRAIN])
    residual, delta = (numbers(chance, rows, width, dtype=dtype) for _ in range(2))
    weight = numbers(chance, width, dtype=chance.choice([dtype, FLOAT]))
    added = chance.choice([None, laid(chance, delta)])

    def found(level: int) -> list[Tensor]:
        into = residual.clone() if added is not None else residual
        return [NativeRows(native, level).add_norm(into, added, weight, 1e-6), into]

    return found


def row_positions(chance: random.Random, rows: int, slots: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Return the slot and position of each row. No two rows go to the same place, and some are padded."""
    every = chance.sample(range(slots * capacity), min(rows, slots * capacity))
    at = [(one // capacity, one % capacity) for one in every] + [(0, -1)] * (rows - len(every))
    at = [(0, -1) if chance.random() < 0.1 else one for one in at]
    return torch.tensor([slot for slot, _ in at]), torch.tensor([position for _, position in at])


def draw_layout(chance: random.Random, head: int) -> RowLayout:
    """Formats of keys and values that heads of this size may have."""
    forms = ROW_FORMS + PACKED_FORMS if head % WHOLE == 0 else ROW_FORMS
    return RowLayout(read_row_types(chance.choice(forms), FLOAT), head)


def heads(chance: random.Random, native: NativeLibrary) -> Finds:
    rows, kv, queries, head = chance.choice(ROWS), chance.choice([1, 2]), chance.choice([0, 1, 5]), chance.choice(HEADS)
    rows, dtype, layout = min(rows, 40), chance.choice([FLOAT, BRAIN]), draw_layout(chance, head)
    slots, capacity, turned = chance.choice([1, 3]), chance.choice([1, 5, 128, 129]), chance.randrange(head // 2 + 1)
    projected = laid(chance, numbers(chance, rows, (queries + 2 * kv) * head, dtype=dtype))
    if projected.stride(1) != 1:
        projected = projected.contiguous()
    angles = numbers(chance, capacity, turned, finite=True)
    how = PreparedHeads(
        chance.choice([None, numbers(chance, queries + 2 * kv, head)]),
        numbers(chance, queries + kv, head),
        chance.random() < 0.5,
        1e-6,
    )
    at = row_positions(chance, rows, slots, capacity)

    def found(level: int) -> list[Tensor]:
        memory = torch.zeros(len(layout.parts), slots, kv, capacity, layout.width, dtype=layout.dtype)
        rope = Rope(angles.cos(), angles.sin())
        caches = layout.open_parts(tuple(memory))
        return [NativeRows(native, level).prepare_heads(projected, how, rope, at, *caches), memory]

    return found


def attention(chance: random.Random, native: NativeLibrary) -> Finds:
    rows, kv, group = chance.choice(ROWS[:12]), chance.choice([1, 2]), chance.choice([1, 2, 5, 95, 96, 97])
    head, slots = chance.choice(HEADS[:-2]), chance.choice([1, 3])
    layout = draw_layout(chance, head)
    capacity = chance.choice([1, 31, 32, 33, 127, 128, 129, 256, 300])
    rows = min(rows, 17) if group > 5 else rows
    q = numbers(chance, rows, kv, group, head)
    caches = layout.open_parts(layout.encode(lambda: numbers(chance, slots, kv, capacity, head)))
    bounds = (0, 1, 31, 32, 33, 127, 128, 129, capacity - 1, capacity)
    high = torch.tensor([min(chance.choice(bounds), capacity) for _ in range(rows)])
    low = chance.choice([None, torch.tensor([min(chance.choice(bounds), capacity) for _ in range(rows)])])
    slot = torch.tensor(sorted(chance.randrange(slots) for _ in range(rows)))
    own = NativeAttention(native, 0, chance.choice([FLOAT, BRAIN]))
    pairs = head % 2 == 0 and all(cache.dtype is BRAIN for cache in caches)

    def found(level: int) -> list[Tensor]:
        tiles = evolve(own, level=level)
        whole = tiles.attend(q, slot, (low, high), *caches)
        if level < TILES or not pairs:
            return [whole]
        # An arithmetic of its own, the same for each row alone. A value that is no number spoils rows beside its own.
        for row in range(rows) if all(cache.isfinite().all() for cache in caches) else ():
            at = slice(row, row + 1)
            alone = tiles.attend(q[at], slot[at], (None if low is None else low[at], high[at]), *caches)
            assert same(alone, whole[at]), f"row {row} alone differs from rows together"
        return [own.attend(q, slot, (low, high), *caches)]

    return found


def sampling(chance: random.Random, vocab: int) -> Sampling:
    return Sampling(
        temperature=chance.choice([0, 5e-324, 1e-300, 1e-3, 0.7, 1, 2, 1e300]),
        top_k=chance.choice([0, 1, 2, vocab - 1, vocab, vocab + 1]),
        top_p=chance.choice([5e-324, 1e-9, 0.3, 0.999, 1 - 2**-53, 1]),
        min_p=chance.choice([0, 5e-324, 0.3, 1]),
        logprobs=chance.choice([-1, 0, 1, 20, vocab + 5]),
        seed=chance.randrange(1 << 63),
    )


def mask(chance: random.Random, vocab: int) -> Mask | None:
    """None, all, some, one, or no token at all may follow; of fewer bytes than there are tokens, too."""
    size = chance.choice([-(-vocab // 8), 4 * -(-vocab // 32), vocab // 16])
    found = np.array([chance.choice([0, 0, 255, chance.randrange(256)]) for _ in range(size)], np.uint8)
    match chance.randrange(5):
        case 0:
            found.fill(0)
        case 1 if size:
            found.fill(0)
            found[chance.randrange(size)] = 1 << chance.randrange(8)
        case 2:
            return None
        case _:
            pass
    return found


def draws(chance: random.Random, native: NativeLibrary) -> Finds:
    rows, vocab = chance.choice([1, 2, 5]), chance.choice(VOCABULARIES)
    raw = numbers(chance, rows, vocab, finite=chance.random() < 0.8)
    match chance.randrange(4):
        case 0:
            raw = raw.round()
        case 1:
            raw = torch.full_like(raw, chance.choice(ODD))
        case _:
            pass
    raw = laid(chance, raw)
    used = chance.choice([raw, raw + numbers(chance, rows, vocab, finite=True)])
    wanted = [(sampling(chance, vocab), chance.randrange(1 << 40), mask(chance, vocab)) for _ in range(rows)]
    usual = [bits is None or bool(bits[: vocab // 8].any()) for *_, bits in wanted]
    usual = [one and bool(row.isfinite().all()) for one, row in zip(usual, used, strict=True)]

    def found(level: int) -> list[Tensor]:
        picked = pick_rows(native, level, raw, used, wanted)  # of other rows no more is needed
        return [torch.tensor([*first, *more]) for (first, more), one in zip(picked, usual, strict=True) if one]

    return found


def recurrent(chance: random.Random, native: NativeLibrary) -> Finds:
    keys = chance.choice([1, 2])
    sizes = chance.choice([1, 3, 4, 5, 16, 33, 128, 1024]), chance.choice([1, 7, 8, 9, 15, 16, 17, 33])
    shape, slots, dtype = DeltaShape(keys, keys * chance.choice([1, 2]), *sizes), 2, chance.choice([FLOAT, BRAIN])
    rates = (numbers(chance, shape.value_heads, finite=True) for _ in range(2))
    weights = DeltaWeights(shape, numbers(chance, shape.channels, 4, finite=True), *rates)
    steps, standing = list[tuple[StateBatch, Tensor, list[tuple[int, int]]]](), [(0, 0)] * slots
    for _ in range(4):
        settles, segments, bases, folds = chance.random() < 0.5, list[Segment](), list[int](), list[tuple[int, int]]()
        for slot in chance.sample(range(slots), chance.choice([1, 2])):
            rows = chance.choice([1, 2, 63, 64, 65, 129, 200] if settles else [1, 2, 7, 63, UNSETTLED])
            base, start = standing[slot]  # of the state; of what comes next
            segments.append(Segment(slot, start, rows))
            bases.append(base)
            stop = start + rows
            if not settles and stop >= base + CHUNK:
                folds.append((slot, base))
            standing[slot] = stop - stop % CHUNK, stop
        rows = sum(one.count for one in segments)
        batch = StateBatch(rows + chance.choice([0, 1, 16]), CPU)
        batch.before, batch.settles = tuple(bases), settles
        batch.load(Step(tuple(segments), batch.bucket, rows_only=settles), torch.zeros(rows, dtype=torch.int64))
        wide = numbers(chance, batch.bucket, shape.channels + 2 * shape.value_heads, dtype=dtype, finite=True)
        steps.append((batch, wide, folds))
    gate, weight = numbers(chance, batch.bucket, shape.values, dtype=dtype), numbers(chance, shape.value_size)

    def found(level: int) -> list[Tensor]:
        own, out = NativeDelta(native, level), list[Tensor]()
        state = own.make_state(shape, slots, 0, dtype, CPU)
        for batch, wide, folds in steps:
            convolved = own.convolve(wide[:, : shape.channels], weights, state, batch)
            out += [convolved, own.delta_rule(convolved, wide[:, shape.channels :], weights, state, batch)]
            for slot, base in folds:
                own.advance_state(LayerStates.of_layers(state, 1), slot, base)
        normed = own.gated_norm(out[-1], gate, weight, 1e-6)
        return [*out, normed, own.apply_gate(normed, gate), state.memory, state.conv]

    return found


def frames(chance: random.Random, native: NativeLibrary) -> Finds:
    """Plain frames, which have no levels, and which a decoder of zstd reads. Sums of blocks, which have forms."""
    code = native.code
    size = chance.choice([1, 31, 32, 33, 256, 1024, 16 << 10, 128 << 10, 256 << 10, 600 << 10]) + chance.randrange(40)
    content = np.frombuffer(chance.randbytes(size), np.uint8)
    decoder = zstandard.ZstdDecompressor()
    head = np.empty(count_head_bytes(size), np.uint8)
    code.rekindle_pack_head(content.ctypes.data, size, head.ctypes.data)
    assert decoder.decompress(head.tobytes()) == content.tobytes()
    rows = np.empty(count_frame_bytes(size), np.uint8)
    sums = make_sums(size, size)
    code.rekindle_pack_rows(content.ctypes.data, size, rows.ctypes.data, sums.ctypes.data)
    assert decoder.decompress(rows.tobytes()) == content.tobytes()
    form, found = 0, np.empty_like(sums)
    while not code.rekindle_sum_blocks(content.ctypes.data, size, BLOCK_BYTES, found.ctypes.data, form):
        assert (found == sums).all(), form
        form += 1
    assert form, "every processor has the plain one"
    files(chance, native, content)
    return lambda _: []


def make_sums(size: int, frame: int) -> np.ndarray:
    """Return memory for the sums of the blocks of a content in frames of this size."""
    sizes = [min(frame, size - at) for at in range(0, size, frame)]
    return np.zeros(SUM_BYTES * sum(map(count_blocks, sizes)), np.uint8)


def make_place(size: int, beyond: int) -> np.ndarray:
    """Return memory that begins so many bytes beyond a multiple of 64."""
    space = np.zeros(size + 128, np.uint8)
    begin = -space.ctypes.data % 64 + beyond
    return space[begin : begin + size]


def files(chance: random.Random, native: NativeLibrary, content: np.ndarray) -> None:
    """A file of such frames between two other parts: read as it was written, or refused where it cannot be right."""
    code = native.code
    frame = chance.choice([content.nbytes, 1 + content.nbytes // 2, 128 << 10])
    plain = np.frombuffer(chance.randbytes(chance.choice([1, 40, 3000, 128 << 10, 300 << 10])), np.uint8)
    head = np.empty(count_head_bytes(plain.nbytes), np.uint8)
    code.rekindle_pack_head(plain.ctypes.data, plain.nbytes, head.ctypes.data)
    table = chance.randbytes(chance.randrange(1, 300))
    sums, found = make_sums(content.nbytes, frame), make_sums(content.nbytes, frame)
    out, ends = make_place(content.nbytes, chance.choice([0, 0, 16])), np.zeros(head.nbytes + len(table), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        names = [str(path.with_name(name)).encode() for name in ("new", "file")]
        file = code.rekindle_begin_file(
            *(names[0], head.nbytes, content.ctypes.data, content.nbytes, frame, sums.ctypes.data)
        )
        assert file >= 0
        assert not code.rekindle_end_file(file, *names, 0, head.tobytes(), head.nbytes, table, len(table))
        whole = path.read_bytes()

        def read(plain_bytes: int) -> bool:
            call = ctypes.create_string_buffer(FILE_CALL.size)
            FILE_CALL.pack_into(
                *(call, 0, find_address(names[1]), len(whole), head.nbytes, plain_bytes, len(table)),
                *(ends.ctypes.data, out.ctypes.data, content.nbytes, frame, found.ctypes.data, 0),
            )
            missing = code.rekindle_read_files(-1, ctypes.addressof(call), 1, chance.randrange(2))
            assert missing == (FILE_CALL.unpack(call)[-1] != 0)
            return not missing

        assert read(0)
        assert (out.tobytes(), ends.tobytes()) == (content.tobytes(), head.tobytes() + table)
        assert (sums == found).all()
        assert read(plain.nbytes)
        assert ends.tobytes().startswith(plain.tobytes())
        assert ends.tobytes().endswith(table)
        harmed = bytearray(whole)
        harmed[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(harmed)
        is_table = harmed[: -len(table)] == whole[: -len(table)]
        assert not read(plain.nbytes) or is_table or (sums != found).any()
        path.write_bytes(whole[: chance.randrange(len(whole))])
        assert not read(plain.nbytes)


KINDS = (products, packed, norms, heads, attention, draws, recurrent, frames)


def same(found: Tensor, expected: Tensor) -> bool:
    """Return whether both are the same to the bit. Where there is no number in one, there must be none in the other;
    which one it is does not matter.
    """
    one, other = (tensor.contiguous().view(-1) for tensor in (found, expected))
    if one.is_floating_point() and one.element_size() > 1:
        nowhere = one.isnan()
        if not torch.equal(nowhere, other.isnan()):
            return False
        one, other = one.masked_fill(nowhere, 0), other.masked_fill(nowhere, 0)
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def run(native: NativeLibrary, seed: int) -> None:
    """One case. Raises AssertionError where levels disagree."""
    chance = random.Random(seed)
    kind = chance.choice(KINDS)
    finds = kind(chance, native)
    torch.set_num_threads(chance.choice([1, 2, 2, 4]))
    expected = finds(0)
    for level in range(1, native.level + 1):
        for index, (one, other) in enumerate(zip(finds(level), expected, strict=True)):
            assert same(one, other), f"seed {seed}: {kind.__name__}, output {index}, level {level}"


def main(folder: str, seconds: str, first: str = "0") -> None:
    native, why = native_library.open_library(Path(folder))
    if native is None:
        sys.exit(why)
    until = time.monotonic() + float(seconds)
    for seed in count(int(first)):
        if time.monotonic() > until:
            break
        (Path(folder) / "seed").write_text(str(seed))  # for who finds it ended
        run(native, seed)
    sys.stdout.write(f"{seed - int(first)} cases\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Checks Triton's attention in its interpreter against plain torch. It runs in a process of its own
(`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import torch

from adapters.models.decoder.cache.window_pages import WindowPages
from adapters.models.kernels.cuda import packed_rows
from adapters.models.kernels.cuda.kernels import TritonKernels
from adapters.models.kernels.formats.row_format import RowFormat, RowLayout, read_row_types
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.interfaces.attention_rule import PLAIN, AttentionMask, AttentionRule
from adapters.models.kernels.interfaces.layer_interface import HeadPrep, Rope
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.kernels.step_batch import Batch, BlockBatch
from effects.ids import PAGE

CPU = torch.device("cpu")
HEADS, KV, HEAD, CAPACITY, LENGTH = 3, 1, 16, 768, 300
EARLIER = 245  # rows; those that follow cross a split of keys
SINKS = torch.linspace(-2, 3, HEADS)
RULES = (
    PLAIN,
    AttentionRule(window=40),
    AttentionRule(window=270, cap=3.0, sinks=SINKS),
)


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=make_generator(seed))


PREP = HeadPrep(None, random(HEAD, seed=1) + 1, random(HEAD, seed=2) + 1, 1e-6, v_norm=True)
QKV = random(LENGTH, (HEADS + 2 * KV) * HEAD, seed=3)
ANGLES = torch.outer(torch.arange(CAPACITY), 1e4 ** -torch.linspace(0, 1, HEAD // 2))
ROPE = Rope(ANGLES.cos(), ANGLES.sin())


def write_earlier_rows(caches: list[torch.Tensor], count: int, pages: torch.Tensor | None) -> None:
    """Write the rows of the first `count` positions, as the plain kernels make them. The interpreter takes 12 ms a row.

    caches: keys and values, in one piece or in the pages of slot 0.
    """
    batch = Batch(count, CPU)
    batch.load(Step((Segment(0, 0, count),), count), [0] * count)
    ReferenceKernels().prepare_step(batch)
    whole = [torch.zeros(1, KV, CAPACITY, HEAD) for _ in caches]
    ReferenceKernels().rotate_store(QKV[:count], PREP, ROPE, batch, *whole)
    for cache, rows in zip(caches, whole, strict=True):
        for at in range(count):
            place, row = (0, at) if pages is None else (int(pages[0, at // cache.shape[2]]), at % cache.shape[2])
            cache[place, :, row] = rows[0, :, at]


def attended(
    kernels, rule: AttentionRule, pieces: list[tuple[int, int]], *, start: int = 0, page: int = 0
) -> torch.Tensor:
    """Attend with the rows from position `start` on, which come in these pieces: (bucket, rows).

    page: rows of a page; 0: the slot's rows are in one piece. Rows that are not written yet are NaN.
    """
    count = CAPACITY // page if page else 0
    pages = torch.tensor([[(at + 2) % count for at in range(count)]], dtype=torch.int32) if page else None
    shape = (count, KV, page, HEAD) if page else (1, KV, CAPACITY, HEAD)
    caches = [torch.full(shape, float("nan")) for _ in "kv"]
    if pages is not None and page == WindowPages.page:  # keys and values of a page are one behind the other there
        both = torch.full((2 * len(pages[0]), *shape[1:]), float("nan"))
        caches = [both[:-1], both[1:]]
        pages *= 2
    if start:
        write_earlier_rows(caches, start, pages)
    found, at = [], start
    for bucket, count in pieces:
        batch = Batch(bucket, CPU, pages=pages)
        batch.load(Step((Segment(0, at, count),), bucket), [0] * count)
        kernels.prepare_step(batch)
        rows = torch.nn.functional.pad(QKV[at : at + count], (0, 0, 0, bucket - count))
        q = kernels.rotate_store(rows, PREP, ROPE, batch, *caches)
        found.append(kernels.attend(q, *caches, batch, rule)[:count].clone())
        at += count
    return torch.cat(found)


# Where a sequence goes on, and the pieces of its next rows: (bucket, rows). Steps of more than 128 rows run as chains.
# The second sequence crosses a split of keys, and pages of both sizes. Few rows are in narrow steps, because the
# interpreter takes 40 ms to merge the splits of a row's head.
WAYS = (
    (0, [(136, 30)], [(136, 27), (4, 3)]),
    (EARLIER, [(136, 55)], [(136, 49), (8, 5), (4, 1)]),
)


def check_rule(number: int) -> None:
    kernels, rule = TritonKernels(CPU), RULES[number]
    for start, in_one, pieces in WAYS:
        whole = attended(kernels, rule, in_one, start=start)
        theirs = attended(ReferenceKernels(), rule, in_one, start=start)
        torch.testing.assert_close(whole, theirs, rtol=1e-4, atol=1e-5)
        for page in (0, PAGE, WindowPages.page):
            found = attended(kernels, rule, pieces, start=start, page=page)
            assert torch.equal(found, whole), (rule, start, page, (found - whole).abs().max())


def check_queries() -> None:
    """Queries without keys of their own are rotated alike."""
    kernels = TritonKernels(CPU)
    batch = Batch(64, CPU)
    batch.load(Step((Segment(0, 33, 50),), 64), [0] * 50)
    kernels.prepare_step(batch)
    caches = [torch.zeros(1, KV, CAPACITY, HEAD) for _ in "kv"]
    both = kernels.rotate_store(QKV[:64], PREP, ROPE, batch, *caches)
    alone = kernels.rotate_queries(QKV[:64, : HEADS * HEAD].contiguous(), PREP, ROPE, batch, caches[0])
    assert torch.equal(both[:50], alone[:50])


ROTATED, LATENT = 16, 32


def attended_latents(kernels, heads: int, pieces: list[tuple[int, int]], *, paged: bool, dtype: torch.dtype):
    """Attend over rows that are keys and values at once, of which a part is rotated."""
    length, row = sum(count for _, count in pieces), ROTATED + LATENT
    given = random(length, (heads + 1) * row, seed=4)
    width = RowFormat(dtype).row_width(row)
    form = RowFormat(dtype)
    stored = torch.uint8 if form.is_packed else dtype
    cache = torch.zeros((3, 1, PAGE, width) if paged else (1, 1, CAPACITY, width), dtype=stored).view(dtype)
    pages = torch.tensor([[2, 0, 1]], dtype=torch.int32) if paged else None
    rope = Rope(*(table[:, : ROTATED // 2].contiguous() for table in (ROPE.cos, ROPE.sin)))
    found, at = [], 0
    for bucket, count in pieces:
        batch = Batch(bucket, CPU, pages=pages)
        batch.load(Step((Segment(0, EARLIER + at, count),), bucket), [0] * count)
        kernels.prepare_step(batch)
        rows = torch.nn.functional.pad(given[at : at + count], (0, 0, 0, bucket - count))
        q = kernels.rotate_store(rows, HeadPrep(), rope, batch, cache, cache)
        found.append(kernels.attend(q, cache, cache, batch, AttentionRule(latent=LATENT))[:count].clone())
        at += count
    return torch.cat(found)


def attended_blocks(kernels, heads: int, latent: int, first: int, earlier: float) -> torch.Tensor:
    """Attend to context rows from `first` on and to a block's own rows. earlier: the numbers of rows before them."""
    head = LATENT + (ROTATED if latent else 0)
    kv = 1 if latent else 2
    keys = random(2, kv, CAPACITY, head, seed=7)
    keys[:, :, :first] = earlier
    values = keys if latent else keys.flip(3).contiguous()
    batch = BlockBatch(8, CPU)
    batch.before = (first, first + 1)
    batch.load(Step((Segment(1, EARLIER, 4), Segment(0, EARLIER + 30, 3)), 8), [0] * 7)
    kernels.prepare_step(batch)
    q = random(8, heads, head, seed=8)
    return kernels.attend_block(q, keys, values, batch, AttentionMask(causal=True), latent)[:7]


def check_blocks() -> None:
    for heads, latent, first in ((4, 0, 3), (3, LATENT, 0), (40, LATENT, 200)):
        found = attended_blocks(TritonKernels(CPU), heads, latent, first, float("nan"))
        theirs = attended_blocks(ReferenceKernels(), heads, latent, first, 0.0)
        assert found.shape == (7, heads * LATENT)
        torch.testing.assert_close(found, theirs, rtol=1e-4, atol=2e-5)


def check_latents() -> None:
    kernels = TritonKernels(CPU)
    for heads, dtype, pieces in (
        (3, torch.float32, [(16, 9), (4, 3), (4, 4), (4, 1)]),
        (40, torch.float32, [(2, 1), (2, 2)]),
        (3, torch.int8, [(8, 8), (4, 1)]),
    ):
        length = sum(count for _, count in pieces)
        whole = attended_latents(kernels, heads, [(length, length)], paged=False, dtype=dtype)
        theirs = attended_latents(ReferenceKernels(), heads, [(length, length)], paged=False, dtype=dtype)
        assert whole.shape == (length, heads * LATENT)
        torch.testing.assert_close(whole, theirs, rtol=1e-4, atol=2e-5)
        for paged in (False, True):
            found = attended_latents(kernels, heads, pieces, paged=paged, dtype=dtype)
            assert torch.equal(found, whole), (heads, dtype, paged, (found - whole).abs().max())
    x, weight = random(7, 5, 32, seed=5), random(5, 24, 32, seed=6)
    for rows in (7, 1, 3):
        found = kernels.multiply_heads(x[:rows], kernels.pack_heads(weight))
        expected = ReferenceKernels().multiply_heads(x[:rows], weight)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(found, kernels.multiply_heads(x, kernels.pack_heads(weight))[:rows])


PACKED = ("int4", "int3.5", "k=int8,v=int4", "k=bf16,v=int3.5", "k=int4,v=fp8")


def kept_rows(kernels, named: str, pieces: list[tuple[int, int]], *, paged: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of attention, and the bytes of the rows in the order of their positions."""
    layout = RowLayout(read_row_types(named, torch.float32), HEAD)
    pages = torch.tensor([[2, 0, 1]], dtype=torch.int32) if paged else None
    shape = (len(layout.parts), 3 if paged else 1, KV, PAGE if paged else CAPACITY, layout.width)
    memory = torch.zeros(shape, dtype=layout.dtype)
    caches = layout.open_parts(tuple(memory))
    found, at = [], 0
    for bucket, count in pieces:
        batch = Batch(bucket, CPU, pages=pages)
        batch.load(Step((Segment(0, EARLIER + at, count),), bucket), [0] * count)
        kernels.prepare_step(batch)
        rows = torch.nn.functional.pad(QKV[at : at + count], (0, 0, 0, bucket - count))
        q = kernels.rotate_store(rows, PREP, ROPE, batch, *caches)
        found.append(kernels.attend(q, *caches, batch)[:count].clone())
        at += count
    order = memory[:, [2, 0, 1]] if paged else memory
    return torch.cat(found), order.transpose(1, 2).flatten(2, 3)


def check_packed_rows() -> None:
    """Programs of the whole step take all heads of a row, those of its pieces one each."""
    packed_rows.MANY_ROWS = 16
    kernels = TritonKernels(CPU)
    for named in PACKED:
        whole, rows = kept_rows(kernels, named, [(32, 20)], paged=False)
        theirs, _ = kept_rows(ReferenceKernels(), named, [(20, 20)], paged=False)
        # Norms differ in the last bit, so some code may be the next one.
        torch.testing.assert_close(whole, theirs, rtol=1e-2, atol=2e-2)
        for paged in (False, True):
            found, again = kept_rows(kernels, named, [(8, 8), (4, 3), (16, 9)], paged=paged)
            assert torch.equal(found, whole), (named, paged)
            assert torch.equal(again, rows), (named, paged)
    for heads, named, pieces in ((3, "int4", [(8, 8), (4, 1)]), (3, "int3.5", [(8, 8), (4, 1)])):
        dtype = read_row_types(named, torch.float32).keys.dtype
        whole = attended_latents(kernels, heads, [(9, 9)], paged=False, dtype=dtype)
        theirs = attended_latents(ReferenceKernels(), heads, [(9, 9)], paged=False, dtype=dtype)
        torch.testing.assert_close(whole, theirs, rtol=1e-3, atol=1e-3)
        for paged in (False, True):
            assert torch.equal(attended_latents(kernels, heads, pieces, paged=paged, dtype=dtype), whole), named
    check_codes(kernels)


def check_codes(kernels: TritonKernels) -> None:
    """Codes are those that torch makes of the same numbers, for heads of every size."""
    for size in (16, 64, 128, 256):
        given = random(5, 4, size, seed=7)
        given[0], given[1, :, 1:], given[2], given[3] = 0, 0, given[2] * 1e-36, given[3] * 1e30
        ones = torch.ones(CAPACITY, size // 2)
        for named in ("int4", "int3.5", "k=int8,v=int4", "k=fp8,v=int3.5"):
            layout = RowLayout(read_row_types(named, torch.float32), size)
            memory = torch.zeros(len(layout.parts), 1, 1, 64, layout.width, dtype=layout.dtype)
            caches = layout.open_parts(tuple(memory))
            batch = Batch(8, CPU)
            batch.load(Step((Segment(0, 7, 5),), 8), [0] * 5)
            kernels.prepare_step(batch)
            qkv = torch.nn.functional.pad(given.flatten(1), (0, 0, 0, 3)) + 0.0
            q = kernels.rotate_store(qkv, HeadPrep(), Rope(ones, ones * 0), batch, *caches)
            assert torch.equal(q[:5], layout.types.keys.rotate(given[:, :2])), (size, named)
            heads = iter((given[:, 2:3].transpose(0, 1), given[:, 3:4].transpose(0, 1)))
            for part, expected in zip(memory, layout.encode(heads.__next__), strict=True):
                assert torch.equal(part[0, :, 7:12], expected), (size, named)
                assert not part[0, :, 12:].any(), "nothing is kept of padded rows"

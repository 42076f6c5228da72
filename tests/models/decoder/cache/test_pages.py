"""Rows in pages: the same as rows in one piece, shared where they may be, and given back."""

from __future__ import annotations

import mmap

import pytest
import torch

from adapters.models.decoder.cache.kv_cache import KvCache, PagedKvCache
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.families.qwen3 import Qwen3Config
from adapters.models.kernels.functions.seeded import make_generator
from adapters.models.kernels.reference.kernels import ReferenceKernels
from adapters.models.kernels.step import Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from effects.ids import PAGE

CONFIG = Qwen3Config(64, 32, 64, 2, 4, 2, 16, 1024, 1e6, tie_word_embeddings=True)
BUCKETS = (4, 32, 512)
SIZE = (3, 2, 3 * PAGE, 16)


class InPages(ReferenceKernels):
    is_paged = True


def shard_of(kernels: ReferenceKernels, pages: int = 0) -> DenseShard:
    weights = RandomWeights(CONFIG, 1, torch.device("cpu"), torch.float32)
    return DenseShard(
        CONFIG, weights, kernels, ShardPlacement(slots=3, capacity=3 * PAGE, buckets=BUCKETS, pages=pages)
    )


def run(shard: DenseShard, slot: int, start: int, tokens: torch.Tensor) -> torch.Tensor:
    bucket = next(bucket for bucket in BUCKETS if bucket >= len(tokens))
    step = Step((Segment(slot, start, len(tokens)),), bucket)
    return shard.logits(step, shard.forward(step, tokens).hidden)[: len(tokens)].clone()


def tokens_of(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 64, (count,), generator=make_generator(seed))


def test_slots_that_share_pages_answer_as_slots_that_share_nothing() -> None:
    apart, shard = shard_of(ReferenceKernels()), shard_of(InPages(), pages=6)
    head, tails = tokens_of(300, 0), (tokens_of(30, 1), tokens_of(30, 2))
    shard.rows.seat(0, 0, 0, (5, 1))
    for one in (shard, apart):
        run(one, 0, 0, head)
        if one is apart:
            one.rows.copy(0, 1, 280)
    shard.rows.seat(1, 0, 280, (5, 3))
    for slot, keep in ((0, 300), (1, 280), (0, 330), (1, 310)):
        assert torch.equal(run(shard, slot, keep, tails[slot]), run(apart, slot, keep, tails[slot]))
    for slot, rows in ((0, 360), (1, 340)):
        ours, theirs = shard.rows.export(slot, 0, rows), apart.rows.export(slot, 0, rows)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    shard.rows.seat(2, 2, 0, (0,))
    shard.rows.grow(2, (2, 4))
    moved = {name: rows[:, :330] for name, rows in apart.rows.export(0, 0, 360).items()}
    shard.rows.import_(2, 0, moved)
    assert torch.equal(run(shard, 2, 330, tails[0]), run(apart, 0, 330, tails[0]))


def test_a_tree_over_pages_gets_the_bits_of_a_tree_over_rows_in_one_piece() -> None:
    """It crosses from one page to the next, and its path is put on both."""
    found = list[torch.Tensor]()
    for shard in (shard_of(ReferenceKernels()), shard_of(InPages(), pages=9)):
        run(shard, 1, 0, tokens_of(254, 0))
        step = Step((Segment(1, 254, 4), Segment(1, 256, 2)), 32)
        logits = shard.logits(step, shard.forward(step, tokens_of(6, 1)).hidden)[:6].clone()
        shard.commit(step, [(0, 1, 4, 5)])
        found.append(torch.cat((logits, run(shard, 1, 258, tokens_of(3, 2)))))
    assert torch.equal(*found)


def test_a_view_is_of_one_page_and_nobody_is_given_more_pages_than_it_has_rows() -> None:
    cache = PagedKvCache(["layers.0"], SIZE, dtype=torch.float32, device=torch.device("cpu"), pages=5)
    assert cache.view(0, 3, PAGE).shape == (1, 2, 2, PAGE - 3, 16)
    assert list(cache.spans(3, 2 * PAGE + 1)) == [(3, PAGE), (PAGE, 2 * PAGE), (2 * PAGE, 2 * PAGE + 1)]
    with pytest.raises(ValueError, match="several pages"):
        cache.view(0, 3, PAGE + 1)
    cache.seat(0, 0, 0, (0, 1, 2))
    with pytest.raises(ValueError, match="slot 0 is given 4 pages; it has rows for 3"):
        cache.grow(0, (3,))


def test_in_host_memory_a_slot_has_rows_as_long_as_nobody_else_has_the_page() -> None:
    cache = KvCache(["layers.0", "layers.1"], SIZE, dtype=torch.float32, device=torch.device("cpu"), pages=4)
    assert PAGE * 16 * 4 % mmap.PAGESIZE == 0  # so that all of a page can be given back
    assert cache.nbytes == 4 * PAGE * cache.spec.token_bytes < 3 * 3 * PAGE * cache.spec.token_bytes
    cache.seat(0, 0, 0, (0, 1))
    cache.view(0, 0, 2 * PAGE).fill_(1)
    cache.seat(1, 0, PAGE + 5, (2, 3))
    assert bool((cache.view(1, 0, PAGE + 5) == 1).all())
    assert bool((cache.view(0, 0, 2 * PAGE) == 1).all())
    cache.seat(2, 2, 0, (1,))
    assert bool((cache.view(0, 0, PAGE) == 1).all())
    assert not cache.view(0, PAGE, 2 * PAGE).any()
    cache.grow(2, (0,))
    assert not cache.view(0, 0, 2 * PAGE).any()
    assert bool((cache.view(1, 0, PAGE + 5) == 1).all())


def test_a_slot_that_gets_other_pages_keeps_its_rows_when_its_old_pages_go_to_another() -> None:
    """A slot's old pages permit nothing any more once it is seated anew."""
    shape = (2, 2, 2048, 64)
    cache = KvCache(["layers.0"], shape, dtype=torch.bfloat16, device=torch.device("cpu"), pages=8)
    cache.seat(0, 0, 0, [0, 1])
    cache.view(0, 0, 512).fill_(1)
    cache.seat(0, 0, 0, [3, 4])
    cache.view(0, 0, 512).fill_(2)
    cache.seat(1, 1, 0, [0, 1])
    assert cache.view(0, 0, 512).unique().tolist() == [2]


def test_rows_that_are_copied_into_a_slot_outlive_the_pages_that_it_had_in_another_order() -> None:
    cache = KvCache(["layers.0"], SIZE, dtype=torch.float32, device=torch.device("cpu"), pages=8)
    cache.seat(0, 0, 0, (0, 1))
    cache.view(0, 0, 2 * PAGE).fill_(1)
    cache.seat(1, 1, 0, (7, 5))
    cache.seat(1, 0, 2 * PAGE, (5, 7))
    assert bool((cache.view(1, 0, 2 * PAGE) == 1).all())


@pytest.mark.cuda
@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_slot_is_given_pages_without_waiting_for_the_device() -> None:
    """A slot is opened while the device runs a step. If the host waited for it, the next one would be launched late."""
    cache = PagedKvCache(["layers.0"], SIZE, dtype=torch.bfloat16, device=torch.device("cuda"), pages=8)
    cache.seat(0, 0, 0, (6, 2))
    torch.cuda.set_sync_debug_mode("error")
    try:
        cache.seat(1, 0, PAGE + 5, (6, 4))
        cache.grow(1, (7,))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.table[1].tolist() == [6, 4, 7]


@pytest.mark.parametrize("kind", [KvCache, PagedKvCache])
@pytest.mark.parametrize(
    ("keep", "pages", "said"),
    [
        (0, (0, 1, 2, 3), "slot 0 is given 4 pages; it has rows for 3"),
        (0, (0, 0), "each once"),
        (0, (8,), r"not all are in 0\.\.7"),
        (0, (-1,), r"not all are in 0\.\.7"),
        (PAGE + 1, (0,), "slot 0 keeps 257 rows and is given 1 pages of 256"),
    ],
)
def test_pages_that_cannot_be_given_are_refused(
    kind: type[KvCache], keep: int, pages: tuple[int, ...], said: str
) -> None:
    cache = kind(["layers.0"], SIZE, dtype=torch.float32, device=torch.device("cpu"), pages=8)
    with pytest.raises(ValueError, match=said):
        cache.seat(0, 0, keep, pages)

"""What the rows of layers with a window take, and that steps which are rolled back leave no trace in them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from adapters.models.decoder.cache.kv_cache import KvCache
from adapters.models.decoder.cache.window_rows import WindowRows, WindowShape, count_shared_rows, count_window_rows
from adapters.models.decoder.dense_shard import DenseShard
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.interfaces.delta_interface import CHUNK
from adapters.models.kernels.step import UNSETTLED, Segment, Step
from adapters.models.numerics.synthetic import RandomWeights
from tests.models.checkpoints import proven, same_bits, tokens_of
from tests.models.hybrids import CHUNKS, LENGTH, computed, last_layer, same_sequence
from tests.models.windowed import read_config

# The 31B model has 50 layers with a window of 1024 rows, with 16 key heads of 256, and 10 full ones with 4 of 512.
TOKENS, WINDOW, CHUNK_ROWS = 20_000, 1024, 1024
SLIDING_ROW, FULL_ROW = 50 * 2 * 16 * 256, 10 * 2 * 4 * 512


def test_rows_of_the_31b_layout_take_less_than_a_twentieth_more_than_the_arithmetic():
    needed = WINDOW * SLIDING_ROW + TOKENS * FULL_ROW
    in_pages = -(-TOKENS // KvCache.page) * KvCache.page
    assert count_window_rows(WINDOW) * SLIDING_ROW + in_pages * FULL_ROW <= 1.05 * needed
    assert count_shared_rows(CHUNK_ROWS) < CHUNK_ROWS


@pytest.mark.parametrize(
    ("slots", "chunk", "excess"), [(1, 1024, 36.7), (1, 256, 11.3), (4, 1024, 12.9), (8, 1024, 8.9), (16, 1024, 7.0)]
)
def test_what_slots_share_is_most_of_what_they_take_more(slots, chunk, excess):
    """The figures of docs/internals/cache-and-restore.md."""
    needed = slots * (WINDOW * SLIDING_ROW + TOKENS * FULL_ROW)
    in_pages = -(-TOKENS // KvCache.page) * KvCache.page
    own = slots * (count_window_rows(WINDOW) * SLIDING_ROW + in_pages * FULL_ROW)
    taken = own + count_shared_rows(chunk) * SLIDING_ROW
    assert round(100 * (taken / needed - 1), 1) == excess
    assert f"{excess} %" in (Path(__file__).parents[4] / "docs/internals/cache-and-restore.md").read_text()


@pytest.mark.parametrize("window", [1, 48, 64, 65, 1000, 1024])
@pytest.mark.parametrize("bucket", [64, 256, 1024])
def test_a_slot_has_room_for_every_step(window, bucket):
    """Whole chunks, steps that are rolled back, and several prompts in one step never want a page that is not there."""
    draw = random.Random(window * bucket)
    shape = WindowShape(1, 1, window)
    slots = 3
    how = {"checkpoint_count": 0, "dtype": torch.float32, "device": torch.device("cpu"), "paged": True}
    rows = WindowRows(["layers.0"], shape, slots=slots, rows=(1 << 14, bucket), **how)
    at = [0] * slots
    for _ in range(300):
        chosen = draw.sample(range(slots), draw.randint(1, slots))
        left = bucket
        segments = []
        rows_only = draw.random() < 0.5
        for slot in chosen:
            most = left if rows_only else min(left, UNSETTLED)
            if most < 1 or at[slot] + most > 1 << 14:
                continue
            count = most if draw.random() < 0.3 else draw.randint(1, most)
            segments.append(Segment(slot, at[slot], count))
            left -= count
        if not segments:
            break
        step = Step(tuple(segments), bucket, rows_only=rows_only)
        rows.start(step)
        with rows.settling(step):
            pass
        kept = [one.count if rows_only else draw.randint(0, one.count) for one in segments]
        if not rows_only:
            rows.commit(step, kept)
        for one, keep in zip(segments, kept, strict=True):
            at[one.slot] = one.start + keep
    assert max(at) > bucket


def count_resident_bytes(cache: KvCache) -> int:
    """Return the bytes of memory that the system has given to a cache on the host."""
    start = cache._all.data_ptr()  # noqa: SLF001
    found = inside = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= start < high
        elif inside and first == "Rss:":
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.long
def test_memory_of_a_long_sequence_is_within_a_twentieth_of_the_arithmetic():
    """Measured: what the system has given to the rows of a model in the 31B's layout, after 20,000 tokens."""
    config = read_config("gemma4, 31b layout")
    placement = ShardPlacement(slots=1, capacity=TOKENS, dtype=torch.float32)
    weights = RandomWeights(config, scale=config.hidden_size**-0.5)
    shard = DenseShard(config, weights, proven(config, torch.float32, TOKENS).copy_for_shard(), placement)
    tokens = tokens_of(TOKENS)
    computed_rows = 0
    while computed_rows < TOKENS:
        part = tokens[computed_rows : computed_rows + 256]
        shard.forward(Step((Segment(0, computed_rows, len(part)),), 256, rows_only=True), part)
        computed_rows += len(part)
    assert isinstance(shard.states, WindowRows)
    windows = shard.states._rows  # noqa: SLF001
    needed = WINDOW * windows.spec.token_bytes + TOKENS * shard.rows.spec.token_bytes
    taken = count_resident_bytes(windows) + count_resident_bytes(shard.rows)
    assert needed <= taken <= 1.05 * needed
    assert shard.memory()["kv"] <= 1.05 * (needed + CHUNK * shard.rows.spec.token_bytes)


@pytest.mark.parametrize("name", ["gemma3", "gemma4, inputs of layers, rows shared", "gpt_oss"])
@pytest.mark.parametrize("seed", range(3))
def test_proposals_that_are_rejected_leave_no_trace(two_threads, name, seed):
    """Random proposals, right and wrong ones, in steps of one slot and of several; any number of them is kept."""
    config = read_config(name)
    kernels = proven(config, torch.float32, 512).copy_for_shard()
    placement = ShardPlacement(slots=3, capacity=512, aux_layers=(config.num_layers - 1,), dtype=torch.float32)
    shard = DenseShard(config, RandomWeights(config, scale=config.hidden_size**-0.5), kernels, placement)
    tokens = tokens_of(LENGTH)
    expected = computed(shard, tokens, CHUNKS)
    draw = random.Random(seed)
    at = {1: 0, 2: 0}
    for slot in at:
        at[slot] = draw.randint(1, 200)
        computed(shard, tokens[: at[slot]], CHUNKS, slot=slot)
    while min(at.values()) < LENGTH:
        slots = [slot for slot in at if at[slot] < LENGTH and draw.random() < 0.8]
        if not slots:
            continue
        segments = []
        given = []
        kept = []
        for slot in slots:
            count = min(draw.choice((1, 2, 8, 16, 31)), LENGTH - at[slot])
            keep = draw.randint(1, count)
            segments.append(Segment(slot, at[slot], count))
            given.append(torch.cat((tokens[at[slot] : at[slot] + keep], torch.randint(0, 160, (count - keep,)))))
            kept.append(keep)
        step = Step(tuple(segments), 64)
        found = last_layer(shard, step, torch.cat(given))
        shard.commit(step, kept)
        row = 0
        for one, keep in zip(segments, kept, strict=True):
            assert same_bits(found[row : row + keep], expected[one.start : one.start + keep])
            row += one.count
            at[one.slot] += keep
    for slot in at:
        assert same_sequence(shard, 0, slot)

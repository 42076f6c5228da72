"""Frames of content that is not compressed: any zstd decoder reads them, and a wrong byte is found."""

from __future__ import annotations

import random

import numpy as np
import pytest
import zstandard

from adapters.models.kernels.cpu.native.native_library import SWITCH, find_library
from adapters.store.files import plain_frames, seekable
from adapters.store.files.block_sums import sum_blocks
from adapters.store.files.codec import Fixed, create_compressor
from adapters.store.files.frames_library import load_functions
from adapters.store.files.plain_frames import SHORT, PlainCompressor, create_plain_compressor
from adapters.store.files.seekable import Damaged

pytestmark = pytest.mark.timeout(60)
BLOCK = 128 << 10
ENDS = (-33, -32, -31, -9, -8, -7, -5, -4, -3, -1, 0, 1, 3, 4, 7, 8, 31, 32, 33)
SIZES = (*(2 * BLOCK + end for end in ENDS), SHORT, BLOCK - 1, BLOCK, BLOCK + 1, (2 << 20) + 5, 2 << 20)

needs_library = pytest.mark.skipif(find_library() is None, reason="no compiled library")


@needs_library
@pytest.mark.parametrize("size", SIZES)
def test_any_decoder_reads_a_plain_frame(size: int) -> None:
    content = random.Random(size).randbytes(size)
    compressor = create_plain_compressor()
    assert isinstance(compressor, PlainCompressor)
    frame, sums = compressor.compress_rows(memoryview(content))
    assert len(frame) == plain_frames.count_frame_bytes(size) <= seekable.compute_bound(size)
    about = zstandard.get_frame_parameters(frame)
    assert (about.content_size, about.has_checksum, about.dict_id) == (size, False, 0)
    assert zstandard.ZstdDecompressor().decompress(frame) == content
    found = bytearray(size)
    assert seekable.decompress_rows(frame, memoryview(found)) == sums == sum_blocks(content)
    assert found == content


@needs_library
@pytest.mark.parametrize("size", [*range(1, 70), 1000, BLOCK, 300_001])
def test_the_plain_frame_of_a_head_has_the_checksum_of_zstd(size: int) -> None:
    content = random.Random(size).randbytes(size)
    frame = plain_frames.pack_head(content)
    assert len(frame) == plain_frames.count_head_bytes(size)
    assert frame[-seekable.CHECKSUM :] == seekable.create_compressor(1).compress(content)[-seekable.CHECKSUM :]
    found = bytearray(size)
    seekable.decompress(frame, memoryview(found))
    assert found == content


def test_heads_and_rows_are_not_taken_for_each_other() -> None:
    content = random.Random(1).randbytes(SHORT)
    compressor = create_compressor("store")
    target = memoryview(bytearray(SHORT))
    with pytest.raises(Damaged, match="header is not ours"):
        seekable.decompress_rows(compressor.compress(content), target)
    with pytest.raises(Damaged, match="header is not ours"):
        seekable.decompress(compressor.compress_rows(content)[0], target)


@pytest.mark.parametrize("codec", ["store", "zstd"])
@pytest.mark.parametrize("size", [SHORT, BLOCK + 5, 300_001])
def test_a_wrong_bit_is_found_wherever_it_is(size: int, codec: Fixed) -> None:
    """The decoder finds it, or the sum of its block does."""
    chance = random.Random(size)
    content = chance.randbytes(size)
    frame, sums = create_compressor(codec).compress_rows(content)
    bits = [*range(8 * 16), *(chance.randrange(8 * 16, 8 * len(frame)) for _ in range(60))]
    for bit in (*bits, *range(8 * len(frame) - 64, 8 * len(frame))):
        harmed = bytearray(frame)
        harmed[bit // 8] ^= 1 << bit % 8
        target = bytearray(size)
        try:
            found = seekable.decompress_rows(harmed, memoryview(target))
        except Damaged:
            continue
        assert (found == sums) == (target == content), "a few bits of a frame say nothing"


@needs_library
def test_content_may_be_any_memory() -> None:
    rows = np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)
    rows.flags.writeable = False
    frame, sums = create_compressor("store").compress_rows(rows.data)
    assert zstandard.ZstdDecompressor().decompress(frame) == rows.tobytes()
    assert sums == sum_blocks(rows.tobytes())


def test_short_contents_and_those_without_a_library_are_compressed_by_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"the head of a file, " * 100
    assert len(create_compressor("store").compress(text)) < len(text) // 4
    assert len(create_compressor("store").compress_rows(text)[0]) < len(text) // 4
    content = random.Random(1).randbytes(BLOCK + 5)
    sums = sum_blocks(content)
    load_functions.cache_clear()
    monkeypatch.setenv(SWITCH, "off")
    try:
        frame, same_sums = create_compressor("store").compress_rows(content)
        assert zstandard.ZstdDecompressor().decompress(frame) == content
        assert (frame, same_sums) == seekable.create_compressor(plain_frames.LEVEL).compress_rows(content)
        assert same_sums == sums
    finally:
        load_functions.cache_clear()

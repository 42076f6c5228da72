"""Frames of content that is not compressed: any zstd decoder reads them, and a wrong byte is found."""

from __future__ import annotations

import random

import numpy as np
import pytest
import zstandard

from adapters.models.kernels.cpu.native.native_library import SWITCH, find_library
from adapters.store.files import plain_frames, seekable
from adapters.store.files.codec import create_compressor
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
    frame = compressor.compress(memoryview(content))
    assert len(frame) <= seekable.compute_bound(size)
    about = zstandard.get_frame_parameters(frame)
    assert (about.content_size, about.has_checksum, about.dict_id) == (size, True, 0)
    assert zstandard.ZstdDecompressor().decompress(frame) == content
    found = bytearray(size)
    seekable.decompress(frame, memoryview(found))
    assert found == content


@needs_library
def test_its_checksum_is_that_of_zstd() -> None:
    content = random.Random(1).randbytes(300_001)
    theirs = seekable.create_compressor(1).compress(content)
    ours = create_compressor("store").compress(content)
    assert seekable.read_checksum(ours) == seekable.read_checksum(theirs)


@needs_library
@pytest.mark.parametrize("size", [SHORT, BLOCK + 5, 300_001])
def test_a_wrong_bit_is_found_wherever_it_is(size: int) -> None:
    chance = random.Random(size)
    content = chance.randbytes(size)
    frame = create_compressor("store").compress(content)
    bits = [*range(8 * 16), *(chance.randrange(8 * 16, 8 * len(frame)) for _ in range(60))]
    unused = 8 * 4 + 4  # a bit of the descriptor that decoders do not look at
    for bit in (*bits, *range(8 * len(frame) - 64, 8 * len(frame))):
        harmed = bytearray(frame)
        harmed[bit // 8] ^= 1 << bit % 8
        if bit == unused:
            assert zstandard.ZstdDecompressor().decompress(harmed) == content
            continue
        with pytest.raises(Damaged):
            seekable.decompress(harmed, memoryview(bytearray(size)))


@needs_library
def test_content_may_be_any_memory() -> None:
    rows = np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)
    rows.flags.writeable = False
    assert zstandard.ZstdDecompressor().decompress(create_compressor("store").compress(rows.data)) == rows.tobytes()


def test_short_contents_and_those_without_a_library_are_compressed_by_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    text = b"the head of a file, " * 100
    assert len(create_compressor("store").compress(text)) < len(text) // 4
    plain_frames.load_functions.cache_clear()
    monkeypatch.setenv(SWITCH, "off")
    try:
        content = random.Random(1).randbytes(BLOCK + 5)
        frame = create_compressor("store").compress(content)
        assert zstandard.ZstdDecompressor().decompress(frame) == content
        assert frame == seekable.create_compressor(plain_frames.LEVEL).compress(content)
    finally:
        plain_frames.load_functions.cache_clear()

"""Sums of blocks: those of XXH3, the same in every form, and other ones for another content."""

from __future__ import annotations

import random

import numpy as np
import pytest

from adapters.models.kernels.cpu.native.native_library import find_library
from adapters.store.files.block_sums import BLOCK_BYTES, SUM_BYTES, count_blocks, sum_blocks, sum_with_numpy
from adapters.store.files.frames_library import load_functions

needs_library = pytest.mark.skipif(find_library() is None, reason="no compiled library")
FORMS = {"any processor": 0, "AVX2": 1, "AVX-512": 2}
SIZES = (
    *(1, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 65_536),
    *(BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 5_000),
)
# Of the bytes `7 * n + n // 256`, by version 0.8.4 of the library's own code (XXH3_128bits).
PUBLISHED = {
    256: "2f433606b2ebce2dff5a1cefade75bb9",
    1024: "a3da96fbd688736171bee625238addb4",
    1025: "a53cd4fd16206676d9b414f4e1bbf7ad",
    BLOCK_BYTES: "3de71a1264ac4548ab646508cda6bf91",
}


def make_content(size: int) -> np.ndarray:
    numbers = np.arange(size, dtype=np.uint64)
    return (7 * numbers + numbers // 256).astype(np.uint8)


def sum_in_form(content: np.ndarray, form: int) -> bytes | None:
    compiled = load_functions()
    assert compiled is not None
    sums = np.zeros(SUM_BYTES * count_blocks(content.nbytes), np.uint8)
    failed = compiled.rekindle_sum_blocks(content.ctypes.data, content.nbytes, BLOCK_BYTES, sums.ctypes.data, form)
    return None if failed else sums.tobytes()


@pytest.mark.parametrize("size", PUBLISHED)
def test_sums_are_those_of_xxh3(size: int) -> None:
    expected = bytes.fromhex(PUBLISHED[size])[::-1]  # it writes the highest byte first
    assert sum_blocks(make_content(size).data) == sum_with_numpy(make_content(size)) == expected


@needs_library
@pytest.mark.parametrize("beyond", [0, 1, 13])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_sums(form: str, beyond: int) -> None:
    """Wherever the content begins in memory."""
    for size in SIZES:
        content = np.random.default_rng(size).integers(0, 256, size + beyond, dtype=np.uint8)[beyond:]
        found = sum_in_form(content, FORMS[form])
        if found is None:
            pytest.skip(f"this processor has no {form}")
        assert found == sum_with_numpy(content), size


@needs_library
def test_a_form_that_no_processor_has_is_refused() -> None:
    assert sum_in_form(make_content(300), len(FORMS)) is None


@pytest.mark.parametrize("size", [5, 256, 1500, BLOCK_BYTES + 70])
def test_a_wrong_bit_gives_another_sum_of_its_block_only(size: int) -> None:
    chance = random.Random(size)
    content = make_content(size)
    sums = sum_blocks(content.data)
    for bit in chance.sample(range(8 * size), 40):
        harmed = content.copy()
        harmed[bit // 8] ^= 1 << bit % 8
        found = sum_blocks(harmed.data)
        changed = [at // SUM_BYTES for at in range(0, len(sums), SUM_BYTES) if found[at:][:16] != sums[at:][:16]]
        assert changed == [bit // 8 // BLOCK_BYTES]


def test_parts_in_another_order_give_another_sum() -> None:
    content = make_content(BLOCK_BYTES)
    sums = sum_blocks(content.data)
    for size in (8, 64, 1024, 16_384):
        swapped = content.copy()
        swapped[:size] = content[size : 2 * size]
        swapped[size : 2 * size] = content[:size]
        assert sum_blocks(swapped.data) != sums

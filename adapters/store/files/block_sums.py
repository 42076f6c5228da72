"""Sums of the blocks of stored rows: XXH3 with 128 bits over every 128 KiB of the content of a frame.

The compiled library takes them (sums.h). Where there is none, numpy does. It multiplies all stretches of a block at
once, and scrambles the lanes of all blocks together, stretch by stretch. A block of fewer than LEAST_SUMMED bytes is
summed with zeros behind it, since XXH3 has other rules for short contents. That is safe here: the length of every
content follows from its run.

https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from adapters.store.files.frames_library import load_functions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Words: TypeAlias = NDArray[np.uint64]

BLOCK_BYTES = 128 << 10  # the most that a block of a zstd frame may have
SUM_BYTES = 16
LEAST_SUMMED = 256  # bytes
STRIPE = 64  # bytes that are added to the lanes at once
STRETCH = 1024  # bytes between two scrambles
# Where in SECRET the keys of these operations begin.
SCRAMBLED_WITH = 128
LAST_WITH = 121
MERGED_WITH = 11
MERGED_LAST_WITH = 117
SWAPPED = (1, 0, 3, 2, 5, 4, 7, 6)
WORD = (1 << 64) - 1
PRIME_32_1 = 0x9E3779B1
PRIME_64_1 = 0x9E3779B185EBCA87
PRIME_64_2 = 0xC2B2AE3D27D4EB4F
AVALANCHE = 0x165667919E3779F9
LANES = (
    *(0xC2B2AE3D, PRIME_64_1, PRIME_64_2, 0x165667B19E3779F9),
    *(0x85EBCA77C2B2AE63, 0x85EBCA77, 0x27D4EB2F165667C5, PRIME_32_1),
)
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)


def count_blocks(content: int) -> int:
    return -(-content // BLOCK_BYTES)


def sum_blocks(data: bytes | bytearray | memoryview) -> bytes:
    """Return the sums of the blocks of a content, end to end. The interpreter is free meanwhile."""
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    content = np.frombuffer(data, np.uint8)
    compiled = load_functions()
    if compiled is None:
        return sum_with_numpy(content)
    sums = np.empty(SUM_BYTES * count_blocks(content.nbytes), np.uint8)
    compiled.rekindle_sum_blocks(content.ctypes.data, content.nbytes, BLOCK_BYTES, sums.ctypes.data, -1)
    return sums.tobytes()


def sum_with_numpy(content: NDArray[np.uint8]) -> bytes:
    """Return the same sums without the library."""
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    whole = len(content) // BLOCK_BYTES * BLOCK_BYTES
    rest = content[whole:]
    sums = sum_rows(content[:whole].reshape(-1, BLOCK_BYTES)) if whole else b""
    if len(rest):
        padding = np.zeros(max(0, LEAST_SUMMED - len(rest)), np.uint8)
        sums += sum_rows(np.concatenate([rest, padding])[None])
    return sums


def sum_rows(blocks: NDArray[np.uint8]) -> bytes:
    """Return the sum of each row of a matrix of bytes. Its rows have at least LEAST_SUMMED bytes."""
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    count, size = blocks.shape
    stretches = (size - 1) // STRETCH
    stripes = (size - 1) % STRETCH // STRIPE
    begin = stretches * STRETCH
    rest = blocks[:, begin : begin + stripes * STRIPE].reshape(count, stripes, STRIPE)
    last = blocks[:, -STRIPE:].reshape(count, 1, STRIPE)
    keys = np.stack([view_secret(8 * stripe) for stripe in range(STRETCH // STRIPE)])
    # One block after the other, so that intermediate arrays stay in the processor's cache.
    parts = [add_stripes(block[:begin].reshape(stretches, STRETCH // STRIPE, STRIPE), keys) for block in blocks]
    added = np.stack(parts)
    lanes = np.tile(np.array(LANES, np.uint64), (count, 1))
    for stretch in range(stretches):
        lanes += added[:, stretch]
        lanes ^= lanes >> np.uint64(47)
        lanes ^= view_secret(SCRAMBLED_WITH)
        lanes *= np.uint64(PRIME_32_1)
    lanes += add_stripes(rest, keys[:stripes])
    lanes += add_stripes(last, view_secret(LAST_WITH)[None])
    return b"".join(merge_halves(row, size) for row in lanes.tolist())


def view_secret(at: int) -> Words:
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    return np.frombuffer(SECRET, "<u8", 8, at)


def add_stripes(stripes: NDArray[np.uint8], keys: Words) -> Words:
    """Return what the stripes of each group add to its lanes. stripes: bytes by group, stripe and byte."""
    import numpy as np  # noqa: PLC0415 - who only looks at a folder need not wait for it

    words = np.ascontiguousarray(stripes).view("<u8")
    keyed = words ^ keys
    products = (keyed & np.uint64(0xFFFFFFFF)) * (keyed >> np.uint64(32))
    swapped = words.sum(axis=1, dtype=np.uint64)[:, SWAPPED]
    total: Words = products.sum(axis=1, dtype=np.uint64) + swapped
    return total


def merge_halves(lanes: list[int], size: int) -> bytes:
    """Return the sum that the lanes of a content of this size give, its lower half first."""
    low = merge_lanes(lanes, MERGED_WITH, size * PRIME_64_1)
    high = merge_lanes(lanes, MERGED_LAST_WITH, ~(size * PRIME_64_2))
    return (high << 64 | low).to_bytes(SUM_BYTES, "little")


def merge_lanes(lanes: list[int], secret: int, start: int) -> int:
    keys = [int.from_bytes(SECRET[at : at + 8], "little") for at in range(secret, secret + 64, 8)]
    keyed = [lane ^ key for lane, key in zip(lanes, keys, strict=True)]
    found = start
    for left, other in zip(keyed[::2], keyed[1::2], strict=True):
        product = left * other
        found += (product ^ product >> 64) & WORD
    found &= WORD
    found = (found ^ found >> 37) * AVALANCHE & WORD
    return found ^ found >> 32

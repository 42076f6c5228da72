"""The compiled library: found, checked against its sources and loaded, or the reason why there is none."""

from __future__ import annotations

import ctypes
import hashlib
import os
from functools import cache
from pathlib import Path
from time import perf_counter

import torch
from attrs import frozen

FOLDER = Path(__file__).parent
SOURCES = (
    *("numbers.h", "pool.h", "tiles.h", "steps.h", "fixed.h", "rows.h", "recurrent.h", "odds.h", "keys.h"),
    *(
        "amx.h",
        "attention.h",
        "delta.h",
        "packed.h",
        "experts.h",
        "layers.h",
        "draw.h",
        "rounds.h",
        "texts.h",
        "sums.h",
        "frames.h",
        "products.c",
    ),
)
FILE = "librekindle.so"
SWITCH = "REKINDLE_NATIVE"
PAIRS = 3  # the level with instructions for pairs of bfloat16
TILES = 4  # the level with AMX's instruction for tiles of bfloat16
TIMED = 8  # measurements of each level, of which the quickest counts; 0.5 ms in all
_SWITCHED = {"on": True, "off": False}


@frozen(eq=False)
class NativeLibrary:
    """The loaded library. code: its functions. brief: the same, for calls of a few microseconds.

    A call of `brief` keeps the interpreter. A call of `code` lets go of it, and to get it back may take longer than a
    brief call itself.

    level: the best instructions that this processor has: 4 AMX, 3 AVX-512 with pairs of bfloat16, 2 AVX-512, 1 AVX2
    with FMA, 0 none of these. serving: the level that serves here. All levels give the same bits, except that level 4
    has an arithmetic of its own (amx.h): for rows and weights in bfloat16, and for attention to keys and values in
    bfloat16.
    """

    code: ctypes.CDLL
    brief: ctypes.PyDLL
    level: int
    serving: int

    def find_level(self, dtype: torch.dtype) -> int:
        """Return the level that serves a model in `dtype`.

        Only models in bfloat16 have the arithmetic of level 4, whatever form keys and values are kept in.
        """
        return self.serving if dtype == torch.bfloat16 else min(self.serving, PAIRS)

    def name_arithmetic(self, dtype: torch.dtype) -> str:
        """Return a name of the arithmetic that serves a model in `dtype` here."""
        return "native-amx-attention" if self.find_level(dtype) >= TILES else "native"


def is_enabled() -> bool:
    """Return whether the environment allows the library. Raises ValueError for a value that it does not know."""
    said = os.environ.get(SWITCH, "on")
    if said not in _SWITCHED:
        raise ValueError(f"{SWITCH}={said[:80]}: accepted: {', '.join(_SWITCHED)}")
    return _SWITCHED[said]


def find_library() -> NativeLibrary | None:
    """Return the library, or None where there is none or the environment turns it off."""
    return load_library()[0] if is_enabled() else None


def explain_missing() -> str:
    """Return why no library serves; empty if one does."""
    return load_library()[1] if is_enabled() else f"turned off by {SWITCH}"


@cache
def load_library() -> tuple[NativeLibrary | None, str]:
    return open_library(FOLDER)


def declare_products(code: ctypes.CDLL) -> None:
    """Declare what the functions for products, chosen experts and loops take and return."""
    number = ctypes.c_int
    pointer = ctypes.c_void_p
    size = ctypes.c_long
    code.rekindle_pack.argtypes = [pointer, pointer, size, size, number, number]
    code.rekindle_pack.restype = None
    code.rekindle_product.argtypes = [
        *(pointer, number, size, size, pointer, pointer, number, size, size),
        *(pointer, size, number, number, number),
    ]
    code.rekindle_pack_steps.argtypes = [*[pointer] * 6, size, size, pointer, number]
    code.rekindle_pack_steps.restype = None
    code.rekindle_packed_product.argtypes = [
        *(pointer, number, size, size, pointer, pointer, pointer, size, size),
        *(pointer, size, number, number, number),
    ]
    code.rekindle_experts.argtypes = [
        *(pointer, pointer, size, pointer, number, size, pointer, pointer, size, size, number, pointer),
        *(number, number),
    ]
    code.rekindle_choose.argtypes = [
        *(pointer, size, pointer, size, size, size, size, number, pointer, pointer),
    ]
    code.rekindle_choose.restype = None
    code.rekindle_expect_loop.argtypes = [size]
    code.rekindle_expect_loop.restype = None


def declare_frames(code: ctypes.CDLL) -> None:
    """Declare what sums.h and frames.h have."""
    number = ctypes.c_int
    pointer = ctypes.c_void_p
    size = ctypes.c_long
    name = ctypes.c_char_p
    code.rekindle_sum_blocks.argtypes = [pointer, size, size, pointer, number]
    code.rekindle_sum_blocks.restype = number
    code.rekindle_pack_head.argtypes = [pointer, size, pointer]
    code.rekindle_pack_head.restype = None
    code.rekindle_pack_rows.argtypes = [pointer, size, pointer, pointer]
    code.rekindle_pack_rows.restype = None
    code.rekindle_read_frames.argtypes = [number, size, pointer, size, size, pointer]
    code.rekindle_read_frames.restype = size
    code.rekindle_read_files.argtypes = [number, pointer, size, number]
    code.rekindle_read_files.restype = size
    code.rekindle_begin_file.argtypes = [name, size, pointer, size, size, pointer]
    code.rekindle_begin_file.restype = number
    code.rekindle_end_file.argtypes = [number, name, name, number, name, size, name, size]
    code.rekindle_end_file.restype = number


def open_library(folder: Path) -> tuple[NativeLibrary | None, str]:
    """Return the library of a folder and an empty text, or None and the reason. It must have been compiled from the
    sources there.
    """
    try:
        sources = b"\0".join((folder / name).read_bytes() for name in SOURCES)
        code = ctypes.CDLL(str(folder / FILE))
        code.rekindle_sources.restype = ctypes.c_char_p
        made_of = code.rekindle_sources().decode("ascii", "replace")
    except (OSError, AttributeError):
        return None, "no compiled products in this installation: it had no C compiler, or they are not for this system"
    if made_of != hashlib.blake2b(sources, digest_size=8).hexdigest():
        return None, "the compiled products are not of this version's sources: install again"
    declare_products(code)
    number = ctypes.c_int
    pointer = ctypes.c_void_p
    size = ctypes.c_long
    real = ctypes.c_float
    code.rekindle_norm.argtypes = [*[pointer] * 4, size, size, number, number, real, number, number]
    code.rekindle_norm.restype = None
    code.rekindle_heads.argtypes = [
        *(pointer, size, size, size, size, size, pointer, pointer, pointer, pointer, size, pointer, pointer),
        *(pointer, pointer, size, size, size, pointer, number, number, number, number, real, number, number),
    ]
    code.rekindle_heads.restype = None
    code.rekindle_attend.argtypes = [
        *(pointer, size, size, size, size, pointer, pointer, pointer, pointer, pointer, size, size, size),
        *(number, number, pointer, number, pointer, real, number, number),
    ]
    code.rekindle_convolve.argtypes = [
        *(pointer, size, size, size, size, size, pointer, pointer, pointer, pointer, pointer, pointer, size),
        *(pointer, pointer, pointer, number, number, number, number),
    ]
    code.rekindle_convolve.restype = None
    code.rekindle_delta.argtypes = [
        *(pointer, pointer, size, size, size, size, size, size),
        *(pointer, pointer, pointer, pointer, pointer, pointer, pointer, size),
        *(pointer, pointer, pointer, pointer, pointer, pointer, number, number, number, number),
    ]
    code.rekindle_delta.restype = None
    code.rekindle_fold.argtypes = [
        *(size, size, size, size, size, size, pointer, pointer, pointer, pointer, number, number),
    ]
    code.rekindle_fold.restype = None
    code.rekindle_gated.argtypes = [
        *(pointer, pointer, size, size, size, size, pointer, pointer, number, real, number, number),
    ]
    code.rekindle_gated.restype = None
    code.rekindle_layers.argtypes = [
        *(pointer, pointer, size, size, pointer, pointer, pointer, pointer, pointer, pointer, number, number, number),
    ]
    code.rekindle_context.argtypes = [*(pointer, pointer, size, size, pointer, pointer, pointer, number, number)]
    code.rekindle_logits.argtypes = [pointer, pointer, size, size, number, pointer, number, number]
    code.rekindle_draw.argtypes = [pointer, size, size, pointer, number, number]
    code.rekindle_round.argtypes = [pointer, number, number]
    brief = ctypes.PyDLL(str(folder / FILE))
    for calls in (code, brief):
        declare_frames(calls)
        calls.rekindle_match_texts.argtypes = [pointer, size]
        calls.rekindle_match_texts.restype = None
        calls.rekindle_match_appended.argtypes = [pointer, pointer, pointer, pointer, size]
        calls.rekindle_match_appended.restype = ctypes.c_int64
        calls.rekindle_find_branch.argtypes = [pointer, size]
        calls.rekindle_find_branch.restype = None
    level = code.rekindle_level()
    return NativeLibrary(code, brief, level, choose_level(code, level)), ""


def choose_level(code: ctypes.CDLL, level: int) -> int:
    """Return the quickest level of those that the processor has.

    Tiles always serve where they are, because the bits of products depend on them. Where there are pairs of bfloat16,
    one instruction for a pair may take longer than the two for its floats. So both are timed in turn, with products of
    a chunk's rows that fit into the cache.
    """
    if level != PAIRS:
        return level
    rows = 48
    terms = 256
    outputs = 128
    x, weight, out = ((ctypes.c_uint16 * count)() for count in (rows * terms, terms * outputs, rows * outputs))

    def measure(tried_level: int) -> float:
        begun = perf_counter()
        code.rekindle_product(x, 1, rows, terms, weight, None, 1, outputs, terms, out, outputs, 1, 1, tried_level)
        return perf_counter() - begun

    times = [(measure(PAIRS), measure(PAIRS - 1)) for _ in range(TIMED)]
    pairs, floats = map(min, zip(*times, strict=True))
    return PAIRS if pairs <= floats else PAIRS - 1

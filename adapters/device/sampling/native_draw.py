"""Tokens picked from rows of logits in one call of the compiled library: to the bit what `sampling.picking` finds."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from adapters.device.sampling.exact_exp import factors
from adapters.device.sampling.grammar_mask import Mask
from adapters.device.sampling.noise import key_of
from adapters.models.kernels.cpu.native.library import NativeCode
from effects.job import Sampling

_ASKED, _FOUND = Struct("@3Pl3dq2lP"), Struct("@2dl")  # one behind the other, as draw.h has them
_SIZE = _ASKED.size + _FOUND.size


def found_at_once(
    native: NativeCode, level: int, raw: Tensor, used: Tensor, wanted: Sequence[tuple[Sampling, int, Mask | None]]
) -> list[tuple[list[float], list[float]]]:
    """Of each row its token, its lowest and its highest logit; and what `sampling.logprobs` has of it, if it is asked.

    raw, used: float32 `[R, V]` on a host, the model's logits and with bias and penalties, or the same tensor twice.
    wanted: of each row how its token is picked, the token's position, and a bit for each that may follow, where not all
    may. level: of instructions, at most the library's own. Raises ValueError for anything else: the library checks
    nothing.
    """
    rows, vocab = raw.shape
    if raw.dtype is not torch.float32 or raw.is_cuda or not vocab or rows != len(wanted):
        raise ValueError(f"logits: {raw.dtype} {list(raw.shape)} for {len(wanted)} draws")
    plain, raw = used is raw, raw if raw.is_contiguous() else raw.contiguous()
    if plain:
        used = raw
    elif used.dtype is not torch.float32 or used.is_cuda or used.shape != raw.shape:
        raise ValueError(f"logits: {used.dtype} {list(used.shape)} beside {list(raw.shape)}")
    used = used if used.is_contiguous() else used.contiguous()
    draws = ctypes.create_string_buffer(rows * _SIZE)
    told: dict[int, ctypes.Array[ctypes.c_double]] = {}
    kept: list[Mask] = []
    first, first_raw = used.data_ptr(), raw.data_ptr()
    for row, (sampling, position, mask) in enumerate(wanted):
        bits, known, most, into = 0, -1, sampling.logprobs, 0
        if mask is not None:
            kept.append(mask := np.ascontiguousarray(mask))
            bits, known = mask.ctypes.data, mask.nbytes
        if most >= 0:
            most = min(most, vocab)
            told[row] = (ctypes.c_double * (2 + 2 * most))()
            into = ctypes.addressof(told[row])
        key, least, limit = 0, -math.inf, sampling.top_k
        if sampling.temperature:
            key = key_of(sampling.seed, position)
            least = math.log(sampling.min_p) if sampling.min_p else least
        at, limit = 4 * vocab * row, limit if 0 < limit < vocab else vocab
        warmth, mass = sampling.temperature, sampling.top_p
        _ASKED.pack_into(
            draws, row * _SIZE, first + at, first_raw + at, bits, known, warmth, mass, least, key, limit, most, into
        )
    if native.code.rekindle_draw(draws, rows, vocab, factors_at(), torch.get_num_threads(), level):
        raise MemoryError(f"no memory to draw from {vocab} logits")
    found: list[tuple[list[float], list[float]]] = []
    for row in range(rows):
        lowest, highest, token = _FOUND.unpack_from(draws, row * _SIZE + _ASKED.size)
        found.append(([token, lowest, highest], list(told[row]) if row in told else []))
    return found


def factors_at() -> int:
    """The address of `exponent.factors`."""
    return _factors()[1]


@cache
def _factors() -> tuple[Tensor, int]:
    """The address is good as long as they are there."""
    found = factors("cpu")
    return found, found.data_ptr()

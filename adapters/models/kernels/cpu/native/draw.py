"""Tokens picked from rows of logits in one call of the compiled library (draw.h).

They are to the bit those that `HostSampling` finds with torch.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import cache
from struct import Struct

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.functions.exact_exp import exp_factors
from adapters.models.kernels.functions.noise import noise_key
from adapters.models.kernels.interfaces.sampling_interface import PickedRow, PickRequest, TokenMask

# `draw_t` of draw.h: what the library reads about a row, and behind it what it writes.
_ASKED = Struct("@3Pl3dq2lP")
_FOUND = Struct("@2dl")
_SIZE = _ASKED.size + _FOUND.size


@frozen(eq=False)
class NativePicker:
    """Implements `RowPicker`."""

    compiled: NativeLibrary

    def pick(self, raw: Tensor, used: Tensor, wanted: Sequence[PickRequest]) -> list[PickedRow]:
        return pick_rows(self.compiled, self.compiled.serving, raw, used, wanted)


def pick_rows(
    native: NativeLibrary, level: int, raw: Tensor, used: Tensor, wanted: Sequence[PickRequest]
) -> list[PickedRow]:
    """Pick one token for each row, as `RowPicker.pick` says.

    level: of instructions, at most the library's own. Raises ValueError for tensors that the library cannot read: it
    checks nothing itself.
    """
    rows, vocab = raw.shape
    if raw.dtype is not torch.float32 or raw.is_cuda or not vocab or rows != len(wanted):
        raise ValueError(f"logits: {raw.dtype} {list(raw.shape)} for {len(wanted)} draws")
    is_plain = used is raw
    raw = raw.contiguous()
    if is_plain:
        used = raw
    elif used.dtype is not torch.float32 or used.is_cuda or used.shape != raw.shape:
        raise ValueError(f"logits: {used.dtype} {list(used.shape)} with {list(raw.shape)}")
    used = used.contiguous()
    draws = ctypes.create_string_buffer(rows * _SIZE)
    details: dict[int, ctypes.Array[ctypes.c_double]] = {}
    masks: list[TokenMask] = []  # referenced until the call is over
    first = used.data_ptr()
    first_raw = raw.data_ptr()
    for row, (sampling, position, mask) in enumerate(wanted):
        mask_address = 0
        mask_bytes = -1
        if mask is not None:
            mask = np.ascontiguousarray(mask)  # noqa: PLW2901 - the library reads this copy
            masks.append(mask)
            mask_address = mask.ctypes.data
            mask_bytes = mask.nbytes
        count = sampling.logprobs
        details_address = 0
        if count >= 0:
            count = min(count, vocab)
            details[row] = (ctypes.c_double * (2 + 2 * count))()
            details_address = ctypes.addressof(details[row])
        key = 0
        least = -math.inf
        if sampling.temperature:
            key = noise_key(sampling.seed, position)
            least = math.log(sampling.min_p) if sampling.min_p else least
        offset = 4 * vocab * row  # bytes
        _ASKED.pack_into(
            draws,
            row * _SIZE,
            first + offset,
            first_raw + offset,
            mask_address,
            mask_bytes,
            sampling.temperature,
            sampling.top_p,
            least,
            key,
            sampling.top_k if 0 < sampling.top_k < vocab else vocab,
            count,
            details_address,
        )
    if native.code.rekindle_draw(draws, rows, vocab, factors_address(), torch.get_num_threads(), level):
        raise MemoryError(f"no memory to draw from {vocab} logits")
    found: list[PickedRow] = []
    for row in range(rows):
        lowest, highest, token = _FOUND.unpack_from(draws, row * _SIZE + _ASKED.size)
        found.append(([token, lowest, highest], list(details[row]) if row in details else []))
    return found


def factors_address() -> int:
    """Return the address of `exact_exp.exp_factors` in host memory."""
    return _factors()[1]


@cache
def _factors() -> tuple[Tensor, int]:
    """Return the factors and their address, which is valid as long as this cache holds the tensor."""
    found = exp_factors("cpu")
    return found, found.data_ptr()

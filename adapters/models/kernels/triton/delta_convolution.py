"""The convolution of recurrent layers in Triton: each row with the three before it, by the weights called taps.

Rows of earlier steps are in a slot's ring, or at its edge; see `delta_rows`. A step of few rows has a program for each
row and some heads. It loads what earlier steps have left before it waits for the kernels before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.delta_factor import RING


@triton.jit
def _load_taps(taps_ptr, channel, known):
    """Load the four taps of some channels."""
    taps = ()
    for n in tl.static_range(4):
        taps = taps + (tl.load(taps_ptr + channel * 4 + n, known, 0.0),)  # noqa: RUF005 - Triton knows no other way
    return taps


@triton.jit
def _convolve_channels(
    mixed_ptr,
    taps,
    inputs_ptr,
    conv_ptr,
    slots_ptr,
    positions_ptr,
    row,
    slot,
    position,
    base,
    stride,
    channel,
    known,
    rolls,
    CHANNELS: tl.constexpr,
    ROLLS: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Return silu of the causal convolution over 4 inputs of some channels, the oldest first.

    Keep the row's own input if it may be rolled back. WAITS: kernels before this one may still run. What earlier steps
    have left is loaded before they end.
    """
    come = ()
    for n in tl.static_range(3):
        at = position - (3 - n)
        within = row >= 3 - n
        same = (at >= 0) & (tl.load(positions_ptr + row - (3 - n), within, -1) == at)
        same = same & (tl.load(slots_ptr + row - (3 - n), within, -1) == slot)
        ring = inputs_ptr + (slot * RING + tl.maximum(at, 0) % RING) * CHANNELS
        edge = conv_ptr + (slot * 3 + at - base + 3) * CHANNELS
        source = tl.where(at >= base, ring, edge)
        come = come + ((same, tl.load(source + channel, known & (at >= 0) & ~same, 0.0)),)  # noqa: RUF005
    if WAITS:
        gdc_wait()
    acc = tl.zeros(channel.shape, tl.float32)
    for n in tl.static_range(3):
        same, x = come[n]
        here = mixed_ptr + (row - (3 - n)) * stride
        x = tl.where(same, tl.load(here + channel, known & same, 0.0), x)
        acc += x.to(tl.float32) * taps[n]
    x = tl.load(mixed_ptr + row * stride + channel, known, 0.0)
    acc += x.to(tl.float32) * taps[3]
    if ROLLS:
        ring = inputs_ptr + (slot * RING + position % RING) * CHANNELS
        tl.store(ring + channel, x, known & rolls)
    return acc / (1.0 + tl.exp(-acc))


@triton.jit
def _follow_each_other(slots_ptr, positions_ptr, settled_ptr, first, ROWS: tl.constexpr, ROLLS: tl.constexpr):
    """Are the three rows before row `first`, and ROWS from there on, rows of one sequence that settle, in order?

    Then no row needs what earlier steps have left, and none is kept.
    """
    n = tl.arange(0, 16)
    within = n < ROWS + 3
    row = first - 3 + n
    inside = within & (row >= 0)
    slot = tl.load(slots_ptr + row, inside, -1)
    position = tl.load(positions_ptr + row, inside, -1)
    differ = (slot != tl.load(slots_ptr + first)) | (position != tl.load(positions_ptr + first) - 3 + n)
    if ROLLS:
        differ = differ | ((n >= 3) & (tl.load(settled_ptr + row, inside, 0) == 0))
    return (tl.sum((differ & within).to(tl.int32), 0) == 0) & (tl.load(positions_ptr + first) >= 0)


@triton.jit
def _convolve_together(
    mixed_ptr, taps, out_ptr, stride, first, channel, known, CHANNELS: tl.constexpr, NORMED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Convolve ROWS rows that follow each other and the three before them. All are requested at once."""
    come = ()
    for n in tl.static_range(ROWS + 3):
        come = come + (tl.load(mixed_ptr + (first - 3 + n) * stride + channel, known, 0.0),)  # noqa: RUF005
    for number in tl.static_range(ROWS):
        acc = tl.zeros(channel.shape, tl.float32)
        for n in tl.static_range(4):
            acc += come[number + n].to(tl.float32) * taps[n]
        x = acc / (1.0 + tl.exp(-acc))
        if NORMED:
            x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
        tl.store(out_ptr + (first + number) * CHANNELS + channel, x.to(out_ptr.dtype.element_ty), known)


@triton.jit
def _convolve_heads(
    mixed_ptr,
    taps_ptr,
    inputs_ptr,
    conv_ptr,
    kept_ptr,
    slots_ptr,
    positions_ptr,
    bases_ptr,
    settled_ptr,
    out_ptr,
    stride,
    first,
    channel,
    known,
    is_kept,
    CHANNELS: tl.constexpr,
    KEPT_FROM: tl.constexpr,
    NORMED: tl.constexpr,
    ROWS: tl.constexpr,
    ROLLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve some heads of ROWS rows from `first` on. KEPT_FROM: the first channel that is kept behind the state."""
    WAITS: tl.constexpr = PDL and ROWS == 1  # after it has loaded what it can
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    taps = _load_taps(taps_ptr, channel, known)
    if PDL and ROWS > 1:
        gdc_wait()
    apart = ROWS
    if ROWS > 1:  # noqa: SIM102 - a constant
        if _follow_each_other(slots_ptr, positions_ptr, settled_ptr, first, ROWS, ROLLS):
            _convolve_together(mixed_ptr, taps, out_ptr, stride, first, channel, known, CHANNELS, NORMED, ROWS)
            apart = 0
    for number in range(apart):
        row = first + number
        position = tl.load(positions_ptr + row)
        if position >= 0:
            slot = tl.load(slots_ptr + row)
            base = tl.load(bases_ptr + row)
            rolls = tl.load(settled_ptr + row) == 0
            x = _convolve_channels(
                mixed_ptr, taps, inputs_ptr, conv_ptr, slots_ptr, positions_ptr, row, slot, position, base, stride,
                channel, known, rolls, CHANNELS, ROLLS, WAITS,
            )  # fmt: skip
            if NORMED:
                x = x * tl.rsqrt(tl.sum(x * x, 1) + 1e-6)[:, None]
            x = x.to(dtype)
            tl.store(out_ptr + row * CHANNELS + channel, x, known)
            if ROLLS:
                ring_at = kept_ptr + (slot * RING + position % RING) * (CHANNELS - KEPT_FROM) - KEPT_FROM
                tl.store(ring_at + channel, x, known & rolls & is_kept)
        elif WAITS:
            gdc_wait()


@triton.jit
def convolve(
    mixed_ptr,
    taps_ptr,
    inputs_ptr,
    conv_ptr,
    kept_ptr,
    slots_ptr,
    positions_ptr,
    bases_ptr,
    settled_ptr,
    out_ptr,
    stride,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr,
    ROLLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Convolve ROWS rows, AT_ONCE heads of q and k, or of v: convolution, silu, and q and k divided by their length.

    mixed, out: `[bucket, q | k | v]`. inputs: `[slots, 128, channels]`. conv: `[slots, 3, channels]`. kept: `[slots,
    128, k | v]`. settled: int64 `[bucket]`. ROLLS: the step may have rows that can be rolled back. Only those are
    stored in the ring here, because other rows of the ring may still be read.
    """
    if PDL:
        gdc_launch_dependents()
    queries: tl.constexpr = KEY_HEADS * DK
    channels: tl.constexpr = 2 * queries + HEADS * DV
    first = tl.program_id(0).to(tl.int64) * ROWS
    key_programs: tl.constexpr = (2 * KEY_HEADS + AT_ONCE - 1) // AT_ONCE
    if tl.program_id(1) < key_programs:
        head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
        known = (head < 2 * KEY_HEADS) & (tl.arange(0, DK)[None, :] < DK)
        _convolve_heads(
            mixed_ptr, taps_ptr, inputs_ptr, conv_ptr, kept_ptr, slots_ptr, positions_ptr, bases_ptr, settled_ptr,
            out_ptr, stride, first, head * DK + tl.arange(0, DK)[None, :], known, head >= KEY_HEADS, channels, queries,
            True, ROWS, ROLLS, PDL,
        )  # fmt: skip
    else:  # names of their own: heads of values may have another size
        value_head = (tl.program_id(1) - key_programs) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
        of_value = (value_head < HEADS) & (tl.arange(0, DV)[None, :] < DV)
        column = 2 * queries + value_head * DV + tl.arange(0, DV)[None, :]
        _convolve_heads(
            mixed_ptr, taps_ptr, inputs_ptr, conv_ptr, kept_ptr, slots_ptr, positions_ptr, bases_ptr, settled_ptr,
            out_ptr, stride, first, column, of_value, of_value, channels, queries, False, ROWS, ROLLS, PDL,
        )  # fmt: skip

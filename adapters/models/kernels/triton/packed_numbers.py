"""The numbers that packed words stand for, in registers, as the tensor cores read them.

Words lie as the registers of the tensor cores need their numbers, so nothing moves between lanes. Of every 16 columns
of its row, lane t of four has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and it loads four words together. The work
of the lanes has the shape `[pieces, rows, 4 lanes, 4 words]`. A block is the columns of a row's words. Eight rows lie
side by side, block after block, so that one load brings whole lines. `packed_levels` says how their scales lie.

Words of E2M1 (MXFP4) are an exception: both numbers of a pair are moved to bfloat16 by one instruction, so they lie 16
bits apart.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adapters.models.kernels.triton.packed_levels import (
    find_power,
    is_scaled,
    put_in_mantissa,
    raised_scales_of,
    scale_of_e2m1,
    scales_of,
)


@gluon.jit
def _number(word, AT: gl.constexpr, FORM: gl.constexpr):
    """Return the number that step AT of a word stands for, exactly, in float32; for E4M3 2 ** -120 of it.

    Whole numbers are put into the mantissa of a power of two, which is subtracted again.
    """
    if FORM.steps == "e4m3":
        # Sign, exponent and mantissa go where float32 has them; subnormal numbers come out right, too.
        return (((word << (24 - 8 * AT)) >> 4) & -0x78100000).to(gl.float32, bitcast=True)
    WIDTH: gl.constexpr = FORM.width
    SHIFT: gl.constexpr = 0 if (AT + 1) * WIDTH <= 23 else 12 if WIDTH == 4 else 16
    PLACE: gl.constexpr = AT * WIDTH - SHIFT
    MASK: gl.constexpr = ((1 << WIDTH) - 1) << PLACE
    OFFSET: gl.constexpr = 128 if WIDTH == 8 else 8 if FORM.steps == "int4" else 0
    if SHIFT > 0:
        word = word >> SHIFT
    bits = _mask_bits(word, MASK, (127 + 23 - PLACE) << 23)
    return bits.to(gl.float32, bitcast=True) - (2.0 ** (23 - PLACE) + OFFSET)


@gluon.jit
def _mask_bits(word, MASK: gl.constexpr, BITS: gl.constexpr):
    """Return word & MASK | BITS in one instruction, where the compiler takes two."""
    return gl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xea;", "=r,r,n,r", [word, MASK, BITS], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _look_up(word):
    """Return a byte for each of a word's lower four steps: IQ4's table entry plus 128."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 place, low, high, from;
        and.b32 place, $1, 0x7777;
        prmt.b32 low, 0x3f2d1801, 0x766a5d4f, place;
        prmt.b32 high, 0xa6998d81, 0xf1d9c5b5, place;
        and.b32 from, $1, 0x8888;
        shr.u32 from, from, 1;
        or.b32 from, from, 0x3210;
        prmt.b32 $0, low, high, from;
        }""",
        "=r,r",
        [word],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _four_bytes(word, scales):
    """Return 2 ** -EXPONENT of a word's numbers, as `_four` does.

    As bits of a float32, a whole number below 2 ** 24 is 2 ** -149 of itself, whatever its leading bit is. So a byte
    only needs to be moved to where its scale expects it.
    """
    factor, _ = scales
    below = factor * -(2.0**-126)  # 128 steps, 2 ** 16 times as great as steps, are stored more
    low = gl.join(_byte_times(word, 0, factor, below), _byte_times(word, 1, factor, below))
    high = gl.join(_byte_times(word, 2, factor, below), _byte_times(word, 3, factor, below))
    return gl.join(low, high)


@gluon.jit
def _byte_times(word, AT: gl.constexpr, factor, below):
    bits = gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,n",
        [word, 0, 0x4044 | AT << 8],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return gl.fma(bits.to(gl.float32, bitcast=True), factor, below)


@gluon.jit
def _pair_scales(levels, c, power, FORM: gl.constexpr):
    """Return what pairs of steps are multiplied with at the lower and at the upper place of a byte, and what is added.
    Each is rounded to bfloat16, and there twice.
    """
    factor, below = raised_scales_of(levels, c, power, 133, FORM)
    low = _round_twice(factor)
    eight: gl.constexpr = -0x7FF77FF8  # -8 * 2 ** -133, twice
    added = multiply_add_pairs(low, eight, -0x7FFF8000) if FORM.steps == "int4" else _round_twice(below)
    return low, multiply_add_pairs(low, 0x3D803D80, -0x7FFF8000), added  # a 16th


@gluon.jit
def _share_pair_scales(levels, words, power, FORM: gl.constexpr):
    """Return what `_pair_scales` does, of a form that `has_scale_of_word`. Each of the four lanes of a row computes
    the scales of one of the four words, and the others get them from it.
    """
    LAYOUT: gl.constexpr = words.type.layout
    LANE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(4, LAYOUT))))
    lane = gl.arange(0, 4, layout=LANE)[None, None, None, :, None]
    both = scales_of_words(levels, lane, power, FORM)
    both = gl.convert_layout(both.reshape(both.shape[:4]), gl.SliceLayout(3, LAYOUT))
    return _part_scales(both[:, :, :, None, :])


@gluon.jit
def scales_of_words(levels, c, power, FORM: gl.constexpr):
    """Return the scale of each word c in the lower half of a number, and what is added in the upper half, of a form
    that `has_scale_of_word`.
    """
    factor, below = raised_scales_of(levels, c, power, 133, FORM)
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [factor, below], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _part_scales(both):
    """Return what `_pair_scales` does of what `scales_of_words` returns. An instruction for pairs can read one half of
    a register as both operands.
    """
    low = _take_half(both, "{a, a}")
    return low, multiply_add_pairs(low, 0x3D803D80, -0x7FFF8000), _take_half(both, "{b, b}")  # a 16th


@gluon.jit
def numbers_of_words(words, both, dtype: gl.constexpr):
    """Return 2 ** -EXPONENT of the numbers of words, as `numbers_of` does. both: see `scales_of_words`."""
    scales = _part_scales(both)
    return gl.join(_four_paired(words, scales, True), _four_paired(words >> 8, scales, True)).to(dtype)


@gluon.jit
def _take_half(both, HALVES: gl.constexpr):
    """Return a half of a word twice. HALVES: a: the lower one. b: the upper one."""
    TEXT: gl.constexpr = _move_text(HALVES)
    return gl.inline_asm_elementwise(TEXT, "=r,r", [both], dtype=gl.int32, is_pure=True, pack=1)


@gluon.constexpr_function
def _move_text(halves):
    return "{ .reg .b16 a, b; mov.b32 {a, b}, $1; mov.b32 $0, " + halves + "; }"


@gluon.jit
def _round_twice(number):
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $1, $1;", "=r,r", [number], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def multiply_add_pairs(x, factor, added):
    """Return x * factor + added, for two numbers in bfloat16 each, rounded once."""
    return gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [x, factor, added], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _four_paired(word, scales, SCALED: gl.constexpr):
    """Return numbers of 16 columns in bfloat16, as `_four` does. word: their steps are in the lower half of each half.

    As bits of a bfloat16, a whole number below 256 is 2 ** -133 of itself, whatever its leading bit is.
    """
    low, high, added = scales
    first = multiply_add_pairs(word & 0x000F000F, low, added)
    second = multiply_add_pairs(word & 0x00F000F0, high, added)
    if not SCALED:
        first = multiply_add_pairs(first, 0x4F804F80, -0x7FFF8000)  # 2 ** EXPONENT
        second = multiply_add_pairs(second, 0x4F804F80, -0x7FFF8000)
    return gl.join(_split_pair(first), _split_pair(second))


@gluon.jit
def _split_pair(pair):
    """Return both numbers of pairs in bfloat16."""
    low = pair.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pair >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


@gluon.jit
def _value(word, AT: gl.constexpr, scales, power, FORM: gl.constexpr):
    factor, below = scales
    PLACE: gl.constexpr = AT // 2 + AT % 2 * 4 if FORM.is_paired else AT
    if FORM.fuses_scale:
        found = gl.fma(put_in_mantissa(word, AT, power), factor, factor * (-32896.0))
    else:
        found = _number(word, PLACE, FORM) * factor
    if FORM.least != "":
        found = found - below
    return found


@gluon.jit
def _four(word, AT: gl.constexpr, scales, power, FORM: gl.constexpr):
    """Return a word's numbers of 16 columns: ..., one of a pair, half of the 16."""
    FIRST: gl.constexpr = 0 if FORM.steps == "iq4" else AT
    if FORM.steps == "iq4":
        word = _look_up(word >> (4 * AT))
    if FORM.steps == "e4m3" and FORM.converts:
        a, b, d, e = _convert_e4m3(word)
        factor = scales[0]
        low = gl.join(a * factor, b * factor)
        high = gl.join(d * factor, e * factor)
    else:
        low = gl.join(_value(word, FIRST, scales, power, FORM), _value(word, FIRST + 1, scales, power, FORM))
        high = gl.join(_value(word, FIRST + 2, scales, power, FORM), _value(word, FIRST + 3, scales, power, FORM))
    return gl.join(low, high)


@gluon.jit
def _four_e2m1(word, AT: gl.constexpr, scale):
    """Return a word's numbers of 16 columns in bfloat16, as `_four` does."""
    return gl.join(_pair_e2m1(word, AT // 2, scale), _pair_e2m1(word, AT // 2 + 1, scale))


@gluon.jit
def _pair_e2m1(word, AT: gl.constexpr, scale):
    """Return pair AT of a word: a sign, two bits of exponent and one of mantissa become those of bfloat16.

    That is 2 ** -127 of twice the number, also where it is subnormal. Scales are stored 2 ** 127 times as great.
    `arrange_words` says where the bits are. Two pairs have been rotated. The four bits that those leave of a half are
    moved by one multiplication, which is the sum of three moves to the left.
    """
    if AT == 0:
        bits = word
    elif AT == 1:
        bits = _rotate(word, 3)
    elif AT == 2:
        bits = _rotate(word, 6)
    else:
        bits = (word & 0x001B001B) * 0x1084
    return _split_pair(multiply_add_pairs(bits & -0x7E3F7E40, scale, 0))


@gluon.jit
def _rotate(word, COUNT: gl.constexpr):
    """Rotate a word to the right."""
    return gl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $1, $2;", "=r,r,n", [word, COUNT], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _convert_e4m3(word):
    """Return the numbers that the four bytes of a word stand for in E4M3, float32."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, a, b;
        .reg .b32 pair;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mov.b32 {a, b}, pair;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mov.b32 {a, b}, pair;
        cvt.f32.f16 $2, a;
        cvt.f32.f16 $3, b;
        }""",
        "=r,=r,=r,=r,r",
        [word],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def numbers_of(
    words,
    levels,
    c,
    row,
    dtype: gl.constexpr,
    FORM: gl.constexpr,
    SCALED: gl.constexpr,
    SHARES: gl.constexpr = False,
):
    """Return the numbers of words `[..., lanes, words]`, one of a pair, half of 16 columns, and half of 32.

    levels: those of the first and of the second 16 of each 32 columns. c: the number of each word. row: see
    `find_power`. SCALED: return 2 ** -EXPONENT of the numbers, where `is_scaled` says so. SHARES: lanes share the work
    of scales, of a form that `has_scale_of_word` in bfloat16.
    """
    first, second = levels
    power = find_power(row)
    LINEAR: gl.constexpr = FORM.is_linear and SCALED and is_scaled(FORM, dtype)
    if FORM.steps == "e2m1":
        scale = scale_of_e2m1(first[0], c)
        found = gl.join(_four_e2m1(words, 0, scale), _four_e2m1(words, 4, scale))
    elif FORM.is_paired and dtype == gl.bfloat16:
        if SHARES:
            scales = _share_pair_scales(first, words, power, FORM)
            found = gl.join(_four_paired(words, scales, SCALED), _four_paired(words >> 8, scales, SCALED))
        else:
            found = _four_paired(words, _pair_scales(first, c, power, FORM), SCALED)
            found = gl.join(found, _four_paired(words >> 8, _pair_scales(second, c, power, FORM), SCALED))
    elif LINEAR:
        found = _four_bytes(words, raised_scales_of(first, c, power, 133, FORM))
    else:
        found = _four(words, 0, scales_of(first, c, power, FORM), power, FORM)
        if FORM.block == 128:
            found = gl.join(found, _four(words, 4, scales_of(second, c, power, FORM), power, FORM))
    return found.to(dtype)


@gluon.jit
def weights_of(packed, coordinates, dtype: gl.constexpr, FORM: gl.constexpr, SCALED: gl.constexpr):
    """Return loaded blocks as `[pieces, rows, block]` in the dtype of the computation. Their registers are those of the
    left side of a product, in another order. SCALED: as in `numbers_of`.
    """
    words, levels = packed
    n, _, c = coordinates
    found = numbers_of(words, levels, c, n, dtype, FORM, SCALED)
    return order_columns(found, FORM)


@gluon.jit
def order_columns(found, FORM: gl.constexpr):
    """Return numbers `[pieces, rows, lanes, words, ...]` as `[pieces, rows, block]`."""
    found = found.permute((0, 1, 3, 6, 5, 2, 4)) if FORM.block == 128 else found.permute((0, 1, 3, 5, 2, 4))
    return found.reshape((found.shape[0], found.shape[1], FORM.block))

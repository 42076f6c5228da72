"""The numbers that packed words stand for, in registers, as the tensor cores read them.

Words lie as the registers of the tensor cores need their numbers, so nothing moves between lanes. Of every 16 columns
of its row, lane t of four has columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, and it loads four words together. The work
of the lanes has the shape `[pieces, rows, 4 lanes, 4 words]`. A block is the columns of a row's words. Eight rows lie
side by side, block after block, and so do their levels, so that one load brings whole lines.

Words of E2M1 (MXFP4) are an exception: both numbers of a pair are moved to bfloat16 by one instruction, so they lie 16
bits apart.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@frozen
class BlockForm:
    """The layout of a packed matrix, as `StepLayout` has it. scale: Triton's dtype. block: columns of a block.
    converts: the device converts E4M3 by an instruction.
    """

    steps: str
    block: int
    group: int
    span: int
    scale: Any
    inner: bool
    least: str
    converts: bool  # the device has an instruction for E4M3

    @property
    def fuses_scale(self) -> bool:
        """True if one multiply-add can compute a byte's number times its scale. Its subtrahend has to be exact."""
        return self.steps == "int8" and not self.inner and self.scale.primitive_bitwidth == 16

    @property
    def width(self) -> int:
        """Bits of a step once it has been looked up."""
        return 4 if self.steps in {"uint4", "int4"} else 8


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
def _of_word(held, c, BLOCK: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Return the level of each word's group in float32."""
    if GROUP < BLOCK:
        COUNT: gl.constexpr = 2 if GROUP * 2 == BLOCK else 4
        held = held >> (c * COUNT // 4 * KIND.primitive_bitwidth).to(held.dtype)
        held = held.to(gl.int16).to(KIND, bitcast=True)
    return held.to(gl.float32)


@gluon.jit
def _times_whole(outer, held, c, power, BLOCK: gl.constexpr, GROUP: gl.constexpr, SCALE: gl.constexpr):
    """Return outer times the whole number of each word's group.

    Several of them are stored 128 greater in one number, and put into the mantissa of 2 ** 15. With a 16-bit scale
    what is subtracted again is exact.
    """
    if GROUP >= BLOCK:
        product = outer * held.to(gl.float32)
    else:
        COUNT: gl.constexpr = 2 if GROUP * 2 == BLOCK else 4
        number = _in_mantissa(held.to(gl.int32), c * COUNT // 4, power)
        if SCALE.primitive_bitwidth == 16:
            product = gl.fma(number, outer, outer * (-32896.0))
        else:
            product = outer * (number - 32896.0)
    return product


@gluon.jit
def _in_mantissa(word, at, power):
    """Return 2 ** 15, whose bits `power` has, plus byte `at` of a word."""
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [word, power, 0x7404 | at << 4], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def find_power(n):
    """Return the bits of 2 ** 15 for rows of numbers n, none of which is negative.

    An instruction that picks bytes has one constant. The compiler would take these bits for it, and spend another
    instruction on the number of the byte, each time. So the bits are made from n, which hides that they are constant.
    """
    return 0x47000000 | (n >> 31)


@gluon.jit
def _scales(levels, c, power, FORM: gl.constexpr):
    """Return what steps are multiplied with, and what is subtracted then."""
    scale, inner, least, own = levels
    outer = _of_word(scale, c, FORM.block, FORM.span, FORM.scale)
    factor = outer
    below = outer
    if FORM.inner:
        factor = _times_whole(outer, inner, c, power, FORM.block, FORM.group, FORM.scale)
    if FORM.least == "own":
        below = _of_word(own, c, FORM.block, FORM.span, FORM.scale)
    if FORM.least != "":
        below = _times_whole(below, least, c, power, FORM.block, FORM.group, FORM.scale)
    return factor, below


@gluon.jit
def _value(word, AT: gl.constexpr, scales, power, FORM: gl.constexpr):
    factor, below = scales
    if FORM.fuses_scale:
        found = gl.fma(_in_mantissa(word, AT, power), factor, factor * (-32896.0))
    else:
        found = _number(word, AT, FORM) * factor
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
def _scale_e2m1(held, c):
    """Return the scale of each word in both halves of a number."""
    pair = (held >> (c // 2 * 32).to(held.dtype)).to(gl.int32)
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $1, $2;", "=r,r,r", [pair, 0x1010 + c % 2 * 0x2222], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _four_e2m1(word, AT: gl.constexpr, scale):
    """Return a word's numbers of 16 columns in bfloat16, as `_four` does."""
    return gl.join(_pair_e2m1(word, AT // 2, scale), _pair_e2m1(word, AT // 2 + 1, scale))


@gluon.jit
def _pair_e2m1(word, AT: gl.constexpr, scale):
    """Return pair AT of a word: a sign, two bits of exponent and one of mantissa become those of bfloat16.

    That is 2 ** -127 of twice the number, also where it is subnormal. Scales are stored 2 ** 127 times as great.
    `arrange_words` says where the bits are. Three of four pairs are moved to the left only, which is a multiplication,
    so that the unit for logical operations has less to do.
    """
    if AT == 0:
        bits = word & -0x7E3F7E40
    elif AT == 1:
        bits = (word << 3) & -0x7E3F7E40
    elif AT == 2:
        bits = ((word << 1) & -0x7FFF8000) | ((word << 6) & 0x01C001C0)
    else:
        bits = ((word << 2) & -0x7FFF8000) | ((word >> 3) & 0x01C001C0)
    pair = gl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [bits, scale, 0], dtype=gl.int32, is_pure=True, pack=1
    )
    low = pair.to(gl.int16).to(gl.bfloat16, bitcast=True)
    high = (pair >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return gl.join(low, high)


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
def weights_of(packed, coordinates, dtype: gl.constexpr, FORM: gl.constexpr):
    """Return loaded blocks as `[pieces, rows, block]` in the dtype of the computation. Their registers are those of the
    left side of a product, in another order.
    """
    words, first, second = packed
    n, _, c = coordinates
    if FORM.steps == "e2m1":
        scale = _scale_e2m1(first[0], c)
        found = gl.join(_four_e2m1(words, 0, scale), _four_e2m1(words, 4, scale)).permute((0, 1, 3, 6, 5, 2, 4))
    else:
        power = find_power(n)
        found = _four(words, 0, _scales(first, c, power, FORM), power, FORM)
        if FORM.block == 128:
            found = gl.join(found, _four(words, 4, _scales(second, c, power, FORM), power, FORM))
            found = found.permute((0, 1, 3, 6, 5, 2, 4))
        else:
            found = found.permute((0, 1, 3, 5, 2, 4))
    return found.reshape((words.shape[0], words.shape[1], FORM.block)).to(dtype)

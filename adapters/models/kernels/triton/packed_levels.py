"""The levels of packed weights: where scales and minima lie, and what steps are multiplied with.

The levels of 128 columns of a row are some words, one of each plane. Levels of one kind lie together. Eight rows lie
side by side, `[rows / 8, columns / 128, planes, 8]`, so that one load brings whole lines.
"""

from __future__ import annotations

from typing import Any

from attrs import frozen
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@frozen
class LevelShare:
    """The place of a block's levels of one kind among those of 128 columns.

    bits: of a number. count: of numbers that words need at a time. first: the first bit. is_half: the block is half of
    the 128 columns, and so is its share. is_twofold: the first halves of each 32 columns have as many numbers as the
    second halves, which lie behind.
    """

    bits: int
    count: int
    first: int
    is_half: bool
    is_twofold: bool

    @property
    def size(self) -> int:
        """The bits of the numbers that words need at a time."""
        return self.bits * self.count


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
    def level_sizes(self) -> dict[str, tuple[int, int]]:
        """The levels of 128 columns of a row: the bits of a number, and how many numbers there are."""
        bits = self.scale.primitive_bitwidth
        scales = max(1, 128 // self.span)
        groups = max(1, 128 // self.group)
        found = {"scale": (bits, scales)}
        if self.inner:
            found["inner"] = (8, groups)
        if self.least:
            found["least"] = (8, groups)
        if self.least == "own":
            found["own"] = (bits, scales)
        return dict(sorted(found.items(), key=lambda one: -one[1][0] * one[1][1]))

    @property
    def planes(self) -> int:
        """The words that the levels of 128 columns of a row take."""
        return -(-sum(bits * count for bits, count in self.level_sizes.values()) // 32)

    def find_share(self, name: str) -> LevelShare:
        """Return where the levels of a block are. All sizes are powers of two and descend, so none lies across words
        that it does not fill.
        """
        place = 0
        for other, (bits, count) in self.level_sizes.items():
            if other == name:
                each = count * self.block // 128 if count > 1 else 1
                return LevelShare(bits, min(each, 4), place, count > each, each > 4)
            place += bits * count
        return LevelShare(0, 0, 0, is_half=False, is_twofold=False)

    @property
    def is_paired(self) -> bool:
        """True if steps are whole numbers of four bits. In bfloat16, two of them are computed by one instruction."""
        return self.steps in {"uint4", "int4"}

    @property
    def has_scale_of_word(self) -> bool:
        """True if each word of four bits has a whole scale and a whole minimum of its own. They take as many
        instructions as the numbers of the word.
        """
        return self.steps == "uint4" and self.inner and self.least == "own" and self.group * 4 == self.block

    @property
    def is_linear(self) -> bool:
        """True if bytes are multiplied as bits of a float32. A number is rounded once, which has to give what two
        roundings give.
        """
        return self.steps == "int8" and self.least == ""

    @property
    def width(self) -> int:
        """Bits of a step once it has been looked up."""
        return 4 if self.steps in {"uint4", "int4"} else 8


@gluon.constexpr_function
def is_scaled(form: BlockForm, dtype: Any) -> bool:
    """Return whether products multiply 2 ** -EXPONENT of the numbers, because that takes fewer instructions."""
    return dtype == gl.bfloat16 and (form.is_paired or form.is_linear)


@gluon.constexpr_function
def share_of(form: BlockForm, name: str) -> LevelShare:
    return form.find_share(name)


LARGEST_SCALE = 4.0  # of steps that are whole: their factors stay in range
EXPONENT = gl.constexpr(32)  # see `is_scaled`; it keeps factors in range, too


@gluon.jit
def _word_of(held, c, SHARE: gl.constexpr):
    """Return which of the two words that hold levels has the level of each word c of steps."""
    low, high = held
    return gl.where(c < 2, low, high) if SHARE.size == 64 else low


@gluon.jit
def _of_word(held, c, SHARE: gl.constexpr, KIND: gl.constexpr):
    """Return the level of each word's group in float32."""
    word = _word_of(held, c, SHARE)
    if SHARE.bits == 32:
        found = word.to(gl.float32, bitcast=True)
    else:
        bit = SHARE.first % 32 + c * SHARE.count // 4 * 16 % 32
        found = (word >> bit).to(gl.int16).to(KIND, bitcast=True).to(gl.float32)
    return found


@gluon.jit
def _times_whole(outer, held, c, power, SHARE: gl.constexpr, KIND: gl.constexpr):
    """Return outer times the whole number of each word's group.

    Whole numbers are stored 128 greater, and put into the mantissa of 2 ** 15. With a 16-bit scale what is subtracted
    again is exact.
    """
    number = put_in_mantissa(_word_of(held, c, SHARE), SHARE.first % 32 // 8 + c * SHARE.count // 4, power)
    return gl.fma(number, outer, outer * (-32896.0)) if KIND.primitive_bitwidth == 16 else outer * (number - 32896.0)


@gluon.jit
def put_in_mantissa(word, at, power):
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
def scales_of(levels, c, power, FORM: gl.constexpr):
    """Return what steps are multiplied with, and what is subtracted then."""
    scale, inner, least, own = levels
    outer = _of_word(scale, c, share_of(FORM, "scale"), FORM.scale)
    factor = outer
    below = outer
    if FORM.inner:
        factor = _times_whole(outer, inner, c, power, share_of(FORM, "inner"), FORM.scale)
    if FORM.least == "own":
        below = _of_word(own, c, share_of(FORM, "own"), FORM.scale)
    if FORM.least != "":
        below = _times_whole(below, least, c, power, share_of(FORM, "least"), FORM.scale)
    return factor, below


@gluon.jit
def raised_scales_of(levels, c, power, PLACE: gl.constexpr, FORM: gl.constexpr):
    """Return 2 ** (PLACE - EXPONENT) of what steps are multiplied with, and -2 ** -EXPONENT of what is subtracted."""
    scale, inner, least, own = levels
    outer = _of_word(scale, c, share_of(FORM, "scale"), FORM.scale)
    factor = outer * (2.0 ** (PLACE - EXPONENT))
    if FORM.inner:
        factor = _times_whole(factor, inner, c, power, share_of(FORM, "inner"), FORM.scale)
    below = outer * -(2.0**-EXPONENT)
    if FORM.least == "own":
        below = _of_word(own, c, share_of(FORM, "own"), FORM.scale) * -(2.0**-EXPONENT)
    if FORM.least != "":
        below = _times_whole(below, least, c, power, share_of(FORM, "least"), FORM.scale)
    return factor, below


@gluon.jit
def scale_of_e2m1(held, c):
    """Return the scale of each word in both halves of a number.

    A level is the exponent of a power of two, whose last bit comes first. In bfloat16 this bit is the first one of the
    lower byte, and the others are the upper byte, below the sign.
    """
    last = held[0] & -0x7F7F7F80
    others = held[0] & 0x7F7F7F7F
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [last, others, 0x4040 + c * 0x1111],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )

"""Codes of keys and values as bfloat16, which holds every code exactly, without conversion instructions.

These would be slow. So the bits of two codes become fractions of two numbers of a known exponent, and one addition or
product puts both right. `hopper_codes` uses this.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

INT8 = gl.constexpr(1)  # kinds of rows
FP8 = gl.constexpr(2)
INT4 = gl.constexpr(4)


@gluon.jit
def number_int8(word):
    """Return the four codes of each word as two words of two bfloat16 each.

    Seven bits of a code c are the fraction of 128 + c (or 256 + c, if c is negative); then 128 (or 256) is subtracted.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d;
        prmt.b32 a, $2, 0, 0x4140;
        prmt.b32 b, $2, 0, 0x4342;
        lop3.b32 c, a, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 d, a, 0x00800080, 0xc300c300, 0xea;
        add.rn.bf16x2 $0, c, d;
        lop3.b32 c, b, 0x007f007f, 0x43004300, 0xea;
        lop3.b32 d, b, 0x00800080, 0xc300c300, 0xea;
        add.rn.bf16x2 $1, c, d;
        }
        """,
        "=r,=r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def number_fp8(word):
    """Return the four codes (e4m3) of each word as two words of two bfloat16 each.

    The bits of a code become those of a bfloat16 whose exponent is too small by 120. The product with 2 ** 120 is
    exact.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, d, e;
        mov.b32 e, 0x7b807b80;
        prmt.b32 a, $2, 0, 0x1404;
        prmt.b32 b, $2, 0, 0x3424;
        shr.u32 c, a, 4;
        and.b32 c, c, 0x07f007f0;
        lop3.b32 d, a, 0x80008000, c, 0xea;
        mul.rn.bf16x2 $0, d, e;
        shr.u32 c, b, 4;
        and.b32 c, c, 0x07f007f0;
        lop3.b32 d, b, 0x80008000, c, 0xea;
        mul.rn.bf16x2 $1, d, e;
        }
        """,
        "=r,=r,r", [word], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def number_int4(word):
    """Return the eight codes of each word: those in lower halves of its bytes as two words of two bfloat16, and those
    in upper halves. Twice a code c is the fraction of 128 + 2 c; then 143 is subtracted.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c, e;
        mov.b32 e, 0xc30fc30f;
        prmt.b32 a, $4, 0, 0x4140;
        prmt.b32 b, $4, 0, 0x4342;
        shl.b32 c, a, 1;
        lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
        add.rn.bf16x2 $0, c, e;
        shl.b32 c, b, 1;
        lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
        add.rn.bf16x2 $1, c, e;
        shr.u32 c, a, 3;
        lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
        add.rn.bf16x2 $2, c, e;
        shr.u32 c, b, 3;
        lop3.b32 c, c, 0x001e001e, 0x43004300, 0xea;
        add.rn.bf16x2 $3, c, e;
        }
        """,
        "=r,=r,=r,=r,r", [word], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1)  # fmt: skip


@gluon.jit
def _join_pairs(first, second):
    return gl.join(first, second).reshape((first.shape[0], 2 * first.shape[1]))


@gluon.jit
def unpack_words(words, KIND: gl.constexpr):
    """Return the numbers of words of codes, `[rows, words]`, in the order of a row. Two bfloat16 are one int32."""
    if KIND == INT4:
        a, b, c, d = number_int4(words)
        halves = gl.join(_join_pairs(a, b), _join_pairs(c, d)).permute((0, 2, 1))
        numbers = halves.reshape((halves.shape[0], 2 * halves.shape[2]))
    elif KIND == FP8:
        a, b = number_fp8(words)
        numbers = _join_pairs(a, b)
    else:
        a, b = number_int8(words)
        numbers = _join_pairs(a, b)
    return numbers

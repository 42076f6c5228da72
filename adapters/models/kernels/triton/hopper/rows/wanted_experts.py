"""The experts with the largest logits of a row, found by every warp for itself.

A launch for the choice would take longer than the choice itself. A lane of a warp holds the logits of some experts as
integers with the same order. A warp finds the largest integer of its lanes by one instruction.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MOST_EXPERTS = 256  # eight for each lane
_LANES = 32


@gluon.constexpr_function
def _write_text(count, active, biased):
    """Return the instructions that find the `active` experts with the largest logits out of `count`.

    Lane e of a warp has the experts e, e + 32, and so on. biased: a correction is added to each logit.
    """
    logits = f"${active}"
    correction = f"${active + 1}"
    places = range(-(-count // _LANES))
    keys = ", ".join(f"key{place}, own{place}" for place in places)
    text = f"""{{
        .reg .b32 {keys};
        .reg .b32 lane, best, found, sign;
        .reg .b16 half;
        .reg .f32 logit, bias;
        .reg .b64 from;
        .reg .pred is_own, is_zero, is_expert;
        mov.u32 lane, %laneid;
    """
    for place in places:
        text += f"""
        add.u32 own{place}, lane, {place * _LANES};
        setp.lt.u32 is_expert, own{place}, {count};
        mov.b16 half, 0;
        mul.wide.u32 from, own{place}, 2;
        add.s64 from, from, {logits};
        @is_expert ld.global.b16 half, [from];
        cvt.u32.u16 best, half;
        shl.b32 best, best, 16;
        mov.b32 logit, best;
        """
        if biased:
            text += f"""
            mov.f32 bias, 0f00000000;
            mul.wide.u32 from, own{place}, 4;
            add.s64 from, from, {correction};
            @is_expert ld.global.f32 bias, [from];
            add.rn.f32 logit, logit, bias;
            """
        text += f"""
        setp.eq.f32 is_zero, logit, 0f00000000;
        selp.f32 logit, 0f00000000, logit, is_zero;
        mov.b32 best, logit;
        shr.s32 sign, best, 31;
        and.b32 sign, sign, 0x7fffffff;
        xor.b32 best, best, sign;
        selp.b32 key{place}, best, 0x80000000, is_expert;
        """
    for number in range(active):
        text += "mov.b32 best, key0;\n"
        text += "".join(f"max.s32 best, best, key{place};\n" for place in places[1:])
        text += "redux.sync.max.s32 best, best, 0xffffffff;\n mov.b32 found, 0x7fffffff;\n"
        for place in reversed(places):
            text += f"setp.eq.s32 is_own, key{place}, best;\n selp.b32 found, own{place}, found, is_own;\n"
        text += f"redux.sync.min.s32 ${number}, found, 0xffffffff;\n"
        for place in places:
            text += f"setp.eq.s32 is_own, own{place}, ${number};\n"
            text += f"selp.b32 key{place}, 0x80000000, key{place}, is_own;\n"
    return text + "}"


@gluon.constexpr_function
def _write_constraints(active, biased):
    return ",".join(["=r"] * active + ["l"] * (1 + biased))


@gluon.constexpr_function
def _list_types(active):
    return (gl.int32,) * active


@gluon.jit
def find_wanted(logits_ptr, correction_ptr, COUNT: gl.constexpr, ACTIVE: gl.constexpr, BIASED: gl.constexpr):
    """Return the numbers of the ACTIVE experts that `experts.choose` chooses, in its order.

    logits: bfloat16, of COUNT experts. correction: float32, is added to them if BIASED. The instructions depend on what
    is in memory, so they may not be moved to before a wait for it.
    """
    TEXT: gl.constexpr = _write_text(COUNT, ACTIVE, BIASED)
    CONSTRAINTS: gl.constexpr = _write_constraints(ACTIVE, BIASED)
    TYPES: gl.constexpr = _list_types(ACTIVE)
    args = [logits_ptr.to(gl.int64), correction_ptr.to(gl.int64)] if BIASED else [logits_ptr.to(gl.int64)]
    return gl.inline_asm_elementwise(TEXT, CONSTRAINTS, args, dtype=TYPES, is_pure=False, pack=1)


@gluon.jit
def pick_expert(wanted, tile, ACTIVE: gl.constexpr):
    """Return number `tile` of the experts that `find_wanted` found."""
    found = wanted[0]
    for number in gl.static_range(1, ACTIVE):
        found = gl.where(tile == number, wanted[number], found)
    return found

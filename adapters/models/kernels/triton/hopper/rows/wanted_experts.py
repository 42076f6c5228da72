"""The experts with the largest logits of a row, found by every warp for itself.

A launch for the choice would take longer than the choice itself. Lane e of a warp holds the logit of expert e as an
integer with the same order. A warp of Hopper finds the largest integer of its lanes by one instruction.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MOST_EXPERTS = 32  # one for each lane


@gluon.constexpr_function
def _write_text(count, active):
    """Return the instructions that find the `active` experts with the largest logits out of `count`."""
    logits = f"${active}"
    correction = f"${active + 1}"
    text = f"""{{
        .reg .b32 lane, key, best, votes, sign;
        .reg .b16 half;
        .reg .f32 logit, bias;
        .reg .b64 from;
        .reg .pred is_own, is_zero, is_expert;
        mov.u32 lane, %laneid;
        setp.lt.u32 is_expert, lane, {count};
        mov.b16 half, 0;
        mov.f32 bias, 0f00000000;
        mul.wide.u32 from, lane, 2;
        add.s64 from, from, {logits};
        @is_expert ld.global.b16 half, [from];
        mul.wide.u32 from, lane, 4;
        add.s64 from, from, {correction};
        @is_expert ld.global.f32 bias, [from];
        cvt.u32.u16 key, half;
        shl.b32 key, key, 16;
        mov.b32 logit, key;
        add.rn.f32 logit, logit, bias;
        setp.eq.f32 is_zero, logit, 0f00000000;
        selp.f32 logit, 0f00000000, logit, is_zero;
        mov.b32 key, logit;
        shr.s32 sign, key, 31;
        and.b32 sign, sign, 0x7fffffff;
        xor.b32 key, key, sign;
        selp.b32 key, key, 0x80000000, is_expert;
    """
    for number in range(active):
        text += f"""
        redux.sync.max.s32 best, key, 0xffffffff;
        setp.eq.s32 is_own, key, best;
        vote.sync.ballot.b32 votes, is_own, 0xffffffff;
        brev.b32 votes, votes;
        clz.b32 ${number}, votes;
        setp.eq.u32 is_own, lane, ${number};
        selp.b32 key, 0x80000000, key, is_own;
        """
    return text + "}"


@gluon.constexpr_function
def _write_constraints(active):
    return ",".join(["=r"] * active + ["l", "l"])


@gluon.constexpr_function
def _list_types(active):
    return (gl.int32,) * active


@gluon.jit
def find_wanted(logits_ptr, correction_ptr, COUNT: gl.constexpr, ACTIVE: gl.constexpr):
    """Return the numbers of the ACTIVE experts that `experts.choose` chooses, in its order.

    logits: bfloat16, of COUNT experts. correction: float32, is added to them. The instructions depend on what is in
    memory, so they may not be moved to before a wait for it.
    """
    TEXT: gl.constexpr = _write_text(COUNT, ACTIVE)
    CONSTRAINTS: gl.constexpr = _write_constraints(ACTIVE)
    TYPES: gl.constexpr = _list_types(ACTIVE)
    return gl.inline_asm_elementwise(
        TEXT, CONSTRAINTS, [logits_ptr.to(gl.int64), correction_ptr.to(gl.int64)], dtype=TYPES, is_pure=False, pack=1
    )


@gluon.jit
def pick_expert(wanted, tile, ACTIVE: gl.constexpr):
    """Return number `tile` of the experts that `find_wanted` found."""
    found = wanted[0]
    for number in gl.static_range(1, ACTIVE):
        found = gl.where(tile == number, wanted[number], found)
    return found

"""The sum over the experts of a row, with the norm behind it.

No launch stores the choice of experts: see `wanted_experts`. So this kernel makes it again, with their weights.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.experts import rank_experts
from adapters.models.kernels.triton.rows import norm_row


@triton.jit
def _multiply_alone(a, b):
    """Return a * b, which no sum behind it may be fused with."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_up_row(
    made_ptr,
    bias_ptr,
    logits_ptr,
    correction_ptr,
    positions_ptr,
    residual_ptr,
    norm_ptr,
    out_ptr,
    width,
    eps,
    COUNT: tl.constexpr,
    ACTIVE: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    NORMS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts of a row as `experts.choose` does, add up their results as `experts.add_up` does, and do what
    `rows.add_norm` does with the sum.

    logits: of COUNT experts. correction: float32, is added to them. bias: `[COUNT, width]`, of results. NORMS: the norm
    is wanted, too. All but the sum is done while the products of experts still run. Products with weights are fused
    with sums in a norm, but not in the sum over experts.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < width
    rank = tl.arange(0, RANKS)
    real = tl.load(positions_ptr) >= 0
    if NORMS:
        weight = tl.load(norm_ptr + d, inside, 0.0).to(tl.float32)
    e = tl.arange(0, EXPERTS)
    logits = tl.load(logits_ptr + e, e < COUNT, float("-inf")).to(tl.float32)
    logits = logits + tl.load(correction_ptr + e, e < COUNT, 0.0)
    chosen, weights = rank_experts(logits, logits, COUNT, ACTIVE, EXPERTS, RANKS, True, False)
    shares = ()
    biases = ()
    for r in tl.static_range(ACTIVE):
        shares = shares + (tl.sum(tl.where(rank == r, weights, 0.0), 0),)  # noqa: RUF005 - Triton knows no other way
        own = tl.sum(tl.where(rank == r, chosen, 0), 0).to(tl.int64) * width
        biases = biases + (tl.load(bias_ptr + own + d, inside, 0.0).to(tl.float32),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    x = tl.load(residual_ptr + d, inside, 0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(ACTIVE):
        made = tl.load(made_ptr + r * width + d, inside & real, 0.0).to(tl.float32)
        made = (made + biases[r]).to(dtype).to(tl.float32)
        total += _multiply_alone(made, shares[r])
    x = (x.to(tl.float32) + tl.where(real, total, 0.0).to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual_ptr + d, x, inside)
    if NORMS:
        tl.store(out_ptr + d, norm_row(x.to(tl.float32), weight, width, eps, dtype, WIDE), inside)

"""The sums over the experts of rows, with the norm behind them, in one launch. It serves every device.

Where no launch has stored the choice of a step's one row (`wanted_experts`), this kernel makes it again for the weights
of the experts.
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
def add_up_norm(
    made_ptr,
    bias_ptr,
    chosen_ptr,
    weights_ptr,
    shared_ptr,
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
    ROUTES: tl.constexpr,
    NORMED: tl.constexpr,
    SHARED: tl.constexpr,
    BIASED: tl.constexpr,
    NORMS: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add up the results of a row's experts as `experts.add_up` does, and do what `rows.add_norm` does with the sum.
    One program, one row.

    ROUTES: there is one row. `chosen` are its logits, of COUNT experts, and `weights`, float32, is added to them. The
    choice is made here, as by `experts.choose`, and results have no biases. BIASED: as in `add_up`. NORMS: the norm is
    wanted, too. All but the sum is done while the products of experts still run. Products with weights are fused with
    sums in a norm, but not in the sum over experts.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < width
    real = tl.load(positions_ptr + row) >= 0
    if NORMS:
        weight = tl.load(norm_ptr + d, inside, 0.0).to(tl.float32)
    rank = tl.arange(0, RANKS)
    if ROUTES:
        e = tl.arange(0, EXPERTS)
        logits = tl.load(chosen_ptr + e, e < COUNT, float("-inf")).to(tl.float32)
        logits = logits + tl.load(weights_ptr + e, e < COUNT, 0.0)
        _, weights = rank_experts(logits, logits, COUNT, ACTIVE, EXPERTS, RANKS, NORMED, False, False)
    shares = ()
    biases = ()
    for r in tl.static_range(ACTIVE + (1 if SHARED else 0)):
        share = tl.sum(tl.where(rank == r, weights, 0.0), 0) if ROUTES else tl.load(weights_ptr + row * RANKS + r)
        shares = shares + (share,)  # noqa: RUF005 - Triton knows no other way
    if BIASED:
        for r in tl.static_range(ACTIVE):
            expert = tl.load(chosen_ptr + row * ACTIVE + r, real, 0)
            own = expert.to(tl.int64) * width
            biases = biases + (tl.load(bias_ptr + own + d, inside, 0.0).to(tl.float32),)  # noqa: RUF005
    if PDL:
        gdc_wait()
    x = tl.load(residual_ptr + row * width + d, inside, 0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(ACTIVE):
        made = tl.load(made_ptr + (row * ACTIVE + r) * width + d, inside & real, 0.0).to(tl.float32)
        if BIASED:
            made = (made + biases[r]).to(dtype).to(tl.float32)
        total += _multiply_alone(made, shares[r])
    if SHARED:
        shared = tl.load(shared_ptr + row * width + d, inside & real, 0.0).to(tl.float32)
        total += _multiply_alone(shared, shares[ACTIVE])
    x = (x.to(tl.float32) + tl.where(real, total, 0.0).to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual_ptr + row * width + d, x, inside)
    if NORMS:
        tl.store(out_ptr + row * width + d, norm_row(x.to(tl.float32), weight, width, eps, dtype, WIDE), inside)

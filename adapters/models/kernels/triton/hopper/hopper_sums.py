"""The weighted sum of the results of a row's experts, together with the norm behind it, on Hopper."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from adapters.models.kernels.triton.rows import norm_row


@triton.jit
def _multiply_alone(a, b):
    """Return a * b, which no sum behind it may be fused with."""
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def add_up_and_norm(
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
    ACTIVE: tl.constexpr,
    RANKS: tl.constexpr,
    SHARED: tl.constexpr,
    BIASED: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Do what `experts.add_up` does, and `rows.add_norm` with its result. One program, one row.

    Products with weights are fused with sums in a norm, but not in the sum over experts.
    """
    if PDL:
        gdc_launch_dependents()
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < width
    real = tl.load(positions_ptr + row) >= 0
    weight = tl.load(norm_ptr + d, inside, 0.0).to(tl.float32)
    shares = ()
    biases = ()
    for r in tl.static_range(ACTIVE + (1 if SHARED else 0)):
        shares = shares + (tl.load(weights_ptr + row * RANKS + r),)  # noqa: RUF005 - Triton knows no other way
    if BIASED:
        for r in tl.static_range(ACTIVE):
            own = tl.load(chosen_ptr + row * ACTIVE + r, real, 0).to(tl.int64) * width
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
        own = tl.load(shared_ptr + row * width + d, inside & real, 0.0).to(tl.float32)
        total += _multiply_alone(own, shares[ACTIVE])
    x = (x.to(tl.float32) + tl.where(real, total, 0.0).to(dtype).to(tl.float32)).to(dtype)
    tl.store(residual_ptr + row * width + d, x, inside)
    tl.store(out_ptr + row * width + d, norm_row(x.to(tl.float32), weight, width, eps, dtype, WIDE), inside)

"""Launches of operations on single rows on a CUDA device: norms and the sums around them, and gates."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from adapters.models.kernels import composed_operations
from adapters.models.kernels.activations import GATES
from adapters.models.kernels.cuda.descriptors import launch_options
from adapters.models.kernels.cuda.rows.row_sums import ExpertResults
from adapters.models.kernels.cuda.tiles import count_parts, round_up_to_power
from adapters.models.kernels.interfaces.row_kernels import Delta, NormedRows
from adapters.models.kernels.triton import experts, rows
from adapters.models.kernels.triton_launch import launch

_MOST_NORMS = 3  # of a sum in one launch


def add_norm(
    residual: Tensor, delta: Delta | None, weight: Tensor, eps: float, *, bias: Tensor | None = None, pdl: bool | None
) -> Tensor:
    if isinstance(delta, ExpertResults):
        assert bias is None, "the sum over experts has biases of its own"
        return delta.add_norm(residual, weight, eps)
    assert delta is None or isinstance(delta, Tensor)
    out = residual.new_empty(residual.shape)
    count, width = residual.shape
    block = round_up_to_power(width)
    launch(
        rows.add_norm,
        (count,),
        residual,
        residual if delta is None else delta,
        weight if bias is None else bias,  # where there is none, some address that is never read
        weight,
        out,
        width,
        eps,
        HAS_DELTA=delta is not None,
        HAS_BIAS=bias is not None,
        WIDE=weight.dtype != residual.dtype,
        BLOCK=block,
        **launch_options(4 if block <= 2048 else 8, pdl),
    )
    return out


def add_normed(
    residual: Tensor, delta: NormedRows, eps: float, outer: Sequence[Tensor], pdl: bool | None
) -> list[Tensor]:
    parallel = delta.parallel or (delta.rows, delta.weight, delta.weight)  # where there are none, never read
    if len({one.dtype for one in (delta.weight, *parallel[1:], *outer)}) > 1 or len(outer) > _MOST_NORMS:
        return composed_operations.add_normed(partial(add_norm, pdl=pdl), residual, delta, eps, outer)
    count, width = residual.shape
    out = residual.new_empty(len(outer), count, width)
    block = round_up_to_power(width)
    launch(
        rows.add_normed,
        (count,),
        residual,
        delta.rows,
        delta.weight,
        *parallel,
        *(*outer, *[delta.weight] * _MOST_NORMS)[:_MOST_NORMS],
        out if outer else residual,
        width,
        eps,
        delta.factor,
        OUTER=len(outer),
        PARALLEL=delta.parallel is not None,
        SCALED=delta.factor != 1,
        WIDE=delta.weight.dtype != residual.dtype,
        BLOCK=block,
        **launch_options(4 if block <= 2048 else 8, pdl),
    )
    return [*out.unbind(0)]


def apply_gate(activation: str, both: Tensor, bias: Tensor | None, chosen: Tensor | None, pdl: bool | None) -> Tensor:
    """Return what the gates of pairs let through, `[pairs, I]`. both: `[pairs, 2 I]`.

    bias: `[2 I]`, or of all experts `[E, 2 I]`, of which `chosen`, int32, are those of the pairs. A number outside of
    them, as padded rows have, stands for some expert: nothing reads that pair.
    """
    pairs, columns = both.shape
    out = both.new_empty(pairs, columns // 2)
    block = min(1024, round_up_to_power(columns // 2))
    launch(
        experts.gate_pairs,
        (pairs, count_parts(columns // 2, block)),
        both,
        both if bias is None else bias,  # where there is none, never read
        both if chosen is None else chosen,
        out,
        columns // 2,
        GATE=GATES[activation],
        COUNT=1 if bias is None or chosen is None else len(bias),
        BIASED=bias is not None,
        BLOCK=block,
        **launch_options(4, pdl),
    )
    return out

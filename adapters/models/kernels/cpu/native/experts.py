"""Products of rows with the experts that they chose, of all experts of a layer in one call of the compiled library.

An expert alone has few panels of weights, and a decode step few rows for it. Called one by one, experts would leave
most threads idle and take longer in Python than in C. The bits are those of separate products.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, overload

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.activations import SILU
from adapters.models.kernels.cpu.native.products import DTYPE_CODES, NativePacked, NativeProducts, NativeWeight
from adapters.models.kernels.interfaces.experts_interface import GatedWeights

MOST_ROWS = 256  # of an expert in one job (ROWS of products.c)


@frozen(eq=False)
class ExpertTable:
    """One weight of every expert of a layer. one: the first expert's; the others are of the same kind.

    weights, gated: addresses by expert. gated: what the weights gate; None: nothing.
    """

    one: NativeWeight | NativePacked
    weights: Any
    gated: Any

    @classmethod
    def of(cls, weights: Sequence[tuple[NativeWeight | NativePacked, ...]]) -> ExpertTable | None:
        """Return the table, or None if the experts differ. weights: of each expert its weight, or a gate and what it
        gates.
        """
        kinds = {(type(one), one.kind) for parts in weights for one in parts}
        widths = {len(parts) for parts in weights}
        if len(kinds) > 1 or len(widths) > 1 or not widths <= {1, 2}:
            return None
        first, *rest = (
            (ctypes.c_void_p * len(weights))(*(one.panels.data_ptr() for one in column))
            for column in zip(*weights, strict=True)
        )
        return cls(weights[0][0], first, rest[0] if rest else None)


@frozen(eq=False)
class NativeExperts(Sequence[GatedWeights]):
    """The experts of a layer by number, with tables of their weights in the library's form."""

    each: tuple[GatedWeights, ...]
    gates: ExpertTable
    downs: ExpertTable

    @overload
    def __getitem__(self, number: int) -> GatedWeights: ...

    @overload
    def __getitem__(self, number: slice) -> tuple[GatedWeights, ...]: ...

    def __getitem__(self, number: int | slice) -> GatedWeights | tuple[GatedWeights, ...]:
        return self.each[number]

    def __len__(self) -> int:
        return len(self.each)


@frozen(eq=False)
class ExpertJobs:
    """The pairs of a row and one of its experts, sorted by expert, in runs of at most MOST_ROWS.

    sources: of each place the row that stands there. experts, firsts, counts: of each run its expert, its first place
    and its places. places: of each pair its place; None: the places are in the order of the pairs. All are int64.
    """

    sources: np.ndarray
    experts: np.ndarray
    firsts: np.ndarray
    counts: np.ndarray
    places: np.ndarray | None

    @classmethod
    def sort(cls, chosen: Tensor) -> ExpertJobs:
        """Return the jobs of rows with their experts, int64 `[n, k]`."""
        rows, each = chosen.shape
        flat = chosen.numpy().ravel()
        if rows == 1:  # all experts of a row differ
            return cls(np.zeros(each, np.int64), flat, np.arange(each), np.ones(each, np.int64), None)
        order = flat.argsort(kind="stable")
        experts, firsts, counts = np.unique(flat[order], return_index=True, return_counts=True)
        if counts.max() > MOST_ROWS:
            parts = [
                (expert, first + at, min(MOST_ROWS, count - at))
                for expert, first, count in zip(experts, firsts, counts, strict=True)
                for at in range(0, count, MOST_ROWS)
            ]
            experts, firsts, counts = np.array(parts, np.int64).T.copy()
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        return cls(order // each, experts, firsts, counts, places)


def collect_experts(each: tuple[GatedWeights, ...], parts: Sequence[Sequence[Any]]) -> Sequence[GatedWeights]:
    """Return the experts of a layer, with tables where the library can multiply with all of them in one call.

    parts: of each expert what its two products are packed as, if that is the library's form; else None.
    """
    plain = all(one.activation == SILU and one.gate_up_bias is None and one.down_bias is None for one in each)
    if not each or not plain or any(one is None for pair in parts for one in pair):
        return each
    gates, downs = (ExpertTable.of(column) for column in zip(*parts, strict=True))
    if gates is None or downs is None or gates.gated is None or downs.gated is not None:
        return each
    return NativeExperts(each, gates, downs)


def run_experts(products: NativeProducts, x: Tensor, experts: NativeExperts, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sums of the first rows of x `[R, D]`, float32 `[n, D]`.

    chosen: int64 `[n, k]`, the experts of each row. weights: float32 `[n, k]`.
    """
    rows, each = chosen.shape
    jobs = ExpertJobs.sort(chosen)
    inner = multiply(products, x, experts.gates, jobs, jobs.sources)
    made = multiply(products, inner, experts.downs, jobs, None)
    weights = weights.contiguous()
    out = torch.empty(rows, made.shape[1])
    products.compiled.code.rekindle_add_experts(
        made.data_ptr(),
        DTYPE_CODES[made.dtype],
        None if jobs.places is None else jobs.places.ctypes.data,
        weights.data_ptr(),
        rows,
        each,
        made.shape[1],
        out.data_ptr(),
        torch.get_num_threads(),
        products.level,
    )
    return out


def multiply(
    products: NativeProducts, x: Tensor, table: ExpertTable, jobs: ExpertJobs, sources: np.ndarray | None
) -> Tensor:
    """Multiply the row of each place with the weight of its expert, gated if the table gates.

    sources: of each place its row of x; None: the rows are in the order of the places.
    """
    one = table.one
    x = products.read_rows(x, one)
    form = ctypes.byref(one.form) if isinstance(one, NativePacked) else None
    places = len(jobs.sources)
    out = torch.empty(places, one.outputs, dtype=products.to or torch.float32)
    addresses = (each.ctypes.data for each in (jobs.experts, jobs.firsts, jobs.counts))
    failed = products.compiled.code.rekindle_experts(
        x.data_ptr(),
        DTYPE_CODES[x.dtype],
        x.stride(0),
        None if sources is None else sources.ctypes.data,
        places,
        *addresses,
        len(jobs.experts),
        table.weights,
        table.gated,
        form,
        DTYPE_CODES.get(one.panels.dtype, 0),
        one.outputs,
        one.panels.shape[1] if isinstance(one, NativePacked) else one.terms,
        out.data_ptr(),
        DTYPE_CODES[out.dtype],
        torch.get_num_threads(),
        products.level,
    )
    if failed:
        raise MemoryError(f"no memory for {places} rows of {one.terms} with experts")
    return out

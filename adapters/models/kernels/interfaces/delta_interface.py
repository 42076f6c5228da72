"""The gated delta rule: what a recurrent layer keeps of a slot, and the operations that kernels have for such layers.

With S the state `[dk, dv]` of a head, one row does S <- e^g S; d = beta (v - S^T k); S <- S + k d^T; o = S^T q.
Kernels compute the same sum from S0, the state at the last multiple of 64. G_i is the sum of g over the rows of the
chunk up to row i:

    u_i = beta_i (v_i - e^(G_i) S0^T k_i)          what the row would correct if it were the first of its chunk
    A_ij = beta_i e^(G_i - G_j) (k_i . k_j), j < i
    T = (I + A)^-1, so T_i = e_i - sum_{j<i} A_ij T_j
    d_i = sum_{j<=i} T_ij u_j
    o_i = e^(G_i) S0^T q_i + sum_{j<=i} e^(G_i - G_j) (k_j . q_i) d_j
    S'  = e^(G_63) S0 + sum_j e^(G_63 - G_j) k_j d_j^T      the state at the next multiple of 64

Row i needs S0 and the rows j <= i. Its sums have one width and one order, whether the row comes alone, in a
verification or in a prefill chunk. So a sequence can continue from any row between two multiples of 64, and taking
rows back means forgetting them.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
from attrs import astuple, frozen
from torch import Tensor

from adapters.models.kernels.step import UNSETTLED
from adapters.models.kernels.step_batch import StateBatch

CHUNK = 64  # a state stands at a multiple of this many rows
# Rows that are kept behind a state: those of its chunk, and those that one step may compute past the chunk's end.
RING = 2 * CHUNK
assert UNSETTLED <= RING - CHUNK, "what may be rolled back must fit into the rings, behind 63 rows"
BLOCK = 16  # rows of a block of the factor, which is inverted as a whole
TAPS = 4


@frozen
class DeltaShape:
    """The heads of a recurrent layer: Nk heads of keys and queries of size dk, and Nv heads of values of size dv.

    Value head n reads key head n // (Nv / Nk).
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_size

    @property
    def values(self) -> int:
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: query heads, then key heads, then value heads."""
        return 2 * self.keys + self.values


@frozen(eq=False)
class DeltaWeights:
    """The weights of a layer, all float32. taps: `[channels, 4]`, the last one for the row itself. rate: -exp(A_log)
    and dt_bias, both `[Nv]`.
    """

    shape: DeltaShape
    taps: Tensor
    rate: Tensor
    dt_bias: Tensor


@frozen(eq=False)
class DeltaState:
    """The state that one layer keeps of every slot: S at a multiple of 64, and what later rows need of up to 128 rows
    from there on.

    Row p of a slot lies at p % 128 of the rings. All tensors are zeroed at the start, so what is masked is always
    finite.

    Two tensors are exported and copied to checkpoints, which are numbered after the slots:
    * memory: float32 `[slots + checkpoint_count, Nv, dk, dv]`, S at the state's position.
    * conv: `[slots + checkpoint_count, 3, channels]` in the model's dtype, the convolution's inputs of the three
      rows before it.

    The others describe the rows from there on, `[slots, ...]`, as `DeltaKernels.make_state` makes them. Kernels may
    use them for forms of their own, and a tensor that they do not need is empty. A copy of a slot copies all of them:
    * inputs: `[128, channels]`, inputs of the convolution in the model's dtype.
    * keys: float32 `[Nk, 128, dk]`, normalised. deltas: float32 `[Nv, 128, dv]`, d above.
    * decays: float32 `[Nv, 128]`, G above.
    * values, factors: float32 `[Nv, 128, dv]` and `[Nv, 128, 64]`, what the kernels keep of u and T in a form of
      their own.
    """

    memory: Tensor
    conv: Tensor
    inputs: Tensor
    keys: Tensor
    deltas: Tensor
    decays: Tensor
    values: Tensor
    factors: Tensor


@frozen(eq=False)
class LayerStates:
    """The states of several layers, in tensors that they share: one launch copies a slot of all layers.

    whole: one state with the slots of all layers, layer by layer. stacked: the same memory as `[layers, slots, ...]`.
    layers: one state for each layer, which are views.
    """

    whole: DeltaState
    stacked: DeltaState
    layers: tuple[DeltaState, ...]

    @classmethod
    def of_layers(cls, whole: DeltaState, count: int) -> Self:
        """Divide a state that was made with `count` times the slots and checkpoints of one layer."""
        tensors = [one.view(count, len(one) // count, *one.shape[1:]) for one in astuple(whole, recurse=False)]
        layers = zip(*(one.unbind(0) for one in tensors), strict=True)
        return cls(whole, DeltaState(*tensors), tuple(DeltaState(*own) for own in layers))


def make_row_state(
    shape: DeltaShape,
    slots: int,
    checkpoint_count: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    factored: bool = True,
) -> DeltaState:
    """Return a zeroed state as `DeltaState` describes it. factored: keep rows of the factor T, which kernels that go
    row by row do not need.
    """
    heads = shape.value_heads
    rows = RING if factored else 0

    def zeros(*size: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=kind, device=device)

    return DeltaState(
        memory=zeros(slots + checkpoint_count, heads, shape.key_size, shape.value_size),
        conv=zeros(slots + checkpoint_count, TAPS - 1, shape.channels, kind=dtype),
        inputs=zeros(slots, RING, shape.channels, kind=dtype),
        keys=zeros(slots, shape.key_heads, RING, shape.key_size),
        deltas=zeros(slots, heads, RING, shape.value_size),
        decays=zeros(slots, heads, RING),
        values=zeros(slots, heads, rows, shape.value_size),
        factors=zeros(slots, heads, rows, CHUNK),
    )


def make_raw_state(
    shape: DeltaShape, slots: int, checkpoint_count: int, dtype: torch.dtype, device: torch.device
) -> DeltaState:
    """Return a zeroed state for kernels that compute a chunk's rows anew in each step, which is about half as large.

    keys: `[slots, 128, k heads | v heads]` in the model's dtype. decays: beta and g, `[slots, Nv, 2, 128]`.
    """

    def zeros(*size: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.zeros(size, dtype=kind, device=device)

    return DeltaState(
        memory=zeros(slots + checkpoint_count, shape.value_heads, shape.key_size, shape.value_size, kind=torch.float32),
        conv=zeros(slots + checkpoint_count, TAPS - 1, shape.channels),
        inputs=zeros(slots, RING, shape.channels),
        keys=zeros(slots, RING, shape.keys + shape.values),
        deltas=zeros(slots, 0),
        decays=zeros(slots, shape.value_heads, 2, RING, kind=torch.float32),
        values=zeros(slots, 0),
        factors=zeros(slots, 0),
    )


class DeltaKernels(Protocol):
    """The operations of recurrent layers, and the gate of attention's output, on one device.

    A batch's slots have their states at `batch.bases`, and the rows from there up to a segment's start are in the
    rings. A segment that may be rolled back has at most 64 rows. It writes them into the rings and leaves memory and
    conv as they are. A segment that settles may have any number of rows. It moves memory and conv to the last multiple
    of 64 at or below its end, and writes at least the rows from there on. All segments settle if `batch.settles`.
    Kernels that commit per segment also take batches in which some do (`batch.mixed`), and batches in which those that
    settle stop at the last multiple of 64 below their end (`batch.holds`). Padded rows write nothing.
    Rows of inputs may be columns of a wider tensor, so their stride is not their width.
    """

    @property
    def commits_per_segment(self) -> bool:
        """May some segments of a step be committed at once while others may still be rolled back?"""
        ...

    def make_state(
        self, shape: DeltaShape, slots: int, checkpoint_count: int, dtype: torch.dtype, device: torch.device
    ) -> DeltaState:
        """Return the zeroed state of one layer: memory and conv as `DeltaState` says, the rows in the form that these
        kernels keep.
        """
        ...

    def convolve(self, mixed: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch) -> Tensor:
        """Apply the causal convolution and silu to mixed `[R, channels]` in the model's dtype, as input of
        `delta_rule`.

        Returns float32 `[R, channels]`, or the form that the `delta_rule` of these kernels reads faster.
        """
        ...

    def delta_rule(
        self, convolved: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch
    ) -> Tensor:
        """Return what rows read from the state: float32 `[R, Nv, dv]`.

        gates: `[R, 2 Nv]`, rows laid out `b | a`, with beta = sigmoid(b) and g = rate softplus(a + dt_bias). Queries
        and keys are divided by their length, sqrt(sum of squares + 1e-6), and queries multiplied with dk ** -0.5.
        """
        ...

    def advance_state(self, states: LayerStates, slot: int, base: int) -> None:
        """Move the slot's state in all layers from `base` to `base + 64`. Those rows are in the rings and settled.

        The result has the same bits as a settled step over these rows.
        """
        ...

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return RMSNorm of each head times weight times silu(gate), computed in float32: `[R, Nv dv]` in the gate's
        dtype.

        x: float32 `[R, Nv, dv]`. gate: `[R, Nv dv]`. weight: float32 `[dv]`.
        """
        ...

    def apply_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return x times sigmoid(gate), both `[R, N]` in the model's dtype; computed in float32 and rounded once."""
        ...

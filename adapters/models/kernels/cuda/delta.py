"""Launches of the gated delta rule on a CUDA device: the plan of a step's chunks, tiles, and where factors lie.

The rows that a slot keeps behind its state are raw: keys and values as they come out of the convolution, in the model's
dtype, and the gates' inputs. Everything else of a chunk is worked out anew in each step, which is what makes rows the
same bits in every step, and costs less than reading it would.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.cuda.attention import launching
from adapters.models.kernels.delta_interface import CHUNK, RING, TAPS, DeltaShape, DeltaState, DeltaWeights, raw_state
from adapters.models.kernels.step_batch import StateBatch
from adapters.models.kernels.triton import delta, delta_rows
from adapters.models.kernels.triton.launch import launch

SIZES = (16, 32, 64, 128)
FIELDS = 8  # of a chunk in the plan
TILE = 64  # values of a head that one program looks after
AT_ONCE = 8  # heads of a program that works on single rows
# Pieces of bfloat16 that the inputs are exact in, and those that are taken of what is computed.
PIECES = {torch.bfloat16: (1, 2), torch.float16: (2, 2), torch.float32: (3, 3)}


@frozen(eq=False)
class Chunks:
    """The plan of a step. chunks: int32 `[limit, 8]`. runs: int32 `[segments + 1, 2]`, the last one of padded rows."""

    chunks: Tensor
    runs: Tensor


@frozen(eq=False)
class Factors:
    """Scratch of one layer at a time, kept for good, since recorded graphs hold its address."""

    mix: Tensor
    fold: Tensor
    lines: Tensor


@define(eq=False)
class CudaDelta:
    """`DeltaKernels` for one CUDA device."""

    device: torch.device
    pdl: bool | None
    running: str = ""
    planning: set[str] = field(init=False, factory=set)  # the bodies that have asked for the step's chunks, by name
    _plans: dict[int, Chunks] = field(init=False, factory=dict)
    _stale: bool = field(init=False, default=True)
    _factors: dict[tuple[int, ...], Factors] = field(init=False, factory=dict)

    def state(self, shape: DeltaShape, slots: int, places: int, dtype: torch.dtype, device: torch.device) -> DeltaState:
        for size in (shape.key_size, shape.value_size):
            if size not in SIZES:
                accepted = ", ".join(map(str, SIZES))
                raise ValueError(f"recurrent heads of {size} are not supported on CUDA; accepted: {accepted}")
        return raw_state(shape, slots, places, dtype, device)

    def convolve(self, mixed: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch) -> Tensor:
        """In the model's dtype; heads of queries and keys are divided by their length already."""
        shape = weights.shape
        out = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
        programs = triton.cdiv(2 * shape.key_heads, AT_ONCE) + triton.cdiv(shape.value_heads, AT_ONCE)
        launch(
            delta_rows.convolve,
            (len(mixed), programs),
            mixed,
            weights.taps,
            state.inputs,
            state.conv,
            state.keys,
            batch.slots,
            batch.positions,
            batch.bases,
            out,
            mixed.stride(0),
            AT_ONCE=AT_ONCE,
            SETTLES=batch.settles,
            **_sizes(shape),
            **self._options(4),
        )
        if batch.settles:
            self._keep(mixed, state.inputs, state.conv, batch)
        return out

    def delta_rule(
        self, convolved: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch
    ) -> Tensor:
        plan = self._plan(batch, len(state.inputs))
        out = self._run(convolved, gates, weights, state, plan, settles=batch.settles)
        if batch.settles:
            self._keep(convolved[:, weights.shape.keys :], state.keys, None, batch)
        return out

    def _run(
        self,
        convolved: Tensor,
        gates: Tensor,
        weights: DeltaWeights,
        state: DeltaState,
        plan: Chunks,
        *,
        settles: bool,
    ) -> Tensor:
        shape, limit, segments = weights.shape, len(plan.chunks), len(plan.runs) - 1
        inputs, parts = PIECES[convolved.dtype]
        scratch = self._scratch(limit, shape, parts)
        sizes = _sizes(shape) | {"INPUTS": inputs, "PARTS": parts}
        scale = shape.key_size**-0.5
        wide = {"enable_fp_fusion": False, "num_stages": 1, **self._options(4)}
        launch(
            delta.factor,
            (limit, shape.value_heads),
            plan.chunks,
            convolved,
            gates,
            state.keys,
            state.decays,
            weights.rate,
            weights.dt_bias,
            scratch.mix,
            scratch.fold,
            scratch.lines,
            gates.stride(0),
            scale,
            **sizes,
            **wide,
        )
        out = torch.empty(len(convolved), shape.value_heads, shape.value_size, device=self.device)
        tile = min(TILE, shape.value_size)
        launch(
            delta.scan,
            (segments + 1, shape.value_heads * (shape.value_size // tile)),
            plan.chunks,
            plan.runs,
            convolved,
            state.keys,
            state.decays,
            scratch.mix,
            scratch.fold,
            scratch.lines,
            state.memory,
            out,
            segments,
            len(convolved),
            scale,
            TILE=tile,
            SETTLES=settles,
            **sizes,
            **wide,
        )
        return out

    def _keep(self, rows: Tensor, ring: Tensor, edge: Tensor | None, batch: StateBatch) -> None:
        plan, width, block = self._plan(batch, len(ring)), ring.shape[2], 128
        launch(
            delta_rows.keep,
            (len(plan.runs) - 1, triton.cdiv(width, block)),
            plan.chunks,
            plan.runs,
            rows,
            ring,
            ring if edge is None else edge,
            rows.stride(0),
            WIDTH=width,
            EDGE=edge is not None,
            BLOCK=block,
            **self._options(4),
        )

    def fold(self, states: Sequence[DeltaState], slot: int, base: int) -> None:
        """A settled step of no rows over a whole chunk that is in the rings."""
        plan = Chunks(
            torch.tensor([[0, 0, slot, base, CHUNK, 0, 0, 0]], dtype=torch.int32, device=self.device),
            torch.tensor([[0, 1], [0, 0]], dtype=torch.int32, device=self.device),
        )
        last = base % RING + CHUNK
        for state in states:
            _, heads, key_size, value_size = state.memory.shape
            keys = (state.keys.shape[2] - heads * value_size) // key_size
            shape = DeltaShape(keys, heads, key_size, value_size)
            nothing = state.keys.new_empty(0, shape.channels)
            unread = DeltaWeights(shape, state.decays, state.decays, state.decays)  # by rows that are not new
            self._run(nothing, nothing, unread, state, plan, settles=True)
            state.conv[slot] = state.inputs[slot, last - TAPS + 1 : last]

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, heads, size = x.shape
        out = torch.empty(rows, heads * size, dtype=gate.dtype, device=gate.device)
        launch(
            delta_rows.gated_norm,
            (rows, triton.cdiv(heads, AT_ONCE)),
            x,
            gate,
            weight,
            out,
            gate.stride(0),
            eps,
            HEADS=heads,
            DV=size,
            AT_ONCE=AT_ONCE,
            **self._options(4),
        )
        return out

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
        launch(
            delta_rows.gate,
            (rows, triton.cdiv(width, 1024)),
            x,
            gate,
            out,
            x.stride(0),
            gate.stride(0),
            width,
            BLOCK=1024,
            **self._options(4),
        )
        return out

    def _options(self, warps: int) -> dict[str, Any]:
        return launching(warps, self.pdl)

    def _scratch(self, limit: int, shape: DeltaShape, parts: int) -> Factors:
        key = (triton.next_power_of_2(limit), shape.value_heads, parts, shape.key_size)
        if key not in self._factors:
            room = key[:2]
            kind = torch.bfloat16
            self._factors[key] = Factors(
                torch.empty(*room, parts, CHUNK, CHUNK, dtype=kind, device=self.device),
                torch.empty(*room, parts, shape.key_size, CHUNK, dtype=kind, device=self.device),
                torch.empty(*room, 3, CHUNK, device=self.device),
            )
        return self._factors[key]

    def _plan(self, batch: StateBatch, slots: int) -> Chunks:
        """The step's chunks; whatever reads them waits for the kernels before it."""
        if batch.bucket not in self._plans:
            segments = min(batch.bucket, slots)
            limit = min(batch.bucket, batch.bucket // CHUNK + 2 * segments)
            self._plans[batch.bucket] = Chunks(
                torch.zeros(limit, FIELDS, dtype=torch.int32, device=self.device),
                torch.zeros(segments + 1, 2, dtype=torch.int32, device=self.device),
            )
            self._stale = True
        if self._stale:
            self.plan(batch)
        self.planning.add(self.running)
        return self._plans[batch.bucket]

    def begin(self, name: str, batch: StateBatch) -> None:
        """A body begins to run, or to be recorded: its chunks are planned first, if it is known to need them."""
        self._stale, self.running = True, name
        if name in self.planning and batch.bucket in self._plans:
            self.plan(batch)

    def plan(self, batch: StateBatch) -> None:
        plan = self._plans[batch.bucket]
        launch(
            delta_rows.plan_chunks,
            (1,),
            batch.slots,
            batch.positions,
            batch.counts,
            plan.chunks,
            plan.runs,
            batch.bucket,
            len(plan.chunks),
            len(plan.runs) - 1,
            ROWS=triton.next_power_of_2(batch.bucket),
            LIMIT=triton.next_power_of_2(len(plan.chunks)),
            RUNS=triton.next_power_of_2(len(plan.runs)),
            num_warps=4,
        )
        self._stale = False


def _sizes(shape: DeltaShape) -> dict[str, int]:
    return {"KEY_HEADS": shape.key_heads, "HEADS": shape.value_heads, "DK": shape.key_size, "DV": shape.value_size}

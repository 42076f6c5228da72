"""Launches of the gated delta rule on a CUDA device: the plan of a step's chunks, tiles, and memory for factors.

The rows that a slot keeps behind its state are raw: keys and values as the convolution leaves them, in the model's
dtype, and the gates' inputs. Everything else about a chunk is computed anew in each step. So rows have the same bits
in every step, and computing costs less than reading would.
"""

from __future__ import annotations

import torch
import triton
from attrs import define, field
from torch import Tensor

from adapters.models.kernels.cuda import delta_launches
from adapters.models.kernels.cuda.delta_launches import AT_ONCE, WideArguments, describe_heads
from adapters.models.kernels.cuda.delta_plan import FIELDS, ChunkPlan, FactorScratch, plan_advance
from adapters.models.kernels.cuda.descriptors import LaunchArguments, describe_blocks, launch_options
from adapters.models.kernels.interfaces.delta_interface import (
    BLOCK,
    CHUNK,
    RING,
    TAPS,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    LayerStates,
    make_raw_state,
)
from adapters.models.kernels.interfaces.layer_interface import NARROW
from adapters.models.kernels.step_batch import StateBatch
from adapters.models.kernels.triton import delta, delta_convolution, delta_factor, delta_rows
from adapters.models.kernels.triton.hopper import hopper_delta, hopper_single
from adapters.models.kernels.triton_launch import launch

SIZES = (16, 32, 64, 128)
TILE = 64  # values of a head in one program
NONE, ALL, SOME = range(3)  # segments of a step that settle
LEFT = 4  # programs of a head for segments of a mixed step that neither settle nor have one row
WALK_STAGES = 2  # chunks that Hopper's kernel has in shared memory or on their way there
ADVANCED_LAYERS = 16  # whose states one launch moves: their factors take as much memory as those of 16 decode rows
CONVOLVED_ROWS = 8  # rows that a program of a wide step convolves: it reads the taps, the larger part, once
# Pieces of bfloat16 that hold the inputs exactly, and pieces that are taken of computed numbers.
PIECES = {torch.bfloat16: (1, 2), torch.float16: (2, 2), torch.float32: (3, 3)}


@define(eq=False)
class CudaDelta:
    """Implements `DeltaKernels` for one CUDA device. hopper: the kernel for Hopper may run."""

    device: torch.device
    pdl: bool | None
    hopper: bool = False
    running: str = ""
    commits_per_segment: bool = field(init=False, default=True)
    planned_bodies: set[str] = field(
        init=False, factory=set
    )  # the bodies that have asked for the step's chunks, by name
    _reads_singles: bool = field(init=False, default=True)  # the kernel for single rows serves all states
    _plans: dict[int, ChunkPlan] = field(init=False, factory=dict)
    _stale: bool = field(init=False, default=True)
    _factors: dict[tuple[int, ...], FactorScratch] = field(init=False, factory=dict)

    def make_state(
        self, shape: DeltaShape, slots: int, checkpoint_count: int, dtype: torch.dtype, device: torch.device
    ) -> DeltaState:
        for size in (shape.key_size, shape.value_size):
            if size not in SIZES:
                accepted = ", ".join(map(str, SIZES))
                raise ValueError(f"recurrent heads of {size} are not supported on CUDA; accepted: {accepted}")
        self._reads_singles &= self._can_read_single(dtype, shape)
        return make_raw_state(shape, slots, checkpoint_count, dtype, device)

    def convolve(self, mixed: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch) -> Tensor:
        """Convolve in the model's dtype. Query and key heads are divided by their length already."""
        shape = weights.shape
        out = torch.empty(mixed.shape, dtype=mixed.dtype, device=mixed.device)
        rows = CONVOLVED_ROWS if len(mixed) > NARROW and len(mixed) % CONVOLVED_ROWS == 0 else 1
        programs = triton.cdiv(2 * shape.key_heads, AT_ONCE) + triton.cdiv(shape.value_heads, AT_ONCE)
        launch(
            delta_convolution.convolve,
            (len(mixed) // rows, programs),
            mixed,
            weights.taps,
            state.inputs,
            state.conv,
            state.keys,
            batch.slots,
            batch.positions,
            batch.bases,
            batch.settled,
            out,
            mixed.stride(0),
            AT_ONCE=AT_ONCE,
            ROWS=rows,
            ROLLS=not batch.settles,
            **describe_heads(shape),
            **self._options(4),
        )
        if batch.settles or batch.mixed:
            self._keep_rows(mixed, state.inputs, state.conv, batch)
        return out

    def delta_rule(
        self, convolved: Tensor, gates: Tensor, weights: DeltaWeights, state: DeltaState, batch: StateBatch
    ) -> Tensor:
        if batch.single and self._can_read_single(convolved.dtype, weights.shape):
            tile = min(TILE, weights.shape.value_size)
            options = self._wide_options(convolved)
            return delta_launches.read_single_rows(convolved, gates, weights, state, batch, tile, options)
        plan = self._step_chunks(batch, len(state.inputs))
        settles = SOME if batch.mixed else ALL if batch.settles else NONE
        out = self._run(convolved, gates, weights, state, (plan, batch.settled), settles, holds=batch.holds)
        if batch.settles or batch.mixed:
            self._keep_rows(convolved[:, weights.shape.keys :], state.keys, None, batch)
        return out

    def _run(
        self,
        convolved: Tensor,
        gates: Tensor,
        weights: DeltaWeights,
        state: DeltaState,
        planned: tuple[ChunkPlan, Tensor],
        settles: int,
        *,
        holds: bool = False,
    ) -> Tensor:
        """Launch the kernels. planned: the chunks, and by row of the step whether its segment settles. holds: as in
        `StateBatch`.
        """
        plan, settled = planned
        shape = weights.shape
        limit = len(plan.chunks)
        segments = len(plan.runs) - 1
        wide = self._wide_options(convolved)
        scratch = self._scratch(limit, shape, wide["PARTS"])
        sizes = describe_heads(shape) | {"READ": CHUNK if settles == ALL else BLOCK}
        scale = shape.key_size**-0.5
        out = torch.empty(len(convolved), shape.value_heads, shape.value_size, device=self.device)
        tile = min(TILE, shape.value_size)
        inputs = (convolved, gates, state.keys, state.decays, weights.rate, weights.dt_bias)
        factors = (scratch.mix, scratch.fold, scratch.lines)
        singles = plan.singles if settles == SOME else None
        if singles is not None:
            joint = (plan.chunks, singles, *inputs, *factors, state.memory, out, gates.stride(0), len(singles), scale)
            grid = len(singles) + limit, shape.value_heads
            registers = delta_launches.limit_registers(len(singles))
            launch(hopper_single.factor_and_read, grid, *joint, TILE=tile, maxnreg=registers, **sizes, **wide)
        else:
            given = (plan.chunks, *inputs, *factors, gates.stride(0), scale)
            launch(delta_factor.factor, (limit, shape.value_heads), *given, **sizes, **wide)
        walks = settles != NONE and self._can_walk(convolved, shape)
        scanned = segments
        # Where other kernels serve most segments, few programs take what is left.
        if walks and (settles == ALL or singles is not None):
            scanned = 1 if settles == ALL else LEFT
        launch(
            delta.scan,
            (scanned + 1, shape.value_heads * (shape.value_size // tile)),
            *(plan.chunks, plan.runs, settled, convolved, state.keys, state.decays, *factors, state.memory, out),
            *(segments, len(convolved), scale),
            TILE=tile,
            SETTLES=settles,
            HOLDS=holds,
            WALKED=walks,
            **sizes,
            **wide,
        )
        if walks:
            self._walk(convolved, shape, state, plan, scratch, out, holds=holds)
        return out

    def _walk(
        self,
        convolved: Tensor,
        shape: DeltaShape,
        state: DeltaState,
        plan: ChunkPlan,
        scratch: FactorScratch,
        out: Tensor,
        *,
        holds: bool,
    ) -> None:
        """Launch Hopper's kernel on the factors in `scratch`."""
        tile = min(TILE, shape.value_size)
        sizes = describe_heads(shape)
        launch(
            hopper_delta.walk,
            (shape.value_heads * (shape.value_size // tile),),
            describe_blocks(convolved, CHUNK, shape.key_size),
            describe_blocks(convolved, CHUNK, tile),
            describe_blocks(scratch.mix.view(-1, CHUNK), CHUNK, CHUNK),
            describe_blocks(scratch.fold.view(-1, CHUNK), shape.key_size, CHUNK),
            *(plan.walks, scratch.lines, state.decays, state.memory, out),
            len(plan.runs) - 1,
            shape.key_size**-0.5,
            STAGES=WALK_STAGES,
            HOLDS=int(holds),
            enable_fp_fusion=False,
            **{key: sizes[key] for key in ("KEY_HEADS", "HEADS", "DV")},
            **self._options(4),
        )

    def _can_walk(self, convolved: Tensor, shape: DeltaShape) -> bool:
        """Return whether Hopper's kernel serves: a wide step in bfloat16, and heads that fill the tensor cores."""
        fills = shape.key_size in (64, 128) and shape.value_size in (64, 128)
        return self.hopper and len(convolved) > NARROW and convolved.dtype == torch.bfloat16 and fills

    def _can_read_single(self, dtype: torch.dtype, shape: DeltaShape) -> bool:
        """Return whether the kernel for single rows serves. It is proven for these heads, on Hopper.

        Compiled for keys of 64 by Triton 3.6, it returned other numbers.
        """
        fills = shape.key_size == 128 and shape.value_size in (64, 128)
        return self.hopper and dtype == torch.bfloat16 and fills

    def _keep_rows(self, rows: Tensor, ring: Tensor, edge: Tensor | None, batch: StateBatch) -> None:
        plan = self._step_chunks(batch, len(ring))
        width = ring.shape[2]
        block = 128
        launch(
            delta_rows.store_settled_rows,
            (len(plan.runs) - 1, triton.cdiv(width, block)),
            plan.chunks,
            plan.runs,
            batch.settled,
            rows,
            ring,
            ring if edge is None else edge,
            rows.stride(0),
            WIDTH=width,
            EDGE=edge is not None,
            HOLDS=batch.holds,
            BLOCK=block,
            **self._options(4),
        )

    def advance_state(self, states: LayerStates, slot: int, base: int) -> None:
        """Run settled steps of no rows over a whole chunk that is in the rings, for some layers in each launch.

        The slot of a layer is one of the slots of all layers to the kernels.
        """
        whole = states.whole
        heads, key_size, value_size = whole.memory.shape[1:]
        shape = DeltaShape((whole.keys.shape[2] - heads * value_size) // key_size, heads, key_size, value_size)
        nothing = whole.keys.new_empty(0, shape.channels)
        unread = DeltaWeights(shape, whole.decays, whole.decays, whole.decays)  # by rows that are not new
        unsettled = torch.zeros(1, dtype=torch.int64, device=self.device)
        for plan in plan_advance(states, slot, base, ADVANCED_LAYERS):
            self._run(nothing, nothing, unread, whole, (plan, unsettled), ALL)
        last = base % RING + CHUNK
        states.stacked.conv[:, slot] = states.stacked.inputs[:, slot, last - TAPS + 1 : last]

    def gated_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return delta_launches.normalize_and_gate(x, gate, weight, eps, self._options(4))

    def apply_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return delta_launches.apply_gate(x, gate, self._options(4))

    def _options(self, warps: int) -> LaunchArguments:
        return launch_options(warps, self.pdl)

    def _wide_options(self, convolved: Tensor) -> WideArguments:
        """Return the options of kernels that multiply whole chunks. Nothing may change the order of their sums."""
        inputs, parts = PIECES[convolved.dtype]
        return {"INPUTS": inputs, "PARTS": parts, "enable_fp_fusion": False, "num_stages": 1, **self._options(4)}

    def _scratch(self, limit: int, shape: DeltaShape, parts: int) -> FactorScratch:
        key = (triton.next_power_of_2(limit), shape.value_heads, parts, shape.key_size)
        if key not in self._factors:
            room = key[:2]
            kind = torch.bfloat16
            self._factors[key] = FactorScratch(
                torch.empty(*room, parts, CHUNK, CHUNK, dtype=kind, device=self.device),
                torch.empty(*room, parts, shape.key_size, CHUNK, dtype=kind, device=self.device),
                torch.empty(*room, 3, CHUNK, device=self.device),
            )
        return self._factors[key]

    def _step_chunks(self, batch: StateBatch, slots: int) -> ChunkPlan:
        """Return the step's chunks. Kernels that read them wait for the kernels before them."""
        if batch.bucket not in self._plans:
            segments = min(batch.bucket, slots)
            limit = min(batch.bucket, batch.bucket // CHUNK + 2 * segments)
            self._plans[batch.bucket] = ChunkPlan(
                torch.zeros(limit, FIELDS, dtype=torch.int32, device=self.device),
                torch.zeros(segments + 1, 2, dtype=torch.int32, device=self.device),
                torch.zeros(segments + 1, FIELDS, dtype=torch.int32, device=self.device),
                self._make_singles(segments),
            )
            self._stale = True
        if self._stale:
            self.plan_chunks(batch)
        self.planned_bodies.add(self.running)
        return self._plans[batch.bucket]

    def _make_singles(self, segments: int) -> Tensor | None:
        if not self._reads_singles:
            return None
        return torch.full((segments, 4), -1, dtype=torch.int32, device=self.device)

    def begin_body(self, name: str, batch: StateBatch) -> None:
        """Prepare for a body that runs or is recorded: plan its chunks first, if it is known to need them."""
        self._stale = True
        self.running = name
        if name in self.planned_bodies and batch.bucket in self._plans:
            self.plan_chunks(batch)

    def plan_chunks(self, batch: StateBatch) -> None:
        """Compute the step's chunks on the device."""
        plan = self._plans[batch.bucket]
        launch(
            delta_rows.plan_chunks,
            (1,),
            batch.slots,
            batch.positions,
            batch.counts,
            batch.settled,
            plan.chunks,
            plan.runs,
            plan.walks,
            plan.runs if plan.singles is None else plan.singles,  # never written without
            batch.bucket,
            len(plan.chunks),
            len(plan.runs) - 1,
            ROWS=triton.next_power_of_2(batch.bucket),
            LIMIT=triton.next_power_of_2(len(plan.chunks)),
            RUNS=triton.next_power_of_2(len(plan.runs)),
            APART=batch.mixed and plan.singles is not None,
            num_warps=4,
        )
        self._stale = False

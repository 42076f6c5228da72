"""CUDA kernels of the decoder layer: Triton programs whose bits do not depend on the bucket, the row or its neighbours.

This file chooses tiles and launches; what is computed, and why its order is fixed, stands in `kernels/triton`. A tile
choice is free wherever it cannot change bits (rows and columns of a product, programs per split) and a constant where
it can (`KV_TILE`, `SPLIT`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
from attrs import define, evolve, field, frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from adapters.models.cuda_graphs import GraphCache
from adapters.models.kernels import AttentionMask, Batch, BlockBatch, Rope
from adapters.models.kernels.products import ProductPlan, Products
from adapters.models.kernels.proof import Proof
from adapters.models.kernels.triton import attention, block, linear, rows

T = TypeVar("T")

HEAD_SIZES = (16, 32, 64, 128, 256)
KV_TILE = 64
SPLIT = 256
SCRATCH_BYTES = 256 << 20
NARROW = 128
BLOCK_SPLITS = 64  # of a block's keys at most, so that one tile holds a head's partials
H200_SHARED = 227 << 10
LOG2_E = 1.4426950408889634


@frozen
class Packed:
    """A weight `[N, K]` as the products read it; gated ones hold gate and up rows in turn."""

    weight: Tensor
    gated: bool = False


@define
class Plan:
    """The step's row tiles on the device; stale until the running body has worked them out again."""

    tiles: Tensor | None = None
    tile: int = 0
    stale: bool = True


@frozen
class Tile:
    """Rows x columns x depth of one program's step, its warps and the steps that are loaded ahead."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


def choose_tile(
    count: int, columns: int, gated: bool, dtype: torch.dtype, processors: int, shared: int = H200_SHARED
) -> Tile:
    """Up to NARROW rows one tile holds them all; above, the largest tile that gives (nearly) every processor one.

    shared: bytes of shared memory a program may have, which bounds how many steps are loaded ahead.
    """
    if dtype == torch.float32:
        return Tile(16, 32, 32, 4, 3) if count <= NARROW else Tile(64, 64, 32, 8, 3)
    if count <= NARROW:
        tile = Tile(max(16, count), 64, 128, 4, 7)
    else:
        largest = Tile(128, 256, 64, 8, 4) if gated else Tile(256, 128, 64, 8, 4)
        candidates = (largest, Tile(128, 128, 64, 4, 3), Tile(128, 64, 128, 4, 4))
        programs = [triton.cdiv(count, tile.rows) * triton.cdiv(columns, tile.columns) for tile in candidates]
        enough = (tile for tile, number in zip(candidates, programs, strict=True) if number >= 0.9 * processors)
        tile = next(enough, candidates[-1])
    fits = (shared - 4096) // ((tile.rows + tile.columns) * tile.depth * dtype.itemsize)
    return evolve(tile, stages=max(1, min(tile.stages, fits)))


@define(eq=False)
class TritonKernels:
    """`Kernels` for one CUDA device.

    pdl: let a kernel start while the one before it drains; the default is wherever the device can (compute
    capability 9.0 on). Bits are the same either way.
    """

    device: torch.device
    pdl: bool | None = None
    graphs: GraphCache = field(init=False)
    _processors: int = field(init=False, default=4)
    _shared: int = field(init=False, default=H200_SHARED)
    _running: str = field(init=False, default="")
    _attending: set[str] = field(init=False, factory=set)
    _partials: dict[tuple[int, ...], tuple[Tensor, Tensor]] = field(init=False, factory=dict)

    name = "triton-1"
    kv_tile = KV_TILE

    def __attrs_post_init__(self) -> None:
        self.graphs = GraphCache(self.device)
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            self._processors = properties.multi_processor_count
            index = torch.cuda.current_device() if self.device.index is None else self.device.index
            self._shared = triton.runtime.driver.active.utils.get_device_properties(index)["max_shared_mem"]
            self.pdl = properties.major >= 9 if self.pdl is None else self.pdl

    def fresh(self) -> TritonKernels:
        return TritonKernels(self.device, self.pdl)

    def prove(self, products: Products, known: ProductPlan | None = None) -> Proof:  # noqa: ARG002
        """Every element is one chain over ascending K whatever the shape: the probe's whole layer is the proof."""
        return Proof(None)

    def using(self, plan: ProductPlan | None) -> TritonKernels:  # noqa: ARG002
        return self.fresh()

    def pack(self, weight: Tensor) -> Packed:
        if weight.shape[1] * weight.element_size() % 16:
            raise ValueError(
                f"a weight of shape {tuple(weight.shape)} cannot be used on CUDA: a row must be a multiple of 16 bytes"
            )
        return Packed(weight.contiguous())

    def pack_gated(self, weight: Tensor) -> Packed:
        gate, up = weight.chunk(2)
        return Packed(self.pack(torch.stack((gate, up), 1).flatten(0, 1)).weight, gated=True)

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        return self._product(x, packed)

    def gated(self, x: Tensor, packed: Packed) -> Tensor:
        return self._product(x, packed)

    def _product(self, x: Tensor, packed: Packed) -> Tensor:
        w, (count, depth) = packed.weight, x.shape
        columns = len(w)
        out = x.new_empty(count, columns // 2 if packed.gated else columns)
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        tile = choose_tile(count, columns, packed.gated, x.dtype, self._processors, self._shared)
        x_desc = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
        w_desc = TensorDescriptor.from_tensor(w, [tile.columns, tile.depth])
        shape = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": tile.depth, "STAGES": tile.stages}
        options = self._options(tile.warps) | {"GATED": packed.gated, "PRECISION": precision}
        if count <= NARROW:
            grid = (triton.cdiv(columns, tile.columns), triton.cdiv(count, tile.rows))
            linear.linear_narrow[grid](w_desc, x_desc, out, count, columns, depth, **shape, **options)
        else:
            options["GROUP"] = 8 if packed.gated else 4
            programs = triton.cdiv(count, tile.rows) * triton.cdiv(columns, tile.columns)
            linear.linear_wide[(programs,)](x_desc, w_desc, out, count, columns, depth, **shape, **options)
        return out

    def _options(self, warps: int) -> dict[str, Any]:
        return {"PDL": self.pdl, "num_warps": warps, "launch_pdl": self.pdl}

    def add_norm(self, residual: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
        out = torch.empty_like(residual)
        count, width = residual.shape
        block = triton.next_power_of_2(width)
        rows.add_norm[(count,)](
            residual,
            residual if delta is None else delta,
            weight,
            out,
            width,
            eps,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            **self._options(4 if block <= 2048 else 8),
        )
        return out

    def rotate_store(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: Rope,
        batch: Batch,
        k_cache: Tensor,
        v_cache: Tensor,
    ) -> Tensor:
        _, kv, capacity, head = k_cache.shape
        if head not in HEAD_SIZES:
            raise ValueError(f"head_dim {head} is not supported on CUDA; accepted: {', '.join(map(str, HEAD_SIZES))}")
        heads = qkv.shape[1] // head - 2 * kv  # none, if rows are only stored
        q = qkv.new_empty(len(qkv), heads, head)
        at_once = 8
        grid = (len(qkv), triton.cdiv(heads + 2 * kv, at_once))
        rows.rotate_store[grid](
            qkv,
            q_norm,
            k_norm,
            rope.cos,
            rope.sin,
            batch.slots,
            batch.positions,
            q,
            k_cache,
            v_cache,
            capacity,
            eps,
            HEADS=heads,
            KV=kv,
            HALF=head // 2,
            BLOCK=at_once,
            **self._options(4),
        )
        return q

    def store(
        self, kv: Tensor, k_norm: Tensor, eps: float, rope: Rope, batch: Batch, k_cache: Tensor, v_cache: Tensor
    ) -> None:
        self.rotate_store(kv, k_norm, k_norm, eps, rope, batch, k_cache, v_cache)

    def attend(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: Batch) -> Tensor:
        bucket, heads, head = q.shape
        slots, kv, capacity, _ = k_cache.shape
        group = heads // kv
        padded = triton.next_power_of_2(group)
        splits = triton.cdiv(capacity, SPLIT)
        query_tile, key_tile = (32, 32) if q.dtype == torch.float32 else (64, KV_TILE)
        tiles = self._tiles(batch, query_tile // padded, slots)
        limit = len(tiles)
        out = torch.empty_like(q)
        keys = TensorDescriptor.from_tensor(k_cache.view(-1, head), [key_tile, head])
        values = TensorDescriptor.from_tensor(v_cache.view(-1, head), [key_tile, head])
        scale = head**-0.5 * LOG2_E
        shape = {"HEADS": heads, "KV": kv, "GROUP": group, "PADDED": padded, "HEAD": head}
        shape |= {"BLOCK_M": query_tile, "BLOCK_N": key_tile, "SPLIT": SPLIT}
        options = self._attention_options(q, query_tile, key_tile)
        if bucket > NARROW or bucket * heads * splits * head * 4 > SCRATCH_BYTES:
            attention.attend_chain[(limit * kv,)](
                q, keys, values, tiles, out, capacity, limit, scale, **shape, **options
            )
            return out.view(bucket, -1)
        acc, sums = self._scratch(heads, splits, head)
        programs = min(limit * splits * kv, self._processors)
        attention.attend_splits[(programs,)](
            q,
            keys,
            values,
            tiles,
            acc,
            sums,
            capacity,
            limit,
            splits,
            scale,
            LIMIT=triton.next_power_of_2(limit),
            **shape,
            **options,
        )
        attention.merge[(bucket, heads)](
            acc,
            sums,
            batch.positions,
            out,
            splits,
            HEADS=heads,
            HEAD=head,
            SPLIT=SPLIT,
            AT_ONCE=16 if head <= 128 else 8,
            enable_fp_fusion=False,
            maxnreg=168,  # one warp, and all its loads in flight: the compiler would trade them for occupancy
            **self._options(1),
        )
        return out.view(bucket, -1)

    def attend_block(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: BlockBatch, mask: AttentionMask
    ) -> Tensor:
        bucket, heads, head = q.shape
        _, kv, capacity, _ = k_cache.shape
        split = SPLIT
        while split * BLOCK_SPLITS < capacity:
            split *= 2
        splits = triton.cdiv(capacity, split)
        query_tile, key_tile = (32, 32) if q.dtype == torch.float32 else (64, KV_TILE)
        padded = triton.next_power_of_2(heads // kv)
        acc, sums = self._block_scratch(bucket, heads, splits, head)
        out = torch.empty_like(q)
        block.attend_splits[(2 * self._processors,)](
            q,
            TensorDescriptor.from_tensor(k_cache.view(-1, head), [key_tile, head]),
            TensorDescriptor.from_tensor(v_cache.view(-1, head), [key_tile, head]),
            batch.slots,
            batch.positions,
            batch.starts,
            batch.lengths,
            batch.firsts,
            acc,
            sums,
            bucket,
            capacity,
            splits,
            head**-0.5 * LOG2_E,
            HEADS=heads,
            KV=kv,
            GROUP=heads // kv,
            PADDED=padded,
            HEAD=head,
            BLOCK_M=query_tile,
            BLOCK_N=key_tile,
            SPLIT=split,
            TILE=query_tile // padded,
            ROWS=triton.next_power_of_2(bucket),
            CAUSAL=mask.causal,
            WINDOW=mask.window,
            **self._attention_options(q, query_tile, key_tile),
        )
        block.merge[(bucket, heads)](
            acc,
            sums,
            batch.starts,
            batch.lengths,
            batch.firsts,
            out,
            splits,
            HEADS=heads,
            HEAD=head,
            SPLIT=split,
            LIMIT=triton.next_power_of_2(splits),
            WINDOW=mask.window,
            **self._options(4),
        )
        return out.view(bucket, -1)

    def _attention_options(self, q: Tensor, query_tile: int, key_tile: int) -> dict[str, Any]:
        head, size, wide = q.shape[2], q.dtype.itemsize, q.dtype == torch.float32
        fits = (self._shared - 4096 - 2 * query_tile * head * size) // (2 * key_tile * head * size)
        stages = 1 if wide else max(1, min(3 if head <= 128 else 2, fits))
        own = {"enable_fp_fusion": False, "PRECISION": "ieee" if wide else "tf32", "STAGES": stages}
        return self._options(8 if wide or head > 128 else 4) | own

    def _block_scratch(self, bucket: int, heads: int, splits: int, head: int) -> tuple[Tensor, Tensor]:
        """The same for blocks, whose splits are few enough for every bucket to have its own."""
        key = (bucket, heads, splits, head)
        if key not in self._partials:
            self._partials[key] = (
                torch.empty(key, dtype=torch.float32, device=self.device),
                torch.empty(bucket, heads, splits, 2, dtype=torch.float32, device=self.device),
            )
        return self._partials[key]

    def _scratch(self, heads: int, splits: int, head: int) -> tuple[Tensor, Tensor]:
        """Where splits leave their partials; kept for good, since recorded graphs hold its address."""
        key = (heads, splits, head)
        if key not in self._partials:
            sizes = (min(NARROW, SCRATCH_BYTES // (heads * splits * head * 4)), heads, splits)
            self._partials[key] = (
                torch.empty(*sizes, head, dtype=torch.float32, device=self.device),
                torch.empty(*sizes, 2, dtype=torch.float32, device=self.device),
            )
        return self._partials[key]

    def _tiles(self, batch: Batch, tile: int, slots: int) -> Tensor:
        """The step's tiles; kernels read them without waiting for the kernel before, so they are there long before."""
        plan: Plan = batch.plan
        if plan.tiles is None:
            limit = min(batch.bucket, triton.cdiv(batch.bucket, tile) + slots + 1)
            plan.tiles = torch.zeros(limit, 8, dtype=torch.int32, device=self.device)
            plan.tile = tile
        if plan.stale:
            self._plan(batch)
            if self.device.type == "cuda":
                torch.cuda.current_stream(self.device).synchronize()
        self._attending.add(self._running)
        return plan.tiles

    def _plan(self, batch: Batch) -> None:
        plan: Plan = batch.plan
        assert plan.tiles is not None
        limit = len(plan.tiles)
        rows.plan_tiles[(1,)](
            batch.slots,
            batch.positions,
            plan.tiles,
            batch.bucket,
            limit,
            TILE=plan.tile,
            SPLIT=SPLIT,
            ROWS=triton.next_power_of_2(batch.bucket),
            LIMIT=triton.next_power_of_2(limit),
            num_warps=4,
        )
        plan.stale = False

    def prepare(self, batch: Batch) -> None:
        if batch.plan is None:
            batch.plan = Plan()
        batch.plan.stale = True

    def launch(self, name: str, batch: Batch, body: Callable[[], T]) -> T:
        def planned() -> T:
            batch.plan.stale, self._running = True, name
            if name in self._attending and batch.plan.tiles is not None:
                self._plan(batch)
            return body()

        return self.graphs.run((name, batch.bucket), planned)

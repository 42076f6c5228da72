"""The numerics probe: proves, on this machine, that a row's bits do not depend on how it was computed.

First every product that serving can ask for, shape by shape and with the threads that will serve (`kernels/proof.py`);
what agrees, and is quickest among that, becomes the plan that the kernels keep to. Then one decoder layer of the
model's own shapes, with random weights, as a check that the list is whole: every bucket is compared
with a chunk of C rows, bit for bit, hidden rows and K and V rows, wherever the rows stand in the step, alone and next
to other slots, across the boundaries of the kernels' key tiles. Nothing is left out for lack of time.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from attrs import define, evolve, field, frozen
from cattrs import Converter
from cattrs.errors import BaseValidationError
from torch import Tensor

from adapters.models.config import Qwen3Config
from adapters.models.kernels import Kernels
from adapters.models.kernels.products import ProductPlan, Products, checked
from adapters.models.kernels.proof import Proof
from adapters.models.qwen3 import BUCKETS, Qwen3Shard, products
from adapters.models.shard import Segment, Step
from adapters.models.synthetic import RandomWeights

BLOCK_SIZE = 64
_VERSION = 3
_MAX_BOUNDARIES = 16
_VOCABULARY = 256
_NARROW = 8  # buckets up to this one mostly decode, so single rows are tried over every span
_INSTRUCTION_SETS = ("avx2", "avx512_f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16")
# What a user may set that changes which kernels the libraries choose.
_SWITCHES = (
    *("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_CPU_ISA_HINTS", "DNNL_CPU_ISA_HINTS"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE", "ATEN_CPU_CAPABILITY", "MKL_CBWR"),
)
_SLOTS = 3
_FINGERPRINT_ROWS = 64


@frozen
class Numerics:
    """What the probe found, and so what the engine may do.

    mode: "buckets", any bucket gives a row the same bits, so any position that is a multiple of `block_size` may be
    started from and decoded rows are as good as prefilled ones; or "grid", whole chunks of C from position 0 and
    decoding at the one width `buckets[0]`.
    buckets: ascending; the last one is C, the chunk of a prefill.
    plan: the shapes in which products were proven, for kernels that need one.
    numerics_class: within one class the same request gives the same bits. Device kind, instruction set or GPU, torch
    build, kernels, the shapes that serve, and a fingerprint of computed bits, which stands for whatever else matters.
    """

    mode: Literal["buckets", "grid"]
    buckets: tuple[int, ...]
    block_size: int
    chunk: int
    kernels: str
    threads: int
    numerics_class: str
    seconds: float
    checks: int
    spans: int
    shapes: int = 0
    plan: ProductPlan | None = None
    failures: tuple[str, ...] = ()

    @property
    def batch_rows(self) -> int:
        """Rows that one decode step may hold: any in buckets, the one width in a grid."""
        return self.chunk if self.mode == "buckets" else self.buckets[0]

    def shown(self) -> Mapping[str, Any]:
        """JSON-ready, for people."""
        return {
            "shapes": self.mode,
            "buckets": list(self.buckets),
            "block_size": self.block_size,
            "chunk": self.chunk,
            "kernels": self.kernels,
            "threads": self.threads,
            "class": self.numerics_class,
            "probe": {
                "seconds": round(self.seconds, 3),
                "checks": self.checks,
                "spans": self.spans,
                "products": self.shapes,
            },
            "products": [] if self.plan is None else self.plan.shown(),
            "failures": list(self.failures),
        }

    def to_json(self) -> str:
        return json.dumps({"version": _VERSION, **_converter.unstructure(self)})

    @classmethod
    def from_json(cls, text: str) -> Numerics:
        """What `to_json` wrote; ValueError for anything else."""
        value = json.loads(text)
        if not isinstance(value, dict) or value.pop("version", None) != _VERSION:
            raise ValueError("not the outcome of this version's numerics probe")
        try:
            found = _converter.structure(value, cls)
        except (BaseValidationError, TypeError, ValueError) as error:
            raise ValueError("the numerics probe's outcome has missing or malformed fields") from error
        buckets = found.buckets
        sound = all(bucket > 0 for bucket in buckets) and buckets == tuple(sorted(set(buckets)))
        if not sound or not buckets or buckets[-1] != found.chunk:
            raise ValueError("the numerics probe's outcome has impossible buckets")
        if found.plan is not None:
            checked(found.plan)
        return found


def plan_to_json(plan: ProductPlan | None) -> str:
    return json.dumps({"version": _VERSION, "plan": _converter.unstructure(plan)})


def plan_from_json(text: str) -> ProductPlan | None:
    """What `plan_to_json` wrote; ValueError for anything else."""
    value = json.loads(text)
    if not isinstance(value, dict) or value.get("version") != _VERSION:
        raise ValueError("not a plan of this version's products")
    try:
        found = None if value.get("plan") is None else _converter.structure(value["plan"], ProductPlan)
    except (BaseValidationError, TypeError, ValueError) as error:
        raise ValueError("a plan of products has missing or malformed fields") from error
    return None if found is None else checked(found)


def _exactly(value: Any, kind: type) -> Any:
    """JSON's own types only: nothing is converted."""
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise TypeError(f"{value!r} is not {kind.__name__}")
    return value


_converter = Converter(forbid_extra_keys=True)
for _kind in (int, str, float, bool):
    _converter.register_structure_hook(_kind, _exactly)


def probe_key(
    config: Qwen3Config,
    kernels: Kernels,
    *,
    device: torch.device,
    dtype: torch.dtype,
    chunk: int,
    capacity: int,
    sizes: Sequence[int] = BUCKETS,
    memory: int = 1 << 62,
) -> str:
    """Under which an outcome may be kept: 32 hex digits over all that the probe depends on."""
    listed = products(
        config, buckets_of(sizes, chunk), capacity=capacity, dtype=dtype, threads=torch.get_num_threads(), memory=memory
    )
    shapes = evolve(config, dtype=None, num_layers=1)
    return kept_under(listed, kernels, device, (shapes, chunk, capacity, tuple(sizes), str(dtype)))


def kept_under(listed: Products, kernels: Kernels, device: torch.device, more: object = None) -> str:
    """Under which the proof of a list of products may be kept, and whatever else was measured: 32 hex digits."""
    parts = (_VERSION, str(device), torch.get_num_threads(), machine(kernels, device), listed, more)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def buckets_of(sizes: Sequence[int], chunk: int) -> tuple[int, ...]:
    return (*(bucket for bucket in sorted(sizes) if bucket < chunk), chunk)


def machine(kernels: Kernels, device: torch.device) -> str:
    """Device kind, instruction set or GPU, torch build and kernels, in words."""
    build = f"torch {torch.__version__}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return f"cuda sm_{properties.major}{properties.minor} {properties.name}, {build}, {kernels.name}"
    found = torch.cpu.get_capabilities()
    sets = [name for name in _INSTRUCTION_SETS if found.get(name)]
    sets += [f"{name}={os.environ[name]}" for name in _SWITCHES if name in os.environ]
    name = found.get("cpu_name") or platform.processor() or platform.machine()
    isa = torch.backends.cpu.get_cpu_capability()
    return f"cpu {platform.machine()} {name} {isa} ({' '.join(sets)}), {build}, {kernels.name}"


def probe(
    config: Qwen3Config,
    kernels: Kernels,
    *,
    device: torch.device,
    dtype: torch.dtype,
    chunk: int,
    capacity: int,
    sizes: Sequence[int] = BUCKETS,
    memory: int = 1 << 62,
) -> Numerics:
    """Take the measure of `kernels` on `device`; a second or two. The kernels themselves are left as they were.

    memory: bytes that packed weights may take in host memory.
    """
    start = time.perf_counter()
    buckets, threads = buckets_of(sizes, chunk), torch.get_num_threads()
    proof = kernels.prove(products(config, buckets, capacity=capacity, dtype=dtype, threads=threads, memory=memory))
    # The embedding alone: the head is on the list of products, and nothing else happens to logits.
    layer = evolve(config, num_layers=2, vocab_size=_VOCABULARY, tie_word_embeddings=False)
    weights = RandomWeights(layer, 1, device, torch.float32 if device.type == "cpu" else dtype, layer.hidden_size**-0.5)
    caches: dict[str, Any] = {"device": device, "dtype": dtype, "slots": _SLOTS, "capacity": capacity}
    shard = Qwen3Shard(layer, weights, kernels.using(proof.plan), layers=range(1), buckets=buckets, **caches)
    try:
        bench = Bench(shard, capacity)
        spans = bench.run(kernels.kv_tile, every=proof.plan is None)
        kept = tuple(bucket for bucket in buckets if bucket not in bench.broken)
        buckets_hold = proof.holds and chunk not in bench.broken and (len(kept) > 1 or len(buckets) == 1)
        if not buckets_hold:
            kept = tuple(sorted({bench.width(), chunk}))
        on_cpu = device.type == "cpu"
        return Numerics(
            mode="buckets" if buckets_hold else "grid",
            buckets=kept,
            block_size=BLOCK_SIZE if buckets_hold else chunk,
            chunk=chunk,
            kernels=kernels.name,
            threads=threads if on_cpu else 0,
            numerics_class=f"{machine(kernels, device)}, {_served(kept, proof, threads)}, {bench.fingerprint}",
            seconds=time.perf_counter() - start,
            checks=bench.checks + proof.checks,
            spans=spans,
            shapes=proof.shapes,
            plan=proof.plan,
            failures=(*proof.failures, *bench.broken.values()),
        )
    finally:
        shard.close()


def _served(buckets: Sequence[int], proof: Proof, threads: int) -> str:
    """16 hex digits of the shapes that serve: whoever serves in others shares nothing with us."""
    plan = None if proof.plan is None else proof.plan.numbers()
    parts = (tuple(buckets), plan, 0 if proof.single else threads, proof.digest)
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


@frozen
class Rows:
    """What one segment left: hidden `[n, D]`, each KV tensor `[KV, n, hd]`."""

    start: int
    hidden: Tensor
    kv: Mapping[str, Tensor]

    def part(self, start: int, stop: int) -> Rows:
        rows = slice(start - self.start, stop - self.start)
        return Rows(start, self.hidden[rows], {name: tensor[:, rows] for name, tensor in self.kv.items()})

    def tensors(self) -> list[Tensor]:
        return [self.hidden, *self.kv.values()]


def same_bits(ours: Rows, theirs: Rows) -> bool:
    return all(
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        for a, b in zip(ours.tensors(), theirs.tensors(), strict=True)
    )


@define(eq=False)
class Bench:
    """Runs segments of one token sequence, whose earlier K and V rows are random, and compares what comes out."""

    shard: Qwen3Shard
    capacity: int
    tokens: Tensor = field(init=False)
    broken: dict[int, str] = field(init=False, factory=dict)
    checks: int = field(init=False, default=0)
    fingerprint: str = field(init=False, default="")

    def __attrs_post_init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        config = self.shard.config
        self.tokens = torch.randint(0, config.vocab_size, (self.capacity,), generator=generator)
        generator = torch.Generator(self.shard.device).manual_seed(3)
        shape = (config.num_kv_heads, self.capacity, config.head_dim)
        rows = {}
        for name in ("layers.0.k", "layers.0.v"):
            rows[name] = torch.empty(shape, device=self.shard.device, dtype=self.shard.dtype)
            rows[name].normal_(generator=generator)
        self.shard.import_rows(0, 0, rows)
        for slot in range(1, _SLOTS):
            self.shard.copy_rows(0, slot, self.capacity)

    def compute(self, bucket: int, *segments: Segment) -> list[Rows]:
        """The rows of every segment; slots all hold the same sequence."""
        step = Step(segments, bucket)
        inputs = torch.cat([self.tokens[segment.start : segment.start + segment.count] for segment in segments])
        hidden = self.shard.forward(step, inputs).hidden
        found, row = [], 0
        for segment in segments:
            rows, stop = slice(row, row + segment.count), segment.start + segment.count
            kv = self.shard.export_rows(segment.slot, segment.start, stop)
            found.append(Rows(segment.start, hidden[rows].clone(), kv))
            row += segment.count
        return found

    def run(self, tile: int, *, every: bool) -> int:
        """Check every bucket at key tile boundaries, `every` sampled one or the first and the last; returns how
        many."""
        rows = min(self.shard.buckets[-1], self.capacity)
        last = self.capacity - rows
        at = [min(max(0, boundary - rows // 2), last) for boundary in boundaries(tile, self.capacity)]
        thorough = {0, *at[:1]}
        starts = dict.fromkeys([*sorted(thorough), last, *(at if every else ())])
        for start in starts:
            self.check_span(start, rows, tile, thorough=start in thorough)
        return len(starts)

    def check_span(self, start: int, rows: int, tile: int, *, thorough: bool) -> None:
        """Compare pieces of `[start, start + rows)` with the whole of it, computed as one chunk of C."""
        chunk = self.shard.buckets[-1]
        [whole] = self.compute(chunk, Segment(0, start, rows))
        if not self.fingerprint:
            self._take_fingerprint(whole.part(start, start + min(rows, _FINGERPRINT_ROWS)))
        edge = min(max(start + 1, (start // tile + 1) * tile), start + rows - 1)
        for bucket in self.shard.buckets:
            for at, count in pieces(start, rows, edge, bucket, thorough=thorough):
                if bucket in self.broken:
                    break
                [part] = self.compute(bucket, Segment(0, at, count))
                self._compare(bucket, "alone", whole, part)
            if thorough and bucket not in self.broken:
                self._check_batch(bucket, whole, start, rows, edge)
            if bucket in self.broken:
                self.shard.import_rows(0, start, whole.kv)

    def _check_batch(self, bucket: int, whole: Rows, start: int, rows: int, edge: int) -> None:
        """Neighbours: segments of three slots in one step, each as it came out of the chunk."""
        count = max(1, min(bucket // _SLOTS, rows))
        ends = {start, min(edge, start + rows - count), start + rows - count}
        segments = [Segment(slot, at, count) for slot, at in enumerate(sorted(ends))]
        if sum(segment.count for segment in segments) > bucket:
            return
        for slot in range(1, _SLOTS):
            self.shard.import_rows(slot, start, whole.kv)
        for part in self.compute(bucket, *segments):
            self._compare(bucket, "batched", whole, part)

    def _compare(self, bucket: int, how: str, whole: Rows, part: Rows) -> None:
        stop = part.start + len(part.hidden)
        self.checks += 1
        if bucket not in self.broken and not same_bits(whole.part(part.start, stop), part):
            chunk = self.shard.buckets[-1]
            self.broken[bucket] = (
                f"bucket {bucket}: rows {part.start}..{stop - 1}, {how}, differ from a chunk of {chunk}"
            )

    def _take_fingerprint(self, rows: Rows) -> None:
        digest = hashlib.blake2b(digest_size=8)
        for tensor in rows.tensors():
            digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
        self.fingerprint = digest.hexdigest()

    def width(self) -> int:
        """The smallest bucket at which a row is the same alone, in another place and among others; else C."""
        at, other = self.capacity // 2, self.capacity // 3
        for bucket in self.shard.buckets[:-1]:
            [alone] = self.compute(bucket, Segment(0, at, 1))
            _, batched, _ = self.compute(bucket, Segment(1, other, 1), Segment(0, at, 1), Segment(2, at, 1))
            if same_bits(alone, batched):
                return bucket
        return self.shard.buckets[-1]


def boundaries(tile: int, capacity: int) -> list[int]:
    """Key tile boundaries up to the capacity, at most 16: all of them, or evenly many with the first and the last."""
    count = capacity // tile
    if count <= _MAX_BOUNDARIES:
        return [tile * index for index in range(1, count + 1)]
    spread = {round(1 + (count - 1) * index / (_MAX_BOUNDARIES - 1)) for index in range(_MAX_BOUNDARIES)}
    return [tile * index for index in sorted(spread)]


def pieces(start: int, rows: int, edge: int, bucket: int, *, thorough: bool) -> list[tuple[int, int]]:
    """(position, count) of the pieces of `[start, start + rows)` that a bucket computes; one straddles `edge`."""
    end = start + rows
    full = min(bucket, rows)
    straddling = min(max(start, edge - max(1, full // 2)), end - full)
    found = [(straddling, full)]
    if thorough or bucket <= _NARROW:
        found += [(edge, 1), (edge - 1, 1), (end - 1, 1)]
    if thorough:
        odd, at = max(1, full - 1), min(start + BLOCK_SIZE, end - 1)
        found += [(start, full), (end - odd, odd), (at, min(bucket, end - at))]
    return list(dict.fromkeys(found))

"""The numerics probe: proves, on this machine, that a row's bits do not depend on how it was computed.

Theory of operation
-------------------

1. Every product that serving can ask for is tried, shape by shape and with the threads that will serve
   (`kernels/proof/`). Among the ways that agree bit for bit, the quickest becomes the plan of the kernels.
2. The list of products may have gaps. So one decoder layer of each kind of the family is run with random weights, in
   the shapes of the model. Each bucket is compared with a chunk of C rows, bit for bit: hidden rows, and rows of K and
   V. Rows are tried at every place in a step: alone, next to rows of other slots, and across the boundaries of the
   kernels' key tiles.
3. Layers with recurrent state have trials of their own (`state_probe.py`).

Without a plan of products, weights are packed here as the model's are. No trial is left out for lack of time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence

import torch
from attrs import evolve, frozen

from adapters.checkpoint.packed_matrix import StepLayout
from adapters.models.decoder.cpu_experts import CpuExperts
from adapters.models.decoder.family import Family, ModelConfig
from adapters.models.decoder.shard import BUCKETS, ShardPlacement
from adapters.models.kernels.formats.row_format import Rows, row_types
from adapters.models.kernels.interfaces.expert_kernels import ExpertKernels
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import ProductPlan, Products, Proof
from adapters.models.numerics.layer_bench import PROBED_SLOTS, LayerBench
from adapters.models.numerics.probe_result import (
    BLOCK_SIZE,
    Numerics,
    build_proof_key,
    describe_expert_kernels,
    describe_machine,
)
from adapters.models.numerics.state_probe import StateBench
from adapters.models.numerics.synthetic import RandomWeights, packed_in

_EXPERTS = 3  # the arithmetic of experts, of which nothing that was kept of another is taken


@frozen(kw_only=True)
class ProbeShape:
    """Everything about the served model and its device that a probe depends on.

    rows: the types that keys and values are kept in; None: `dtype`. chunk: rows of a prefill chunk. capacity: rows of a
    slot. sizes: the buckets that are tried in addition to the chunk. memory: bytes that weights may take in host
    memory. layouts: of tensors that may be multiplied in packed form.
    """

    device: torch.device
    dtype: torch.dtype
    rows: Rows | None = None
    chunk: int
    capacity: int
    sizes: Sequence[int] = BUCKETS
    memory: int = 1 << 62
    layouts: Mapping[str, StepLayout] = {}

    @property
    def buckets(self) -> tuple[int, ...]:
        return buckets_of(self.sizes, self.chunk)

    def list_products(self, config: ModelConfig) -> Products:
        """Return every product that serving can ask for."""
        return config.products(
            self.buckets,
            capacity=self.capacity,
            dtype=self.dtype,
            threads=torch.get_num_threads(),
            memory=self.memory,
            layouts=self.layouts,
        )


def probe_key(
    family: Family, config: ModelConfig, kernels: Kernels, shape: ProbeShape, experts: ExpertKernels | None = None
) -> str:
    """Return the key under which an outcome may be kept: 32 hex digits over all that the probe depends on."""
    kinds = (family.model_type, tuple(config.list_probed_layers()), *(() if config.experts is None else (_EXPERTS,)))
    dtypes = str(shape.dtype), f"torch.{row_types(shape.rows or shape.dtype).name}"
    own = () if experts is None else (describe_expert_kernels(experts), experts.bit_signature)
    facts = (kinds, shape.chunk, shape.capacity, tuple(shape.sizes), *dtypes, *own)
    return build_proof_key(shape.list_products(config), kernels, shape.device, facts)


def buckets_of(sizes: Sequence[int], chunk: int) -> tuple[int, ...]:
    """Return the sizes below a chunk, ascending, and the chunk."""
    return (*(bucket for bucket in sorted(sizes) if bucket < chunk), chunk)


def probe(
    family: Family,
    config: ModelConfig,
    kernels: Kernels,
    shape: ProbeShape,
    *,
    experts: ExpertKernels | None = None,
    known: ProductPlan | None = None,
) -> Numerics:
    """Prove what holds of `kernels` on the device. It takes a second or two, and leaves the kernels as they were.

    experts: those that compute the experts of the layers on the host, with a proven plan; None: the device does. known:
    products that were proven for these kernels before.
    """
    start = time.perf_counter()
    chunk = shape.chunk
    buckets = shape.buckets
    threads = torch.get_num_threads()
    proof = kernels.prove(shape.list_products(config), known)
    layouts = shape.layouts if proof.plan is None or experts is not None else {}
    found = [
        _probe_layer(family, small, kernels, proof, evolve(shape, layouts=own), layers=layers, experts=experts)
        for small, layers, own in packed_in(config.list_probed_layers(), layouts)
    ]
    broken = {bucket: why for layer_result in found for bucket, why in layer_result.broken.items()}
    kept = tuple(bucket for bucket in buckets if bucket not in broken)
    buckets_hold = proof.holds and chunk not in broken and (len(kept) > 1 or len(buckets) == 1)
    if not buckets_hold:
        narrow = [bucket for bucket in buckets[:-1] if all(bucket in layer_result.widths for layer_result in found)]
        kept = tuple(sorted({*narrow[:1], chunk}))
    fingerprint = "-".join(layer_result.fingerprint for layer_result in found)
    return Numerics(
        mode="buckets" if buckets_hold else "grid",
        buckets=kept,
        block_size=BLOCK_SIZE if buckets_hold else chunk,
        chunk=chunk,
        kernels=kernels.name if experts is None else f"{kernels.name}, experts {experts.name}",
        threads=threads if shape.device.type == "cpu" else 0,
        numerics_class=", ".join(
            (
                describe_machine(kernels, shape.device),
                *(() if experts is None else (f"experts on {describe_expert_kernels(experts)}",)),
                digest_served_shapes(kept, proof, threads, experts),
                fingerprint,
            )
        ),
        seconds=time.perf_counter() - start,
        checks=sum(layer_result.checks for layer_result in found) + proof.checks,
        spans=sum(layer_result.spans for layer_result in found),
        shapes=proof.shapes,
        plan=proof.plan,
        failures=(*proof.failures, *broken.values()),
    )


@frozen
class LayerFindings:
    """The findings about one kind of layer.

    broken: buckets that may not serve, and why. widths: buckets at which single rows may serve if not all buckets may.
    """

    broken: Mapping[int, str]
    widths: frozenset[int]
    checks: int
    spans: int
    fingerprint: str


def _probe_layer(
    family: Family,
    config: ModelConfig,
    kernels: Kernels,
    proof: Proof,
    shape: ProbeShape,
    *,
    layers: range,
    experts: ExpertKernels | None,
) -> LayerFindings:
    """Probe one layer of a kind. layers: which one of the small model `config`. experts: as in `probe`."""
    stored = torch.float32 if shape.device.type == "cpu" else shape.dtype
    weights = RandomWeights(config, 1, shape.device, stored, config.hidden_size**-0.5, shape.layouts)
    placement = ShardPlacement(
        device=shape.device,
        dtype=shape.dtype,
        rows=shape.rows,
        layers=layers,
        slots=PROBED_SLOTS,
        capacity=shape.capacity,
        buckets=shape.buckets,
        state_checkpoints=1,
    )
    cpu_experts = None
    if experts is not None:
        on_host = evolve(weights, device=torch.device("cpu"))
        cpu_experts = CpuExperts.prepare(layers, experts.copy_for_shard(), on_host, config.hidden_size, placement)
    shard = family.build(config, weights, kernels.with_plan(proof.plan), placement, cpu_experts=cpu_experts)
    try:
        bench: LayerBench | StateBench
        if shard.states.specs:
            bench = StateBench(shard, shape.capacity)
            spans = bench.run()
        else:
            bench = LayerBench(shard, config.hidden_size, shape.capacity)
            spans = bench.run(kernels.kv_tile, every=proof.plan is None)
        whole = proof.holds and not bench.broken
        widths = frozenset(shape.buckets[:-1] if whole else bench.widths())
        return LayerFindings(bench.broken, widths, bench.checks, spans, bench.fingerprint)
    finally:
        shard.close()


def digest_served_shapes(
    buckets: Sequence[int], proof: Proof, threads: int, experts: ExpertKernels | None = None
) -> str:
    """Return 16 hex digits over the shapes that serve. Servers with other shapes get another numerics class."""
    plan = None if proof.plan is None else proof.plan.bit_signature()
    own = () if experts is None else (experts.bit_signature,)
    parts = (tuple(buckets), plan, 0 if proof.single else threads, proof.digest, *own)
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

"""Proves numerics on every device of a plan, or finds what an earlier start has proven."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve, frozen

from adapters.models.decoder.expert_products import list_expert_products
from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.pipeline.pipelined_chunks import use_device
from adapters.models.decoder.shard import list_buckets
from adapters.models.kernels.cuda_capability import read_capability
from adapters.models.kernels.formats.row_format import RowTypes, name_row_types, read_row_types
from adapters.models.kernels.interfaces.expert_kernels import ExpertKernels
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import ProductPlan
from adapters.models.numerics.probe import ProbeShape, buckets_of, probe, probe_key
from adapters.models.numerics.probe_result import (
    Numerics,
    build_proof_key,
    join_numerics,
    plan_from_json,
    plan_to_json,
)
from adapters.models.open_checkpoint import Checkpoint
from adapters.remote.protocol.messages import Offer, Prove
from adapters.sequence_layout import dtype_name
from engine.loading.memory.device_survey import (
    Placement,
    build_expert_kernels,
    build_kernels,
    choose_chunk,
    host_memory,
    read_boot_id,
)
from engine.settings.calibration_cache import CalibrationCache
from engine.settings.model_options import RuntimeOptions, WeightOptions
from engine.settings.user_error import UserError

MOST_OFFERS = 15  # one less than `Prove` holds


@frozen(eq=False)
class ProvenKernels:
    """The kernels of each shard, for the shapes that are proven.

    shards: None for a shard in another process. experts: of the host, where it computes experts; else None.
    """

    shards: tuple[Kernels | None, ...]
    experts: ExpertKernels | None = None


def prove(
    weights: WeightOptions,
    runtime: RuntimeOptions,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    *,
    context: int,
    kept: CalibrationCache,
) -> tuple[Numerics, ProvenKernels]:
    """Prove numerics on each device, and return those of the whole model with the kernels of each shard.

    Outcomes are kept from one start to the next. Shards in other processes prove their own numerics and have their own
    kernels; they are offered the outcomes that are known here.
    """
    chunk = choose_chunk(runtime, plan, checkpoint.config)
    rows = read_row_types(weights.kv_dtype, dtype)
    fast = runtime.numerics == "fast"
    experts = None
    expert_plan = None
    if any(placement.cpu_experts for placement in plan):
        experts = build_expert_kernels(dtype)
        expert_plan = prove_expert_products(checkpoint, experts, buckets_of(list_buckets(plan[-1].device), chunk), kept)
        experts = experts.with_plan(expert_plan)
    found = dict[torch.device, tuple[Numerics, Kernels]]()
    computed = dict[torch.device, Numerics]()  # of layers whose experts the host computes
    offers = list[Offer]()
    # A draft may run on the device of the last layers, with a copy of the head. It is in this process wherever they
    # are.
    for device in dict.fromkeys(placement.device for placement in plan if placement.is_local or placement is plan[-1]):
        with use_device(device):
            kernels = build_kernels(device, dtype)
            shape = build_probe_shape(checkpoint, device, (dtype, rows), chunk, context)
            numerics = load_or_run_probe(checkpoint, kernels, kept, shape)
            offers.append(Offer(probe_key(checkpoint.family, checkpoint.config, kernels, shape), numerics.to_json()))
            if any(placement.cpu_experts for placement in plan if placement.device == device):
                computed[device] = load_or_run_probe(
                    checkpoint, kernels, kept, shape, experts=experts, known=numerics.plan
                )
        found[device] = numerics, kernels
    proven = list[tuple[range, Numerics]]()
    for placement in plan:
        if placement.peer is None:
            hosted = placement.cpu_experts
            start, stop = (hosted.start, hosted.stop) if hosted else (placement.layers.start, placement.layers.start)
            runs = (range(placement.layers.start, start), range(start, stop), range(stop, placement.layers.stop))
            of_runs = (found[placement.device][0], computed.get(placement.device), found[placement.device][0])
            proven += [(run, numerics) for run, numerics in zip(runs, of_runs, strict=True) if run and numerics]
        else:
            asked = Prove(
                dtype_name(dtype),  # type: ignore[arg-type]
                name_row_types(rows, dtype),
                chunk,
                context,
                read_boot_id(),
                weights.quantized_bits,
                tuple(offers[:MOST_OFFERS]),
            )
            proven.append((placement.layers, placement.peer.prove(asked)))
    own = tuple(
        found[placement.device][1].with_plan(choose_served_plan(found[placement.device][0].plan, fast=fast))
        if placement.device in found
        else None
        for placement in plan
    )
    whole = join_numerics(proven)
    if experts is not None:
        experts = experts.with_plan(choose_served_plan(expert_plan, fast=fast))
    return evolve(whole, plan=found[plan[-1].device][0].plan), ProvenKernels(own, experts)


def prove_expert_products(
    checkpoint: Checkpoint, kernels: ExpertKernels, buckets: Sequence[int], kept: CalibrationCache
) -> ProductPlan | None:
    """Return how the host multiplies with experts in steps of these buckets. The proof is kept.

    None: some product agrees with itself at no row count. Then buckets will not hold for such layers.
    """
    threads = torch.get_num_threads()
    listed = list_expert_products(checkpoint.config, buckets, threads=threads, layouts=checkpoint.layouts)
    key = build_proof_key(listed, kernels, torch.device("cpu"), "experts")
    return kept.load_or_make(key, lambda: kernels.prove(listed).plan, plan_to_json, plan_from_json)


def check_row_types(config: ModelConfig, types: RowTypes, device: torch.device) -> None:
    """Raise UserError for formats of rows that the device or the model's heads do not have."""
    is_fp8 = torch.float8_e4m3fn in {types.keys.dtype, types.values.dtype}
    if is_fp8 and device.type == "cuda" and not read_capability(device).converts_e4m3:
        others = "auto, bf16, int8, int4, int3.5"
        raise UserError(f"--kv-dtype fp8: {device} has no such number format; accepted here: {others}")
    if device.type == "cuda" and types.is_packed and config.latent is not None:
        # Unpacking 576 numbers a row takes more shared memory than cards of 99 KiB have.
        others = "auto, bf16, fp8, int8"
        raise UserError(f"--kv-dtype {types.name}: {device} has no such rows of compressed models; accepted: {others}")
    try:
        config.check_rows(types)
    except ValueError as error:
        raise UserError(f"--kv-dtype {error}") from error


def build_probe_shape(
    checkpoint: Checkpoint, device: torch.device, dtypes: tuple[torch.dtype, RowTypes], chunk: int, context: int
) -> ProbeShape:
    """Return what a probe depends on, besides the configuration and the machine. dtypes: of weights and of rows.

    Raises UserError if the device cannot keep such rows.
    """
    check_row_types(checkpoint.config, dtypes[1], device)
    return ProbeShape(
        device=device,
        dtype=dtypes[0],
        rows=dtypes[1],
        chunk=chunk,
        capacity=context,
        sizes=list_buckets(device),
        memory=host_memory() // 2,
        layouts=checkpoint.layouts,
    )


def choose_served_plan(plan: ProductPlan | None, *, fast: bool) -> ProductPlan | None:
    """Return the plan that kernels keep to. With `fast` numerics no steps are prescribed, since no bits
    are promised.
    """
    return evolve(plan, steps=()) if fast and plan is not None else plan


def load_or_run_probe(
    checkpoint: Checkpoint,
    kernels: Kernels,
    kept: CalibrationCache,
    shape: ProbeShape,
    *,
    experts: ExpertKernels | None = None,
    known: ProductPlan | None = None,
) -> Numerics:
    """Return the outcome of the probe, kept from an earlier start if nothing that it depends on has changed.

    experts, known: as in `probe`.
    """
    family = checkpoint.family
    config = checkpoint.config
    key = probe_key(family, config, kernels, shape, experts)
    return kept.load_or_make(
        key,
        lambda: probe(family, config, kernels, shape, experts=experts, known=known),
        Numerics.to_json,
        Numerics.from_json,
    )

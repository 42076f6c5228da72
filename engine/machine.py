"""What this machine can do for a model before any of it is loaded: device, room, kernels, what is proven of them."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, frozen

from adapters.models.checkpoint import Checkpoint
from adapters.models.draft import DraftShape
from adapters.models.family import ModelConfig
from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.products import ProductPlan
from adapters.models.numerics import Numerics, joined
from adapters.models.pipeline import Pipeline, current
from adapters.models.probe import probe, probe_key
from adapters.models.shard import Shard
from engine.fit import Fit
from engine.kept import Kept
from engine.options import Options
from engine.plan import layer_ranges
from engine.refusal import Refusal

log = logging.getLogger("rekindle")

GRAPH_CHUNK = 1024  # C on a CUDA device: within 1 % of 2048, and a cancelled prefill stops sooner
CPU_CHUNK = 256


@frozen
class Placement:
    """A run of the target's layers, and the device of the shard that has them."""

    layers: range
    device: torch.device


def choose_devices(options: Options) -> tuple[torch.device, ...]:
    """Of the target's shards, in the order of their layers. Raises Refusal."""
    if not options.target_devices:
        return (choose_device(options.device, "--device"),)
    found = [choose_device(name, "--target-devices") for name in options.devices]
    return tuple(torch.device("cuda", one.index or 0) if one.type == "cuda" else torch.device("cpu") for one in found)


def choose_device(name: str, flag: str) -> torch.device:
    if name.startswith("auto"):
        name = name.replace("auto", "cuda") if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refusal(f"{flag} {name}: this machine has no CUDA device that torch can use; accepted here: auto, cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Refusal(f"{flag} {name}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return device


def planned(options: Options, config: ModelConfig) -> tuple[Placement, ...]:
    """Which layers go where: as the weights say, or else the free memory of each device. Raises Refusal."""
    devices = choose_devices(options)
    free = {device: free_memory(device) for device in devices}
    weights = options.layer_weights or [free[device] / devices.count(device) for device in devices]
    try:
        ranges = layer_ranges(config.num_layers, weights)
    except ValueError as error:
        raise Refusal(f"--target-devices {options.target_devices[:80]}: {error}") from error
    return tuple(Placement(layers, device) for layers, device in zip(ranges, devices, strict=True))


def free_memory(device: torch.device) -> int:
    """Bytes that nobody uses now; of a host, with what it would give back."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return host_memory()
    kib = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kib[0] << 10 if kib else host_memory()


@frozen
class SlotMemory:
    """Bytes of what slots keep: rows, and positional state of a model that has any, in slots and in places."""

    token: int
    state: int = 0
    place: int = 0


def host_rows(
    config: ModelConfig, draft: DraftShape | None, dtype: torch.dtype, plan: Sequence[Placement]
) -> SlotMemory:
    """Of the layers that host memory keeps them for, with the draft's context, which is where the last layers are."""
    here = [one.layers for one in plan if one.device.type == "cpu"]
    token = sum(config.kv_bytes_per_token(dtype, layers) for layers in here)
    if draft is not None and plan[-1].device.type == "cpu":
        token += draft.kv_bytes_per_token(dtype)
    states = [config.state_bytes(dtype, "cpu", layers) for layers in here]
    return SlotMemory(token, sum(held for held, _ in states), sum(place for _, place in states))


def check_memory(slot: SlotMemory, options: Options, fit: Fit) -> None:
    """A host is killed where a GPU says no. Raises Refusal for slots that are larger than the whole machine."""
    rows, states = fit.slots * (fit.context * slot.token + slot.state), options.state_checkpoints * slot.place
    there = host_memory()
    if rows + states > there:
        size = f"{fit.slots} slots of {fit.context} tokens take {rows / 1e9:.0f} GB"
        fewer = "fewer --slots or a smaller --max-ctx may help"
        if states:
            size += f" and {options.state_checkpoints} states beside them {states / 1e9:.0f} GB"
            fewer = "fewer --slots, fewer --state-checkpoints or a smaller --max-ctx may help"
        raise Refusal(f"{size}, this machine has {there / 1e9:.0f} GB: {fewer}")


def host_memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def chunk_of(options: Options, plan: Sequence[Placement]) -> int:
    """Rows of a prefill chunk."""
    return options.chunk or (GRAPH_CHUNK if {one.device.type for one in plan} == {"cuda"} else CPU_CHUNK)


def prove(
    options: Options,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    plan: Sequence[Placement],
    context: int,
    *,
    kept: Kept,
) -> tuple[Numerics, tuple[Kernels, ...]]:
    """What the probe finds or found on each device, for the whole model, and kernels for each shard that keep to it."""
    chunk = chunk_of(options, plan)
    found = dict[torch.device, tuple[Numerics, Kernels]]()
    for device in dict.fromkeys(one.device for one in plan):
        with current(device):
            kernels, how = build_kernels(device, dtype), {"device": device, "dtype": dtype, "chunk": chunk}
            numerics = probed(checkpoint, kernels, kept, capacity=context, memory=host_memory() // 2, **how)
        found[device] = numerics, kernels
    own = tuple(found[one.device][1].using(served(found[one.device][0], options)) for one in plan)
    return joined([(one.layers, found[one.device][0]) for one in plan]), own


def served(numerics: Numerics, options: Options) -> ProductPlan | None:
    """What kernels keep to: only where bits are promised."""
    plan = numerics.plan
    return evolve(plan, steps=()) if options.numerics == "fast" and plan is not None else plan


def shards(
    checkpoint: Checkpoint, dtype: torch.dtype, plan: Sequence[Placement], kernels: Sequence[Kernels], **how: Any
) -> Pipeline:
    """Each on its device, with the tensors of its own layers and no other. how: as `Build` has it."""
    parts = list[Shard]()
    for place, own in zip(plan, kernels, strict=True):
        with current(place.device):
            where: dict[str, Any] = {"device": place.device, "dtype": dtype, "layers": place.layers}
            parts.append(checkpoint.family.build(checkpoint.config, checkpoint, own, **where, **how))
    return Pipeline(parts)


def probed(checkpoint: Checkpoint, kernels: Kernels, kept: Kept, **how: Any) -> Numerics:
    """The probe's outcome, kept from the last start where nothing that it depends on has changed."""
    family, config = checkpoint.family, checkpoint.config
    key = probe_key(family, config, kernels, **how)
    return kept.made(key, lambda: probe(family, config, kernels, **how), Numerics.to_json, Numerics.from_json)


def build_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    if device.type == "cuda":
        from adapters.models.kernels.triton_cuda import TritonKernels  # noqa: PLC0415 - needs Triton, so a GPU build

        return TritonKernels(device)
    from adapters.models.kernels.native.library import missing  # noqa: PLC0415
    from adapters.models.kernels.torch_cpu import CpuKernels  # noqa: PLC0415

    try:
        if why := missing():
            log.info("products by oneDNN alone: %s", why)
        return CpuKernels(dtype)
    except ValueError as error:
        raise Refusal(str(error)) from error


def identity(checkpoint: Checkpoint, dtype: torch.dtype, numerics: Numerics, mode: str) -> str:
    """Everything that changes numbers, and nothing about this instance: 32 hex digits."""
    parts = (
        checkpoint.digest(),
        repr(checkpoint.config),
        str(dtype),
        str(numerics.block_size),
        numerics.numerics_class,
        numerics.mode,
        repr(numerics.buckets),  # what serves: other shapes may round otherwise, and two starts may have proven others
        mode,
    )
    return blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()

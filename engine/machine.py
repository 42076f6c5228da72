"""What this machine can do for a model before any of it is loaded: device, room, kernels, what is proven of them."""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Any

import torch
from attrs import evolve, frozen

from adapters.models.checkpoint import Checkpoint
from adapters.models.draft import DraftShape
from adapters.models.family import ModelConfig
from adapters.models.kernels.interface import Kernels
from adapters.models.numerics import Numerics
from adapters.models.probe import probe, probe_key
from engine.kept import Kept
from engine.options import Options
from engine.refusal import Refusal

GRAPH_CHUNK = 1024  # C on a CUDA device: within 1 % of 2048, and a cancelled prefill stops sooner
CPU_CHUNK = 256


def choose_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise Refusal(f"--device {name}: this machine has no CUDA device that torch can use; accepted here: auto, cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise Refusal(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return device


def context_of(options: Options, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of a slot, which the machine has room for: the probe needs some of it, too. Raises Refusal."""
    context = options.max_ctx or config.max_positions
    if context > config.max_positions:
        raise Refusal(f"--max-ctx {context}: the model was made for at most {config.max_positions} tokens")
    check_memory(slot_memory(config, None, dtype, device), device, options, context)
    return context


def row_bytes(config: ModelConfig, draft: DraftShape | None, dtype: torch.dtype) -> int:
    """Of one token in a slot, the draft's context included."""
    return config.kv_bytes_per_token(dtype) + (0 if draft is None else draft.kv_bytes_per_token(dtype))


@frozen
class SlotMemory:
    """Bytes of what slots keep: rows, and positional state of a model that has any, in slots and in places."""

    token: int
    state: int = 0
    place: int = 0


def slot_memory(config: ModelConfig, draft: DraftShape | None, dtype: torch.dtype, device: torch.device) -> SlotMemory:
    return SlotMemory(row_bytes(config, draft, dtype), *config.state_bytes(dtype, device.type))


def check_memory(slot: SlotMemory, device: torch.device, options: Options, context: int) -> None:
    """A host is killed where a GPU says no. Raises Refusal for slots that are larger than the whole machine."""
    if device.type != "cpu":
        return
    rows, states = options.slots * (context * slot.token + slot.state), options.state_checkpoints * slot.place
    there = host_memory()
    if rows + states > there:
        size = f"{options.slots} slots of {context} tokens take {rows / 1e9:.0f} GB"
        fewer = "fewer --slots or a smaller --max-ctx may help"
        if states:
            size += f" and {options.state_checkpoints} states beside them {states / 1e9:.0f} GB"
            fewer = "fewer --slots, fewer --state-checkpoints or a smaller --max-ctx may help"
        raise Refusal(f"{size}, this machine has {there / 1e9:.0f} GB: {fewer}")


def host_memory() -> int:
    """Bytes that this machine has."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def prove(
    options: Options, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, context: int, *, kept: Kept
) -> tuple[Numerics, Kernels]:
    """What the probe finds or found, and kernels that keep to it."""
    chunk = options.chunk or (GRAPH_CHUNK if device.type == "cuda" else CPU_CHUNK)
    kernels, how = build_kernels(device, dtype), {"device": device, "dtype": dtype, "chunk": chunk}
    numerics = probed(checkpoint, kernels, kept, capacity=context, memory=host_memory() // 2, **how)
    plan = numerics.plan
    if options.numerics == "fast" and plan is not None:
        plan = evolve(plan, steps=())
    return numerics, kernels.using(plan)


def probed(checkpoint: Checkpoint, kernels: Kernels, kept: Kept, **how: Any) -> Numerics:
    """The probe's outcome, kept from the last start where nothing that it depends on has changed."""
    family, config = checkpoint.family, checkpoint.config
    key = probe_key(family, config, kernels, **how)
    return kept.made(key, lambda: probe(family, config, kernels, **how), Numerics.to_json, Numerics.from_json)


def build_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    if device.type == "cuda":
        from adapters.models.kernels.triton_cuda import TritonKernels  # noqa: PLC0415 - needs Triton, so a GPU build

        return TritonKernels(device)
    from adapters.models.kernels.torch_cpu import CpuKernels  # noqa: PLC0415

    return CpuKernels(dtype)


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

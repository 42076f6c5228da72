"""`--experts`: decides how much device memory the experts get that host memory keeps, and which experts begin there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import evolve

from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.layers.host_experts import RING, HostExperts
from adapters.models.decoder.pipeline.pipeline import Pipeline
from adapters.models.open_checkpoint import EXPERTS
from engine.loading.memory.device_survey import Placement, host_memory
from engine.settings.model_options import WeightOptions
from engine.settings.options import Options, evolve_options
from engine.settings.output.formatting import format_bytes
from engine.settings.user_error import UserError
from states import experts
from states.settings import Settings


def count_expert_weights(config: ModelConfig, layers: range | None = None) -> int:
    """Return how many weights the experts of these layers have together. Shared experts do not count."""
    shapes = config.tensors(layers)
    return sum(math.prod(shape) for name, shape in shapes.items() if EXPERTS in name and name.startswith("model."))


def count_brought_experts(config: ModelConfig, plan: Sequence[Placement]) -> int:
    """Return how many weights the experts have that are brought to the device if host memory keeps experts."""
    return count_expert_weights(config) - sum(
        count_expert_weights(config, placement.cpu_experts) for placement in plan if placement.cpu_experts
    )


def choose_expert_bytes(
    weights: WeightOptions, config: ModelConfig, dtype: torch.dtype, plan: Sequence[Placement], left: int
) -> int:
    """Return the bytes of the device for experts. 0: host memory keeps no experts. Raises UserError.

    It is what was asked for, or half of `left`, and no more than all experts take, without those that the host
    computes. left: bytes of the device that nothing else takes.
    """
    if weights.device_expert_bytes is None:
        return 0
    asked = f"--experts {weights.experts}"
    if config.experts is None:
        raise UserError(f"{asked}: the model has no experts; accepted: device")
    if len(plan) > 1 or not plan[0].is_local:
        raise UserError(f"{asked}: needs one CUDA device of this process, but --target-devices names others")
    if plan[0].device.type == "cpu":
        raise UserError(f"{asked}: on a CPU, experts are in host memory anyway; accepted: device, or a CUDA device")
    whole = count_brought_experts(config, plan) * dtype.itemsize
    if not whole:
        return 0
    if whole > host_memory() * 3 // 4:
        raise UserError(
            f"{asked}: its experts take {format_bytes(whole)}, more than three quarters of this machine's memory"
        )
    expert_bytes = 3 * config.experts.inner * config.hidden_size * dtype.itemsize
    given = weights.device_expert_bytes or left // 2
    if given < expert_bytes:
        raise UserError(
            f"{asked}: one expert takes {format_bytes(expert_bytes)}, "
            f"but {format_bytes(max(0, given))} would be free for them"
        )
    return min(given, whole + RING * expert_bytes)


def assign_first_experts(host_experts: HostExperts | None) -> None:
    """Copy the experts to the device that the world has there at its beginning. Called on the lane."""
    if host_experts is not None:
        residents = experts.make_residents(host_experts.experts, host_experts.expert_slots)
        host_experts.move_experts(enumerate(residents.expert_slots))


def with_expert_counts(settings: Settings, host_experts: HostExperts | None) -> Settings:
    """Return the settings with the numbers of experts and of slots for them."""
    if host_experts is None:
        return settings
    return evolve(settings, experts=host_experts.experts, expert_slots=host_experts.expert_slots)


def resolve_cpu_experts(options: Options, shard: Pipeline) -> Options:
    """Return the options with the number of layers whose experts the host computes, if that was left open."""
    stops = [part.spec.cpu_experts.stop for part in shard.parts]
    return evolve_options(options, cpu_experts=str(max(stops)))


def describe_expert_placement(host_experts: HostExperts | None, shard: Pipeline) -> str:
    """Return what the start line says about experts in host memory: brought from there, or computed there."""
    layers = [
        f"{layer_range.start}..{layer_range.stop - 1}"
        for layer_range in (part.spec.cpu_experts for part in shard.parts)
        if layer_range
    ]
    line = f"  cpu-experts=layers {', '.join(layers)}" if layers else ""
    if host_experts is None:
        return line
    there = f"{host_experts.expert_slots:,} of {host_experts.experts:,} on the device"
    host_bytes = format_bytes(host_experts.host_bytes)
    return f"{line}  experts=host ({host_bytes}; {there}, {format_bytes(host_experts.device_bytes)})"

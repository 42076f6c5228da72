"""`--experts`: how much of a device the experts get that host memory keeps, and who begins there."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from attrs import evolve

from adapters.models.decoder.family import ModelConfig
from adapters.models.decoder.host_experts import RING, HostExperts
from engine.loading.device_survey import Placement, host_memory
from engine.settings.formatting import size
from engine.settings.options import Options
from engine.settings.user_error import UserError
from states import experts
from states.settings import Settings

INNER = ".mlp.experts."


def expert_weights(config: ModelConfig, layers: range | None = None) -> int:
    """Numbers of all experts of these layers; a shared one is none of them."""
    shapes = config.tensors(layers)
    return sum(math.prod(shape) for name, shape in shapes.items() if INNER in name and name.startswith("model."))


def room(options: Options, config: ModelConfig, dtype: torch.dtype, plan: Sequence[Placement], left: int) -> int:
    """Bytes of the device for experts: as asked for, or half of what is left there beside the rest, and no more than
    all take. 0: host memory keeps none. Raises Refusal.
    """
    if options.experts_room is None:
        return 0
    asked = f"--experts {options.experts}"
    if config.experts is None:
        raise UserError(f"{asked}: the model has no experts; accepted: device")
    if len(plan) > 1 or not plan[0].local:
        raise UserError(f"{asked}: accepted with one CUDA device of this process, and --target-devices names others")
    if plan[0].device.type == "cpu":
        raise UserError(f"{asked}: on a CPU experts are in host memory as it is; accepted: device, or a CUDA device")
    whole = expert_weights(config) * dtype.itemsize
    if whole > host_memory() * 3 // 4:
        raise UserError(
            f"{asked}: its experts take {size(whole)}, and three quarters of this machine's memory are less"
        )
    one = 3 * config.experts.inner * config.hidden_size * dtype.itemsize
    given = options.experts_room or left // 2
    if given < one:
        raise UserError(f"{asked}: one expert takes {size(one)}, and there would be {size(max(0, given))} for them")
    return min(given, whole + RING * one)


def first_places(hosted: HostExperts | None) -> None:
    """As the world has them before anything happens; on the lane."""
    if hosted is not None:
        hosted.place(enumerate(experts.make_residents(hosted.experts, hosted.places).places))


def counted(settings: Settings, hosted: HostExperts | None) -> Settings:
    if hosted is None:
        return settings
    return evolve(settings, experts=hosted.experts, expert_places=hosted.places)


def placed(hosted: HostExperts | None) -> str:
    """For the start line."""
    if hosted is None:
        return ""
    there = f"{hosted.places:,} of {hosted.experts:,} on the device"
    return f"  experts=host ({size(hosted.host_bytes)}; {there}, {size(hosted.device_bytes)})"

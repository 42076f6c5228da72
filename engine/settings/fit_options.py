"""The options of `rekindle models`, which describe a server that has not been started."""

from __future__ import annotations

from typing import Annotated, Literal

import attrs
from attrs import frozen
from cyclopts import Parameter
from cyclopts.validators import Number

from engine.settings.option_types import (
    Device,
    check_device,
    check_devices,
    check_experts,
    check_kv_dtype,
    parse_integer,
)
from engine.settings.options import Options, build_options


@frozen(kw_only=True)
class FitOptions:
    """The options of `rekindle serve` that decide whether a model fits."""

    device: Annotated[Device, Parameter(validator=check_device)] = "auto"
    """The device that computes: auto (CUDA if there is a CUDA device), cpu, cuda or cuda:N."""

    target_devices: Annotated[str, Parameter(validator=check_devices)] = ""
    """Split the layers over several devices, such as cuda:0,cpu:0; replaces --device."""

    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Parameter()] = "auto"
    """Number format of weights and computation."""

    kv_dtype: Annotated[str, Parameter(validator=check_kv_dtype)] = "auto"
    """Number format of cached keys and values: auto, bf16, fp8, int8, int4, int3.5, or k=TYPE,v=TYPE."""

    experts: Annotated[str, Parameter(validator=check_experts)] = "device"
    """Where the weights of experts are kept: device, or host:N (host memory, and the most used ones also in N GiB of
    the CUDA device)."""

    max_ctx: Annotated[int, Parameter(converter=parse_integer, validator=Number(gte=0, lte=1 << 21))] = 0
    """Maximum tokens of prompt and answer together. 0: what fits."""

    slots: Annotated[int, Parameter(converter=parse_integer, validator=Number(gte=0, lte=64))] = 0
    """Sequences at once. 0: as many as memory allows, 64 at most."""

    @property
    def serve_options(self) -> Options:
        """The same as options of `rekindle serve`."""
        return build_options(**attrs.asdict(self))

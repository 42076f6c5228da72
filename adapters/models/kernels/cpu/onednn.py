"""oneDNN's products with weights, where torch brings them; torch's own where it does not."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def reorder(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight.default(weight) if ONEDNN else weight  # noqa: SLF001


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether this is done in that dtype on this processor; otherwise in float32."""
    if dtype is torch.float32:
        return True
    if not ONEDNN:
        return False
    half, brain = torch.ops.mkldnn._is_mkldnn_fp16_supported, torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
    return brain() if dtype is torch.bfloat16 else half()


if ONEDNN:
    _linear = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    _linear_binary = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001


def product(x: Tensor, packed: Tensor) -> Tensor:
    if not ONEDNN:
        return torch.nn.functional.linear(x, packed)
    return _linear(x, packed, None, "none", [], "")


def gated_product(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    if not ONEDNN:
        return torch.nn.functional.silu(product(x, gate)).mul_(product(x, up))
    return _linear_binary(x, _linear(x, gate, None, "swish", [], ""), up, None, "mul")

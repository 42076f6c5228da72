"""oneDNN's products with weights, where torch has them; torch's own products elsewhere."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

ONEDNN: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def reorder(weight: Tensor) -> Tensor:
    """Return a weight in oneDNN's memory layout."""
    return torch.ops.mkldnn._reorder_linear_weight.default(weight) if ONEDNN else weight  # noqa: SLF001


@cache
def supports(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies in this dtype on this processor; otherwise products run in float32."""
    if dtype is torch.float32:
        return True
    if not ONEDNN:
        return False
    half = torch.ops.mkldnn._is_mkldnn_fp16_supported  # noqa: SLF001
    brain = torch.ops.mkldnn._is_mkldnn_bf16_supported  # noqa: SLF001
    return brain() if dtype is torch.bfloat16 else half()


@cache
def is_quick(dtype: torch.dtype) -> bool:
    """Return whether this processor multiplies in this dtype at least as fast as in float32: it has instructions for
    that. Otherwise oneDNN converts, which takes up to five times as long.
    """
    found = torch.cpu.get_capabilities()
    if dtype is torch.float32 or found.get("architecture") != "x86_64":
        return supports(dtype)
    kinds = ("avx512_bf16", "amx_bf16") if dtype is torch.bfloat16 else ("avx512_fp16", "amx_fp16")
    return supports(dtype) and any(found.get(kind) for kind in kinds)


if ONEDNN:
    _linear = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
    _linear_binary = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001


def multiply(x: Tensor, packed: Tensor) -> Tensor:
    if not ONEDNN:
        return torch.nn.functional.linear(x, packed)
    return _linear(x, packed, None, "none", [], "")


def multiply_gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    if not ONEDNN:
        return torch.nn.functional.silu(multiply(x, gate)).mul_(multiply(x, up))
    return _linear_binary(x, _linear(x, gate, None, "swish", [], ""), up, None, "mul")

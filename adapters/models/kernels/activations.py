"""Activations of gated feed-forwards that no product has built in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from adapters.models.kernels.functions.vector_functions import apply_in_vectors

SILU = "silu"  # part of the product (`Kernels.gated_linear`)
GELU = "gelu"  # the approximation by tanh
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {GELU: partial(torch.nn.functional.gelu, approximate="tanh")}


def apply_activation(name: str, x: Tensor) -> Tensor:
    """Return the activation of x in a new tensor, computed in float32 and rounded once.

    A number's result does not depend on where it stands.
    """
    function = _FUNCTIONS[name]
    wide = x.float()
    found = function(wide) if x.is_cuda else apply_in_vectors(function, wide.contiguous())
    return found.to(x.dtype) if x.dtype != torch.float32 else found


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Turn logits, float32, into cap * tanh(logits / cap), in place."""
    if logits.is_cuda:
        return logits.div_(cap).tanh_().mul_(cap)
    return logits.copy_(apply_in_vectors(torch.tanh, logits / cap)).mul_(cap)

"""Activations of gated feed-forwards that no product has built in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from adapters.models.kernels.functions.vector_functions import apply_in_vectors

SILU = "silu"  # part of the product wherever there is one (`Kernels.gated_linear`)
GELU = "gelu"  # the approximation by tanh
# That of gpt-oss: both halves are clamped, the gate is x * sigmoid(ALPHA x), and 1 is added to the other half.
CLAMPED = "clamped"
ALPHA = 1.702
LIMIT = 7.0
GATES = {SILU: 1, GELU: 2, CLAMPED: 3}  # as Triton programs have them; 0: a product has no gate
_FUNCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {GELU: partial(torch.nn.functional.gelu, approximate="tanh")}


def apply_activation(name: str, x: Tensor) -> Tensor:
    """Return the activation of x in a new tensor, computed in float32 and rounded once.

    A number's result does not depend on where it stands.
    """
    function = _FUNCTIONS[name]
    wide = x.float()
    found = function(wide) if x.is_cuda else apply_in_vectors(function, wide.contiguous())
    return found.to(x.dtype) if x.dtype != torch.float32 else found


def apply_gate(name: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return what the gate of a feed-forward lets through of `up`, in a new tensor.

    A number's result does not depend on where it stands.
    """
    if name != CLAMPED:
        return apply_activation(name, gate).mul_(up)
    wide = gate.float().clamp(max=LIMIT)
    scaled = wide * ALPHA
    open_part = torch.sigmoid(scaled) if gate.is_cuda else apply_in_vectors(torch.sigmoid, scaled.contiguous())
    return (wide * open_part * (up.float().clamp(-LIMIT, LIMIT) + 1)).to(gate.dtype)


def gate_halves(name: str, both: Tensor, bias: Tensor | None) -> Tensor:
    """Return what the gates `both[:, :I]` let through of `both[:, I:]`, in a new tensor. The bias is added in place."""
    if bias is not None:
        both.add_(bias)
    return apply_gate(name, *both.chunk(2, dim=1))


def gate_by_softplus(x: Tensor, gates: Tensor, count: int) -> Tensor:
    """Return x `[R, H hd]`, multiplied with the softplus of `gates`, `[R, H * count]`, in a new tensor.

    count: gates of a head, 1 or hd. The softplus is rounded before it is multiplied. A number's result does not depend
    on where it stands.
    """
    wide = gates.float()
    softplus = torch.nn.functional.softplus
    found = softplus(wide) if gates.is_cuda else apply_in_vectors(softplus, wide.contiguous())
    heads = found.to(x.dtype).view(len(x), -1, count)
    return (x.view(len(x), heads.shape[1], -1) * heads).flatten(1)


def cap_logits(logits: Tensor, cap: float) -> Tensor:
    """Turn logits, float32, into cap * tanh(logits / cap), in place."""
    if logits.is_cuda:
        return logits.div_(cap).tanh_().mul_(cap)
    return logits.copy_(apply_in_vectors(torch.tanh, logits / cap)).mul_(cap)

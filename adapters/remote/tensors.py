"""Tensors in a payload: the arguments describe them by name, element type and shape; they lie one after the other, each
at a multiple of 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from adapters.layout import dtype_name, torch_dtype
from adapters.remote.messages import Described, Unacceptable

ALIGN = 64


def described(tensors: Mapping[str, Tensor]) -> tuple[Described, ...]:
    return tuple(Described(name, dtype_name(one.dtype), tuple(one.shape)) for name, one in tensors.items())  # type: ignore[arg-type]


def places(tensors: Sequence[Described]) -> tuple[list[int], int]:
    """Where each begins, and how many bytes they take together."""
    found, at = list[int](), 0
    for one in tensors:
        at = -(-at // ALIGN) * ALIGN
        found.append(at)
        at += one.nbytes
    return found, at


def flattened(tensors: Iterable[Tensor]) -> list[memoryview]:
    """The payload in pieces: each tensor's bytes, and what lies between."""
    found, at = list[memoryview](), 0
    for one in tensors:
        if gap := -at % ALIGN:
            found.append(_GAP[:gap])
        host = one.detach().to("cpu").contiguous()
        found.append(host.view(-1).view(torch.uint8).numpy().data)
        at += gap + host.nbytes
    return [piece for piece in found if piece.nbytes]


_GAP = memoryview(bytes(ALIGN))


def unpacked(tensors: Sequence[Described], payload: memoryview) -> dict[str, Tensor]:
    """Views of the payload. Raises Refused for one that does not hold exactly these."""
    begins, total = places(tensors)
    if total != payload.nbytes:
        raise Unacceptable(f"tensors of {total} bytes in a payload of {payload.nbytes}")
    found = dict[str, Tensor]()
    for one, at in zip(tensors, begins, strict=True):
        dtype = torch_dtype(one.dtype)
        if not one.nbytes:
            found[one.name] = torch.empty(one.shape, dtype=dtype)
        else:
            found[one.name] = torch.frombuffer(payload, dtype=dtype, count=math.prod(one.shape), offset=at).view(
                one.shape
            )
    if len(found) != len(tensors):
        raise Unacceptable("two tensors of one name")
    return found

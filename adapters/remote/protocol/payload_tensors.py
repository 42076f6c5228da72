"""Tensors in a payload. The arguments describe them by name, element type and shape.

They lie one after the other, each at a multiple of 64 bytes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from adapters.remote.protocol.messages import Described, Unacceptable
from adapters.sequence_layout import dtype_name, torch_dtype

ALIGN = 64


def describe_tensors(tensors: Mapping[str, Tensor]) -> tuple[Described, ...]:
    return tuple(Described(name, dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items())  # type: ignore[arg-type]


def find_offsets(tensors: Sequence[Described]) -> tuple[list[int], int]:
    """Return the offset of each tensor in the payload, and the size of the payload."""
    found = list[int]()
    at = 0
    for described in tensors:
        at = -(-at // ALIGN) * ALIGN
        found.append(at)
        at += described.nbytes
    return found, at


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor in host memory, without a copy. They keep the tensor alive.

    The address is used, because torch's and numpy's conversions take longer than the bytes of a decode step.
    """
    block = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    block.owner = tensor  # type: ignore[attr-defined]
    return memoryview(block).cast("B")


def flatten_tensor(tensors: Iterable[Tensor]) -> list[memoryview]:
    """Return the payload in pieces: the bytes of each tensor and the padding between them."""
    found = list[memoryview]()
    at = 0
    for tensor in tensors:
        if gap := -at % ALIGN:
            found.append(_GAP[:gap])
        host = (tensor if tensor.device.type == "cpu" else tensor.cpu()).contiguous()
        found.append(bytes_of(host))
        at += gap + host.nbytes
    return [piece for piece in found if piece.nbytes]


_GAP = memoryview(bytes(ALIGN))


@frozen(eq=False)
class TensorBytes:
    """The tensors of a payload. pieces: the bytes of each, within the payload."""

    tensors: tuple[Described, ...]
    pieces: tuple[memoryview, ...]

    def views(self) -> dict[str, Tensor]:
        """Return them as tensors, without a copy."""
        found = dict[str, Tensor]()
        for described, piece in zip(self.tensors, self.pieces, strict=True):
            dtype = torch_dtype(described.dtype)
            flat = torch.frombuffer(piece, dtype=dtype) if piece.nbytes else torch.empty(0, dtype=dtype)
            found[described.name] = flat.view(described.shape)
        return found


def unpack_tensors(tensors: tuple[Described, ...], payload: memoryview) -> TensorBytes:
    """Find the tensors of a payload. Raises Unacceptable if it does not hold exactly these."""
    begins, total = find_offsets(tensors)
    if total != payload.nbytes:
        raise Unacceptable(f"tensors of {total} bytes in a payload of {payload.nbytes}")
    if len({described.name for described in tensors}) != len(tensors):
        raise Unacceptable("two tensors of one name")
    return TensorBytes(
        tensors, tuple(payload[at : at + described.nbytes] for described, at in zip(tensors, begins, strict=True))
    )

"""The formats of cached keys and values: a head's numbers in some dtype, or codes with one scale for the whole head.

A coded row holds its head's codes and, in its last four bytes, the float32 scale that they are multiplied with. Its
bits follow from its own numbers alone. Caches, files and transfers see bytes; only the code that writes a row or
attends to it knows that they are codes.

Codes of 8 bits are one byte each. Codes of fewer bits are packed (`PLANES`), and the head is rotated before: every
number is mixed with its neighbours by a Hadamard matrix, in blocks of the largest power of two that divides the head.
So no number stands out, and few steps serve all of them. The matrix is orthonormal and symmetric. Queries are rotated
like keys, so scores stay the same; what is attended of rotated values is rotated once more, which turns it back.

Keys and values may have different formats (`RowTypes`). Then a row's values follow its keys in one row of bytes.

A further packed format needs its planes in `PLANES` and in numbers.h, and a name in `DTYPE_NAMES` and row_names.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from adapters.models.kernels.formats.row_names import read_pair

# torch has these dtypes as names only: tensors of them are bytes. Its stubs do not list them.
INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
INT3: torch.dtype = torch.int3  # type: ignore[attr-defined]
SCALE = 4  # bytes behind a head's codes
# The greatest magnitude of a code of 8 bits, which the greatest number of a head is scaled to.
LIMITS: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# Half the number of steps of a packed code: the greatest magnitude of a head is so many scales.
STEPS = 16.0
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # a smaller scale has no inverse, so such a row becomes zeros
WHOLE = 16  # the numbers of a head in a packed format are a multiple of this


@frozen
class Plane:
    """Some bits of the codes of the numbers from `start` to `stop`, which count halves of a head.

    A byte has `bits` of several numbers: the first byte those of number 0, `n / (8 / bits)` and so on of n numbers, the
    lowest bits first. shift: the place of the lowest bit in a code of four bits.
    """

    start: int
    stop: int
    bits: int
    shift: int

    def count_bytes(self, head: int) -> int:
        return (self.stop - self.start) * head // 2 * self.bits // 8

    def span(self, head: int) -> slice:
        return slice(self.start * head // 2, self.stop * head // 2)


# The planes of packed formats, one behind the other. The dtype names the format; its tensors are bytes. torch has no
# name for 3.5 bits, so int3 stands for them: the first half of a head has codes of four bits, the second half of three.
PLANES: Mapping[torch.dtype, tuple[Plane, ...]] = {
    INT4: (Plane(0, 2, 4, 0),),
    INT3: (Plane(0, 1, 4, 0), Plane(1, 2, 2, 2), Plane(1, 2, 1, 1)),
}
DTYPE_NAMES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": INT4,
    "int3.5": INT3,
}


@frozen
class RowFormat:
    """The format of cached keys, or of values.

    dtype: of the stored elements; int8 and float8_e4m3fn are codes, and the keys of PLANES stand for bytes.
    """

    dtype: torch.dtype

    @property
    def is_packed(self) -> bool:
        """True if a row is bytes that hold several codes each. Such heads are rotated."""
        return self.dtype in PLANES

    @property
    def is_coded(self) -> bool:
        """True if rows are codes with a scale."""
        return self.dtype in LIMITS or self.is_packed

    @property
    def name(self) -> str:
        return "int3.5" if self.dtype is INT3 else str(self.dtype).removeprefix("torch.")

    def row_width(self, head: int) -> int:
        """Return how many elements a head of this many numbers takes."""
        if self.is_packed:
            codes = sum(plane.count_bytes(head) for plane in PLANES[self.dtype])
            return -(-codes // SCALE) * SCALE + SCALE
        return head + SCALE if self.is_coded else head

    def row_bytes(self, head: int) -> int:
        return self.row_width(head) * self.dtype.itemsize

    def head_size(self, width: int) -> int:
        """Return how many numbers a head has whose row takes this many elements."""
        if self.is_packed:
            each = sum(plane.count_bytes(WHOLE) for plane in PLANES[self.dtype])
            return (width - SCALE) * WHOLE // each // WHOLE * WHOLE
        return width - SCALE if self.is_coded else width

    def rotate(self, heads: Tensor) -> Tensor:
        """Return heads `[..., hd]` as rows of this format have them: rotated in float32, or as they are."""
        return rotate_by_hadamard(heads) if self.is_packed else heads

    def encode(self, numbers: Tensor) -> Tensor:
        """Encode `[..., hd]` of any dtype to `[..., width]`. Codes are rounded to the nearest one."""
        if not self.is_coded:
            return numbers.to(self.dtype)
        wide = self.rotate(numbers.float())
        scale = wide.abs().amax(-1, keepdim=True) / LIMITS.get(self.dtype, STEPS)
        scale = torch.where(scale >= SMALLEST_SCALE, scale, torch.zeros_like(scale))
        inverse = torch.where(scale > 0, 1 / scale, scale)
        steps = wide * inverse
        if self.is_packed:
            codes = pack_codes(find_steps(steps), self.dtype)
        else:
            codes = (steps.round() if self.dtype is torch.int8 else steps).to(self.dtype).view(torch.uint8)
        return torch.cat((codes, scale.view(torch.uint8)), -1).view(self.dtype)

    def decode(self, rows: Tensor) -> Tensor:
        """Decode `[..., width]` to `[..., hd]`: codes become float32, other rows stay as they are. Heads that are
        rotated stay so.
        """
        if not self.is_coded:
            return rows
        head = self.head_size(rows.shape[-1])
        scale = as_bytes(rows)[..., -SCALE:] if self.is_packed else rows[..., head:]
        codes = unpack_codes(as_bytes(rows), head, self.dtype) if self.is_packed else rows[..., :head].float()
        return codes * scale.contiguous().view(torch.float32)


@frozen
class RowTypes:
    """The formats of keys and of values."""

    keys: RowFormat
    values: RowFormat

    @property
    def is_mixed(self) -> bool:
        return self.keys != self.values

    @property
    def is_packed(self) -> bool:
        return self.keys.is_packed or self.values.is_packed

    @property
    def name(self) -> str:
        return f"k={self.keys.name},v={self.values.name}" if self.is_mixed else self.keys.name

    def row_bytes(self, head: int) -> int:
        """Return the bytes of a head's keys and values of one token."""
        return self.keys.row_bytes(head) + self.values.row_bytes(head)

    def check_heads(self, head: int, *, latent: bool) -> None:
        """Raise ValueError for heads that these formats do not have. latent: a row is key and value at once."""
        if self.is_mixed and latent:
            raise ValueError(
                f"{self.name}: rows of this model are keys and values at once; accepted: one type for both"
            )
        whole = WHOLE if self.is_packed else SCALE if self.is_mixed else 1
        if head % whole:
            raise ValueError(f"{self.name}: heads have {head} numbers; accepted: multiples of {whole}")


@frozen
class RowLayout:
    """The memory of rows with heads of one size. latent: a row is key and value at once, in the types' one format.

    Rows of two formats are one part: a head's values follow its keys. Else keys and values are a part each.
    """

    types: RowTypes
    head: int
    latent: bool = False

    @property
    def parts(self) -> tuple[str, ...]:
        return ("k",) if self.latent else ("kv",) if self.types.is_mixed else ("k", "v")

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8 if self.types.is_mixed or self.types.is_packed else self.types.keys.dtype

    @property
    def width(self) -> int:
        """The elements of a part of one head."""
        return self.types.row_bytes(self.head) if self.types.is_mixed else self.types.keys.row_width(self.head)

    def open_parts(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the keys and values in parts `[..., width]` of memory: the same tensor where a row is both."""
        if self.types.is_mixed:
            (rows,) = parts
            own = self.types.keys.row_bytes(self.head)
            return rows[..., :own].view(self.types.keys.dtype), rows[..., own:].view(self.types.values.dtype)
        opened = [part.view(self.types.keys.dtype) for part in parts] if self.types.is_packed else parts
        return opened[0], opened[-1]

    def encode(self, draw: Callable[[], Tensor]) -> tuple[Tensor, ...]:
        """Return the parts of rows, of heads `[..., hd]` that are drawn for keys and then for values."""
        forms = (self.types.keys,) if self.latent else (self.types.keys, self.types.values)
        rows = [as_bytes(form.encode(draw())) for form in forms]
        return (torch.cat([one.view(torch.uint8) for one in rows], -1),) if self.types.is_mixed else tuple(rows)


Rows: TypeAlias = RowTypes | torch.dtype  # a dtype: that of keys and values alike


def row_types(rows: Rows) -> RowTypes:
    return rows if isinstance(rows, RowTypes) else RowTypes(RowFormat(rows), RowFormat(rows))


def format_of(cache: Tensor) -> RowFormat:
    return RowFormat(cache.dtype)


def as_bytes(rows: Tensor) -> Tensor:
    """Return rows in a dtype that torch copies: packed ones as bytes."""
    return rows.view(torch.uint8) if rows.dtype in PLANES else rows


def rotate_by_hadamard(heads: Tensor) -> Tensor:
    """Multiply the numbers of heads `[..., hd]` with an orthonormal Hadamard matrix, in blocks, in float32."""
    size = heads.shape[-1] & -heads.shape[-1]
    found = heads.float().reshape(*heads.shape[:-1], -1, size)
    step = 1
    while step < size:
        pairs = found.view(*found.shape[:-1], -1, 2, step)
        left, right = pairs.unbind(-2)
        found = torch.stack((left + right, left - right), -2).flatten(-3)
        step *= 2
    return (found * size**-0.5).flatten(-2)


def find_steps(steps: Tensor) -> Tensor:
    """Return codes of four bits for numbers between -STEPS and STEPS: code c stands for 2 c - 15."""
    places = steps * 0.5 + STEPS / 2
    return torch.where(places >= 0, places, torch.zeros_like(places)).clamp(max=STEPS - 1).to(torch.uint8)


def pack_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Pack codes of four bits `[..., hd]` in bytes, which end at a multiple of SCALE."""
    head = codes.shape[-1]
    found = list[Tensor]()
    for plane in PLANES[dtype]:
        parts = codes[..., plane.span(head)] >> plane.shift & (1 << plane.bits) - 1
        parts = parts.reshape(*codes.shape[:-1], 8 // plane.bits, -1)
        byte = torch.zeros_like(parts[..., 0, :])
        for place in range(8 // plane.bits):
            byte |= parts[..., place, :] << place * plane.bits
        found.append(byte)
    rest = RowFormat(dtype).row_width(head) - SCALE - sum(one.shape[-1] for one in found)
    return torch.cat((*found, codes.new_zeros(*codes.shape[:-1], rest)), -1)


def unpack_codes(rows: Tensor, head: int, dtype: torch.dtype) -> Tensor:
    """Return what codes stand for, as float32 `[..., hd]`: the middle of what a number may have been. rows: bytes."""
    found = rows.new_zeros(*rows.shape[:-1], head, dtype=torch.int32)
    known = [0] * head
    at = 0
    for plane in PLANES[dtype]:
        count = plane.count_bytes(head)
        bytes_ = rows[..., at : at + count].int()
        places = [bytes_ >> place * plane.bits & (1 << plane.bits) - 1 for place in range(8 // plane.bits)]
        found[..., plane.span(head)] |= torch.cat(places, -1) << plane.shift
        for number in range(*plane.span(head).indices(head)):
            known[number] |= (1 << plane.bits) - 1 << plane.shift
        at += count
    middle = torch.tensor([16 - one for one in known], dtype=torch.int32, device=rows.device)
    return (2 * found + middle - int(STEPS)).float()


def read_row_types(named: str, dtype: torch.dtype) -> RowTypes:
    """Return the formats that `--kv-dtype` names. dtype: of the computation, which auto stands for.

    Raises ValueError.
    """
    keys, values = (RowFormat(DTYPE_NAMES.get(kind, dtype)) for kind in read_pair(named))
    return RowTypes(keys, values)


def name_row_types(types: RowTypes, dtype: torch.dtype) -> str:
    """Return a name that `read_row_types` reads as these formats. dtype: of the computation."""
    names = {dtype: "auto"} | {one: name for name, one in DTYPE_NAMES.items() if one is not dtype}
    return f"k={names[types.keys.dtype]},v={names[types.values.dtype]}"

"""Whole models for steps of one bucket, in the structures of rounds.h: a target's pass, a draft's pass and its
context.

`decode_round.py` runs decode steps on them, one call each.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import ref

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.cpu.native.layer_description import DecoderOf, EmbeddingOf, LayerOf
from adapters.models.kernels.cpu.native.layers import NativeLayers
from adapters.models.kernels.cpu.native.norm_and_head import NativeContext, NativeHead
from adapters.models.kernels.interfaces.decode_pass import MOST_ROWS, DecodeRound, DraftPass
from adapters.models.kernels.step import Forward
from adapters.models.kernels.step_batch import Batch, BlockBatch

MOST_PARTS = 64  # tensors that a target leaves for a draft, as rounds.h has it
_NUMBER = ctypes.c_int
_POINTER = ctypes.c_void_p
_SIZE = ctypes.c_long
_LONG = ctypes.c_int64
_DOUBLE = ctypes.c_double
Launch: TypeAlias = Callable[[str, Batch, Callable[[], int]], int]  # `Kernels.launch`


# `draw_t` of draw.h.
class DrawOf(ctypes.Structure):
    _fields_ = [
        *((name, _POINTER) for name in ("used", "raw", "mask")),
        ("known", _SIZE),
        *((name, _DOUBLE) for name in ("temperature", "mass", "least")),
        ("key", _LONG),
        *((name, _SIZE) for name in ("limit", "most")),
        ("weighed", _POINTER),
        *((name, _DOUBLE) for name in ("lowest", "highest")),
        ("token", _SIZE),
    ]


# The structures of rounds.h, field by field.
class PassOf(ctypes.Structure):
    _fields_ = [
        *(("decoder", ctypes.POINTER(DecoderOf)), ("layers", ctypes.POINTER(LayerOf))),
        *((name, _SIZE) for name in ("count", "rows")),
        ("embedding", ctypes.POINTER(EmbeddingOf)),
        *((name, _POINTER) for name in ("residual", "columns")),
        ("head", ctypes.POINTER(LayerOf)),
        *(("logits", _POINTER), ("vocabulary", _SIZE)),
    ]


class FollowingOf(ctypes.Structure):
    _fields_ = [
        *(("decoder", ctypes.POINTER(DecoderOf)), ("layers", ctypes.POINTER(LayerOf))),
        *((name, _SIZE) for name in ("count", "rows")),
        *((name, _POINTER) for name in ("given", "columns")),
    ]


class RoundOf(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.POINTER(PassOf)) for name in ("target", "draft")),
        ("following", ctypes.POINTER(FollowingOf)),
        *((name, ctypes.POINTER(_POINTER)) for name in ("left", "late")),
        *((name, _SIZE) for name in ("parts", "late_row")),
        *((name, ctypes.POINTER(DrawOf)) for name in ("guesses", "draws")),
        *((name, _POINTER) for name in ("factors", "keys", "stops")),
        ("stopping", _SIZE),
        *((name, _LONG) for name in ("mask", "slot", "position", "first", "token")),
        *(("count", _SIZE), ("given", _POINTER), ("gifts", _SIZE)),
        *((name, _SIZE) for name in ("proposed", "accepted", "kept")),
        *(("followed", _NUMBER), ("tokens", _LONG * MOST_ROWS)),
    ]


@define(eq=False)
class NativePass:
    """Implements `DecodePass`: layers and the head behind them on the static tensors of one bucket.

    Raises ValueError where they do not go together.
    """

    layers: NativeLayers
    head: NativeHead
    batch: Batch
    forward: Forward
    logits: Tensor
    launch: Launch
    of: PassOf = field(init=False)
    _given: tuple[Any, ...] = field(init=False)  # what `of` points to

    def __attrs_post_init__(self) -> None:
        residual = self.forward.hidden
        columns = 6 if isinstance(self.batch, BlockBatch) else 4
        self._given = (
            *self.layers.call_arguments(residual, self.batch)[:5],
            self.head.call_arguments(residual, self.logits)[0],
        )
        decoder, described, count, rows, embedding, head = self._given
        if embedding is None or rows > MOST_ROWS:
            raise ValueError(f"steps of {rows} rows that begin with {'tokens' if embedding else 'hidden states'}")
        self.of = PassOf(
            *(make_pointer(decoder, DecoderOf), described, count, rows, make_pointer(embedding, EmbeddingOf)),
            *(residual.data_ptr(), columns_address(self.batch, columns), make_pointer(head, LayerOf)),
            *(self.logits.data_ptr(), self.logits.shape[1]),
        )

    @property
    def rows(self) -> int:
        return self.layers.rows

    def build_round(self, draft: ref[DraftPass] | None) -> DecodeRound:
        from adapters.models.kernels.cpu.native.decode_round import NativeRound  # noqa: PLC0415 - it has passes

        return NativeRound(self, draft)


@define(eq=False)
class NativeContextPass:
    """A draft's context rows for steps of one bucket. given: `[R, K D]`. Raises ValueError as `NativePass` does."""

    context: NativeContext
    batch: Batch
    given: Tensor
    of: FollowingOf = field(init=False)
    _given: tuple[Any, ...] = field(init=False)  # what `of` points to

    def __attrs_post_init__(self) -> None:
        self._given = self.context.call_arguments(self.given, self.batch)
        decoder, described, count, rows, *_ = self._given
        addresses = (self.given.data_ptr(), columns_address(self.batch, 4))
        self.of = FollowingOf(make_pointer(decoder, DecoderOf), described, count, rows, *addresses)


@frozen(eq=False)
class NativeDraft:
    """Implements `DraftPass`. following: context passes, ascending by rows. left: what the target leaves for the
    draft of each layer that it reads, `[R, D]`. mask: the token of rows that are to be proposed.
    """

    block: NativePass
    following: tuple[NativeContextPass, ...]
    left: tuple[Tensor, ...]
    mask: int

    @property
    def rows(self) -> int:
        return self.block.rows


def make_pointer(reference: Any, of: type[ctypes.Structure]) -> Any:
    """Turn a `ctypes.byref`, or None, into a pointer for a field of a structure."""
    return ctypes.cast(reference, ctypes.POINTER(of))


def columns_address(batch: Batch, count: int) -> int:
    """Return the address of a batch's table in host memory. Raises ValueError for a table with fewer columns."""
    table = batch.table
    if table.device.type != "cpu" or len(table) < count or table.dtype is not torch.int64 or not table.is_contiguous():
        raise ValueError(f"a batch's {table.dtype} {list(table.shape)} on {table.device} for {count} columns")
    return table.data_ptr()

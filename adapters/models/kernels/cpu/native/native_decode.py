"""Decode steps of one slot, a call of the compiled library each: what a draft proposes, how far the target agrees, and
the draft's rows of what stays. With the bits of calls for each of these, and no way back to Python in between.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias
from weakref import ref

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.kernels.cpu.native.layer_description import DecoderOf, EmbeddingOf, LayerOf
from adapters.models.kernels.cpu.native.layers import NativeLayers
from adapters.models.kernels.cpu.native.norm_and_head import NativeContext, NativeHead
from adapters.models.kernels.step import Forward
from adapters.models.kernels.step_batch import Batch, BlockBatch

MOST_FED, MOST_PARTS = 64, 64  # rows of a step, and tensors that a target leaves for a draft, as rounds.h has them
_NUMBER, _POINTER, _SIZE, _LONG, _DOUBLE = (
    *(ctypes.c_int, ctypes.c_void_p, ctypes.c_long, ctypes.c_int64, ctypes.c_double),
)
_NO_TOKEN = -2
Addresses: TypeAlias = ctypes.Array[ctypes.c_void_p]
Launch: TypeAlias = Callable[[str, Batch, Callable[[], int]], int]  # of kernels


class DrawOf(ctypes.Structure):  # as draw.h has it
    _fields_ = [
        *((name, _POINTER) for name in ("used", "raw", "mask")),
        ("known", _SIZE),
        *((name, _DOUBLE) for name in ("temperature", "mass", "least")),
        ("key", _LONG),
        *((name, _SIZE) for name in ("limit", "most")),
        ("told", _POINTER),
        *((name, _DOUBLE) for name in ("lowest", "highest")),
        ("token", _SIZE),
    ]


class PassOf(ctypes.Structure):  # these as rounds.h has them
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
        *((name, _SIZE) for name in ("count", "proposed", "accepted", "kept")),
        *(("followed", _NUMBER), ("tokens", _LONG * MOST_FED)),
    ]


@define(eq=False)
class NativePass:
    """Layers and the head behind them for steps of one bucket, on its static tensors: what a forward leaves, and
    float32 logits `[R, V]`. Raises ValueError where they do not go together.
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
        residual, columns = self.forward.hidden, 6 if isinstance(self.batch, BlockBatch) else 4
        self._given = (*self.layers.arguments(residual, self.batch)[:5], self.head.arguments(residual, self.logits)[0])
        decoder, described, count, rows, embedding, head = self._given
        if embedding is None or rows > MOST_FED:
            raise ValueError(f"steps of {rows} rows that begin with {'tokens' if embedding else 'hidden states'}")
        self.of = PassOf(
            *(pointer(decoder, DecoderOf), described, count, rows, pointer(embedding, EmbeddingOf)),
            *(residual.data_ptr(), columns_of(self.batch, columns), pointer(head, LayerOf)),
            *(self.logits.data_ptr(), self.logits.shape[1]),
        )

    @property
    def rows(self) -> int:
        return self.layers.rows


@define(eq=False)
class NativeFollowing:
    """A draft's context rows for steps of one bucket. given: `[R, K D]`. Raises ValueError as `NativePass` does."""

    context: NativeContext
    batch: Batch
    given: Tensor
    of: FollowingOf = field(init=False)
    _given: tuple[Any, ...] = field(init=False)  # what `of` points to

    def __attrs_post_init__(self) -> None:
        self._given = self.context.arguments(self.given, self.batch)
        decoder, described, count, rows, *_ = self._given
        places = (self.given.data_ptr(), columns_of(self.batch, 4))
        self.of = FollowingOf(pointer(decoder, DecoderOf), described, count, rows, *places)


@frozen(eq=False)
class NativeDraft:
    """What a round is told of a draft. following: by rows, ascending. left: what the target leaves for it of each layer
    that it reads, `[R, D]`. mask: the token of rows that are to be proposed.
    """

    block: NativePass
    following: tuple[NativeFollowing, ...]
    left: tuple[Tensor, ...]
    mask: int


@define(eq=False)
class NativeRound:
    """Decode steps of as many rows as the target's pass has, with proposals of a draft, where there is one. Whoever has
    the draft lets it go with its weights: nothing is kept of them here.

    guesses, draws: how proposals are picked and how the target picks, one a row; these, and `factors`, `keys` and
    `stops` of `of`, are to be set before. So is `late`, if what the target leaves of a row that nobody proposed to goes
    somewhere: to row `late_row` of each. With no draft, `leave` says what that is. Raises ValueError where the parts do
    not go together: the library checks nothing.
    """

    target: NativePass
    draft: ref[NativeDraft] | None
    guesses: ctypes.Array[DrawOf] = field(init=False)
    draws: ctypes.Array[DrawOf] = field(init=False)
    of: RoundOf = field(init=False)
    _following: ctypes.Array[FollowingOf] = field(init=False)
    _left: Addresses = field(init=False)
    _room: tuple[int, int, int] = field(init=False)  # slots; rows of one; the last position that a block fits behind
    _most: int = field(init=False, default=0)  # proposals
    _call: Callable[[], int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        rows, layers, draft = self.target.rows, self.target.layers, self._drafting()
        self.guesses, self.draws, self.of = (DrawOf * rows)(), (DrawOf * rows)(), RoundOf()
        self.of.target = ctypes.pointer(self.target.of)
        self.of.guesses, self.of.draws = self.guesses, self.draws
        rooms, last = [layers.room], layers.room[1]
        if draft is not None:
            self._take(draft)
            rooms += [draft.block.layers.room, *(one.context.room for one in draft.following)]
            last, self._most = draft.block.layers.room[1] - draft.block.rows, draft.block.rows - 1
        self._room = min(slots for slots, _ in rooms), min(room for _, room in rooms), last
        code, of, level = layers.compiled.code, ctypes.byref(self.of), layers.level
        self._call = lambda: code.rekindle_round(of, torch.get_num_threads(), level)

    def _drafting(self) -> NativeDraft | None:
        if self.draft is None:
            return None
        if (found := self.draft()) is None:
            raise ValueError("the draft's weights have gone")
        return found

    def _take(self, draft: NativeDraft) -> None:
        contexts, dtype = draft.following, self.target.forward.hidden.dtype
        self.leave(draft.left)
        width = contexts[0].given.shape[1]
        if width != len(draft.left) * self.target.forward.hidden.shape[1]:
            raise ValueError(f"{len(draft.left)} parts of a target's rows for {width} numbers a row")
        if contexts[-1].of.rows < self.target.rows or any(one.given.dtype is not dtype for one in contexts):
            raise ValueError(f"contexts of {[one.of.rows for one in contexts]} rows for a step of {self.target.rows}")
        if draft.block.logits.shape[1] != self.target.logits.shape[1]:
            raise ValueError(f"a draft of {draft.block.logits.shape[1]} tokens for {self.target.logits.shape[1]}")
        self._following = (FollowingOf * len(contexts))(*(one.of for one in contexts))
        self.of.draft, self.of.following, self.of.mask = ctypes.pointer(draft.block.of), self._following, draft.mask

    def leave(self, left: Sequence[Tensor]) -> None:
        """What the target leaves of rows for a draft, each `[R, D]`: where it is."""
        hidden = self.target.forward.hidden
        if len(left) > MOST_PARTS or any(
            one.shape != hidden.shape or one.dtype is not hidden.dtype or not one.is_contiguous() for one in left
        ):
            raise ValueError(f"{[list(one.shape) for one in left]} of a target's {list(hidden.shape)}")
        self._left = addresses(left)
        self.of.left, self.of.parts = self._left, len(left)

    def run(self, slot: int, position: int, first: int, token: int, count: int) -> None:
        """Feed the token at that position of the slot, and up to so many proposals behind it; the draft's context
        begins at `first`. What is found is in `of` then.

        Raises IndexError for what the caches or the embedding do not have, MemoryError where there is none, ValueError
        where the draft has gone: nothing has happened then.
        """
        slots, rows, last = self._room
        draft, most = self._drafting(), self._most
        fits = 0 <= slot < slots and 0 <= first <= position <= last and position + count < rows
        if not fits or not min(1, most) <= count <= most or count >= self.target.rows:
            raise IndexError(f"{count} proposals from {position} on in slot {slot}, of {slots} slots of {rows} rows")
        of = self.of
        of.slot, of.position, of.first, of.token, of.count = slot, position, first, token, count
        failed = self.target.launch("decode" if draft is None else "round", self.target.batch, self._call)
        if failed == _NO_TOKEN:
            raise IndexError(f"token {token}: the embedding has others")
        if failed:
            raise MemoryError(f"no memory for a decode step of {self.target.rows} rows")


def addresses(tensors: Sequence[Tensor]) -> Addresses:
    return (_POINTER * len(tensors))(*(one.data_ptr() for one in tensors))


def pointer(reference: Any, of: type[ctypes.Structure]) -> Any:
    """What `ctypes.byref` was taken of, or nothing, as a structure wants it."""
    return ctypes.cast(reference, ctypes.POINTER(of))


def columns_of(batch: Batch, count: int) -> int:
    """The address of a batch's numbers, which are on a host. Raises ValueError for fewer columns."""
    table = batch.table
    if table.device.type != "cpu" or len(table) < count or table.dtype is not torch.int64 or not table.is_contiguous():
        raise ValueError(f"a batch's {table.dtype} {list(table.shape)} on {table.device} for {count} columns")
    return table.data_ptr()

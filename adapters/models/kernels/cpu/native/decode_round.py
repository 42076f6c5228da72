"""Decode steps of one slot by the compiled library, one call each (rounds.h).

A call lets the draft propose, runs the target over the proposals, picks the tokens, finds how far the target agrees,
and computes the draft's context rows of what stays. The bits are those of separate calls for each of these parts; what
is saved are the ways back to Python in between.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Sequence
from itertools import zip_longest
from weakref import ref

import numpy as np
import torch
from attrs import define, field
from torch import Tensor

from adapters.models.kernels.cpu.native.draw import factors_address
from adapters.models.kernels.cpu.native.native_passes import (
    MOST_PARTS,
    DrawOf,
    FollowingOf,
    NativeDraft,
    NativePass,
    RoundOf,
)
from adapters.models.kernels.functions.noise import noise_key
from adapters.models.kernels.host_addresses import HostAddresses, list_addresses
from adapters.models.kernels.interfaces.decode_pass import MOST_ROWS, DraftPass, RoundOutcome
from adapters.models.kernels.interfaces.sampling_interface import TokenMask
from effects.ids import Tokens
from effects.job import Sampling

AHEAD = 64  # positions whose noise keys are computed together
_NO_TOKEN = -2  # the library's answer for a token that the embedding does not have


@define(eq=False)
class NoiseKeys:
    """Keys of the noise that one request's next tokens are drawn with, in memory that the library reads."""

    seed: int
    _first: int = field(init=False, default=0)  # the position of the first key
    _keys: array[int] = field(init=False, factory=lambda: array("q"))
    _address: int = field(init=False, default=0)

    def address_of(self, position: int) -> int:
        """Return the address of the keys from `position` on, of at least as many as a step has rows."""
        offset = position - self._first
        if not 0 <= offset <= len(self._keys) - MOST_ROWS:
            self._keys = array("q", [noise_key(self.seed, position + more) for more in range(MOST_ROWS + AHEAD)])
            self._first = position
            self._address = self._keys.buffer_info()[0]
            offset = 0
        return self._address + self._keys.itemsize * offset


@define(eq=False)
class NativeRound:
    """Implements `DecodeRound`. Nothing is kept here of a draft's weights: the draft's owner lets them go.

    draws, guesses: how the target picks its tokens and how proposals are picked, one for each row. Raises ValueError
    where target and draft do not go together: the library checks nothing.
    """

    target: NativePass
    draft: ref[DraftPass] | None
    guesses: ctypes.Array[DrawOf] = field(init=False)
    draws: ctypes.Array[DrawOf] = field(init=False)
    of: RoundOf = field(init=False)
    _following: ctypes.Array[FollowingOf] = field(init=False)
    _left: HostAddresses = field(init=False)
    _late: HostAddresses | None = field(init=False, default=None)
    _stops: ctypes.Array[ctypes.c_int64] = field(init=False, factory=(ctypes.c_int64 * 0))
    _noise: NoiseKeys | None = field(init=False, default=None)
    _given: ctypes.Array[ctypes.c_int64] = field(init=False)
    _masks: Sequence[TokenMask] = field(init=False, default=())  # that the library reads in the next step
    _masked: int = field(init=False, default=0)  # draws that have a mask
    _room: tuple[int, int, int] = field(init=False)  # slots; rows of one; the last position that a block fits behind
    _most: int = field(init=False, default=0)  # proposals
    _call: Callable[[], int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        rows = self.target.rows
        layers = self.target.layers
        draft = self._draft()
        self.guesses = (DrawOf * rows)()
        self.draws = (DrawOf * rows)()
        self.of = RoundOf()
        self.of.target = ctypes.pointer(self.target.of)
        self.of.guesses = self.guesses
        self.of.draws = self.draws
        self._given = (ctypes.c_int64 * rows)()
        self.of.given = ctypes.addressof(self._given)
        rooms = [layers.room]
        last = layers.room[1]
        if draft is not None:
            self._join(draft)
            rooms += [draft.block.layers.room, *(one.context.room for one in draft.following)]
            last = draft.block.layers.room[1] - draft.block.rows
            self._most = draft.block.rows - 1
        self._room = (min(slots for slots, _ in rooms), min(room for _, room in rooms), last)
        code = layers.compiled.code
        described = ctypes.byref(self.of)
        level = layers.level
        self._call = lambda: code.rekindle_round(described, torch.get_num_threads(), level)

    @property
    def rows(self) -> int:
        return self.target.rows

    def _draft(self) -> NativeDraft | None:
        if self.draft is None:
            return None
        found = self.draft()
        if not isinstance(found, NativeDraft):
            raise ValueError("the draft's weights have gone")  # noqa: TRY004 - they are no longer there
        return found

    def _join(self, draft: NativeDraft) -> None:
        contexts = draft.following
        dtype = self.target.forward.hidden.dtype
        self.leave(draft.left)
        width = contexts[0].given.shape[1]
        if width != len(draft.left) * self.target.forward.hidden.shape[1]:
            raise ValueError(f"{len(draft.left)} parts of a target's rows for {width} numbers a row")
        if contexts[-1].of.rows < self.target.rows or any(one.given.dtype is not dtype for one in contexts):
            raise ValueError(f"contexts of {[one.of.rows for one in contexts]} rows for a step of {self.target.rows}")
        if draft.block.logits.shape[1] != self.target.logits.shape[1]:
            raise ValueError(f"a draft of {draft.block.logits.shape[1]} tokens for {self.target.logits.shape[1]}")
        self._following = (FollowingOf * len(contexts))(*(one.of for one in contexts))
        self.of.draft = ctypes.pointer(draft.block.of)
        self.of.following = self._following
        self.of.mask = draft.mask

    def leave(self, tensors: Sequence[Tensor]) -> None:
        hidden = self.target.forward.hidden
        if len(tensors) > MOST_PARTS or any(
            one.shape != hidden.shape or one.dtype is not hidden.dtype or not one.is_contiguous() for one in tensors
        ):
            raise ValueError(f"{[list(one.shape) for one in tensors]} of a target's {list(hidden.shape)}")
        self._left = list_addresses(tensors)
        self.of.left = self._left
        self.of.parts = len(tensors)

    def copy_late_row(self, targets: HostAddresses | None, row: int = 0) -> None:
        if targets is not self._late:
            self.of.late = targets
            self._late = targets
        self.of.late_row = row

    def describe(self, sampling: Sampling, guesses: Sequence[Sampling], stops: Sequence[int]) -> None:
        self._stops = (ctypes.c_int64 * len(stops))(*stops)
        self.of.stops = ctypes.addressof(self._stops)
        self.of.stopping = len(stops)
        self.of.factors = factors_address()
        vocabulary = self.target.logits.shape[1]
        self._masked = 0
        for draw in self.draws:
            _describe_draw(draw, sampling, vocabulary)
        for draw, guess in zip(self.guesses, guesses, strict=True):
            _describe_draw(draw, guess, vocabulary)
        self._noise = NoiseKeys(sampling.seed) if sampling.temperature else None

    def give(self, copies: Tokens, masks: Sequence[TokenMask]) -> None:
        if len(copies) >= self.target.rows or len(masks) not in {0, 1 + len(copies)}:
            raise ValueError(f"{len(copies)} copies and {len(masks)} masks for a step of {self.target.rows} rows")
        self.of.gifts = len(copies)
        self._given[: len(copies)] = list(copies)
        if not (masks or self._masked):
            return
        self._masks = [np.ascontiguousarray(mask) for mask in masks]
        for draw, mask in zip_longest(self.draws[: max(len(masks), self._masked)], self._masks):
            draw.mask = None if mask is None else mask.ctypes.data
            draw.known = -1 if mask is None else mask.nbytes
        self._masked = len(masks)

    def run(self, slot: int, position: int, first: int, token: int, count: int) -> RoundOutcome:
        slots, rows, last = self._room
        draft = self._draft()
        most = self._most
        described = self.of
        ahead = count or described.gifts
        fits = 0 <= slot < slots and 0 <= first <= position <= last and position + ahead < rows
        if not fits or not min(1, most) <= count <= most or count >= self.target.rows:
            raise IndexError(f"{count} proposals from {position} on in slot {slot}, of {slots} slots of {rows} rows")
        described.keys = None if self._noise is None else self._noise.address_of(position + 1)
        described.slot = slot
        described.position = position
        described.first = first
        described.token = token
        described.count = count
        failed = self.target.launch("decode" if draft is None else "round", self.target.batch, self._call)
        if failed == _NO_TOKEN:
            raise IndexError(f"token {token}: the embedding has others")
        if failed:
            raise MemoryError(f"no memory for a decode step of {self.target.rows} rows")
        tokens = tuple(described.tokens[: described.kept])
        return RoundOutcome(tokens, described.proposed, described.accepted, bool(described.followed))


def _describe_draw(draw: DrawOf, sampling: Sampling, vocabulary: int) -> None:
    """Describe how a token is picked, as `draw.pick_rows` does, but for the row of logits."""
    draw.mask = None
    draw.known = -1
    draw.most = -1
    draw.weighed = None
    draw.temperature = sampling.temperature
    draw.mass = sampling.top_p
    draw.least = math.log(sampling.min_p) if sampling.temperature and sampling.min_p else -math.inf
    draw.limit = sampling.top_k if 0 < sampling.top_k < vocabulary else vocabulary

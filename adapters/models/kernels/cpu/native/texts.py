"""Texts that proposals are copied from, indexed and searched by the compiled library (texts.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.text_matching import IndexedText
from effects.ids import Tokens

FIRST_ROOM = 1024  # tokens that a new text has room for


class TextOf(ctypes.Structure):
    """`text_t`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "earlier", "newest")),
        *((name, ctypes.c_int64) for name in ("count", "indexed", "bits")),
    ]


# `match_t`, as five numbers of 8 bytes.
_OWN, _ARCHIVE, _, _, _MATCHED = range(5)
_MATCH_BYTES = 40


@define(eq=False)
class NativeText:
    """Implements `IndexedText`. Its index takes 8 to 16 bytes a token besides the 4 of the token."""

    described: TextOf = field(init=False, factory=TextOf)
    address: int = field(init=False)
    _tokens: NDArray[np.int32] = field(init=False, factory=lambda: np.zeros(0, np.int32))
    _earlier: NDArray[np.int32] = field(init=False, factory=lambda: np.zeros(0, np.int32))
    _newest: NDArray[np.int32] = field(init=False, factory=lambda: np.zeros(0, np.int32))
    _count: int = field(init=False, default=0)
    _room: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.address = ctypes.addressof(self.described)

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return self._tokens.nbytes + self._earlier.nbytes + self._newest.nbytes

    def append(self, tokens: Sequence[int]) -> None:
        first = self._count
        count = first + len(tokens)
        if count > self._room:
            self._grow(count)
        if count == first + 1:
            self._tokens[first] = tokens[0]
        else:
            self._tokens[first:count] = tokens
        self._count = count
        self.described.count = count

    def read_tail(self, count: int) -> Tokens:
        return tuple(self._tokens[max(0, self._count - count) : self._count].tolist())

    def _grow(self, count: int) -> None:
        """Make room for twice as many tokens. The index is built again, since its hashes become longer."""
        room = 1 << max(FIRST_ROOM, 2 * count - 1).bit_length() - 1
        tokens = np.empty(room, np.int32)
        tokens[: self._count] = self._tokens[: self._count]
        self._tokens = tokens
        self._room = room
        self._earlier = np.empty(room, np.int32)
        self._newest = np.zeros(room, np.int32)
        described = self.described
        described.tokens = self._tokens.ctypes.data
        described.earlier = self._earlier.ctypes.data
        described.newest = self._newest.ctypes.data
        described.indexed = 0
        described.bits = room.bit_length() - 1


@frozen(eq=False)
class NativeMatches:
    """Implements `TextMatches`. matches: int64 `[texts, 5]`. texts: they are kept alive."""

    code: ctypes.CDLL
    matches: NDArray[np.int64]
    texts: Sequence[tuple[IndexedText, IndexedText | None]]

    @property
    def lengths(self) -> list[int]:
        found: list[int] = self.matches[:, _MATCHED].tolist()
        return found

    def copy(self, index: int, count: int) -> Tokens:
        copied = (ctypes.c_int32 * count)()
        address = self.matches.ctypes.data + index * _MATCH_BYTES
        return tuple(copied[: self.code.rekindle_copy_text(address, count, copied)])


@frozen(eq=False)
class NativeTextMatcher:
    """Implements `TextMatcher`."""

    compiled: NativeLibrary

    def make_text(self) -> NativeText:
        return NativeText()

    def match(self, texts: Sequence[tuple[IndexedText, IndexedText | None]]) -> NativeMatches:
        matches = np.zeros((len(texts), 5), np.int64)
        matches[:, _OWN] = [own.address for own, _ in texts]
        matches[:, _ARCHIVE] = [0 if archive is None else archive.address for _, archive in texts]
        self.compiled.code.rekindle_match_texts(matches.ctypes.data, len(texts))
        return NativeMatches(self.compiled.code, matches, texts)

"""Texts that proposals are copied from, indexed and searched by the compiled library (texts.h)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from struct import Struct

from attrs import define, field, frozen

from adapters.models.kernels.cpu.native.native_library import NativeLibrary
from adapters.models.kernels.interfaces.text_matching import (
    MOST_BRANCH,
    MOST_COPIED,
    NO_BRANCH,
    Branch,
    IndexedText,
)
from effects.ids import Tokens

FIRST_ROOM = 1024  # tokens that a new text has room for
MOST_COMPARED = 32  # places of a text and of an archive (texts.h)
LONG_INDEX = 1024  # new tokens that are indexed without the interpreter, because that takes 40 microseconds or more
# By the number of tokens to read: slices of ctypes take twice as long, since they make one number after the other.
READ_TOKENS = tuple(Struct(f"{count}i").unpack_from for count in range(MOST_COPIED + 1))


def make_ints(count: int = 0) -> array[int]:
    """Return an array of `count` zeros of 32 bits."""
    return array("i", bytes(4 * count))


class TextOf(ctypes.Structure):
    """`text_t`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "earlier", "newest")),
        *((name, ctypes.c_int64) for name in ("count", "indexed", "bits")),
    ]


class PlaceOf(ctypes.Structure):
    """`place_t`."""

    _fields_ = [("source", ctypes.c_void_p), ("place", ctypes.c_int64), ("length", ctypes.c_int64)]


class MatchOf(ctypes.Structure):
    """`match_t`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("own", "archive")),
        *((name, ctypes.c_int64) for name in ("chain_asked", "branch_asked")),
        ("source", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("place", "matched", "copies")),
        ("copied", ctypes.c_int32 * MOST_COPIED),
        *((name, ctypes.c_int64) for name in ("on_branch", "fork", "branch_length")),
        ("branch", ctypes.c_int32 * MOST_BRANCH),
        *((name, ctypes.c_int64) for name in ("end", "compared")),
        ("places", PlaceOf * MOST_COMPARED),
    ]


@define(eq=False)
class NativeText:
    """Implements `IndexedText`. Its index takes 8 to 16 bytes a token besides the 4 of the token.

    matched: as in `IndexedText`. searched: the archive that was searched last. What was found refers to its memory, so
    it has to live as long. is_long: the next search indexes LONG_INDEX tokens or more.
    """

    compiled: NativeLibrary
    matched: int = field(init=False, default=0)
    searched: NativeText | None = field(init=False, default=None)
    is_long: bool = field(init=False, default=False)
    described: TextOf = field(init=False, factory=TextOf)
    found: MatchOf = field(init=False, factory=MatchOf)
    address: int = field(init=False)  # of `described`
    match_address: int = field(init=False)  # of `found`
    alone: ctypes.Array[ctypes.c_void_p] = field(init=False)  # that address, as the only one of a search
    _tokens: array[int] = field(init=False, factory=make_ints)
    _earlier: array[int] = field(init=False, factory=make_ints)
    _newest: array[int] = field(init=False, factory=make_ints)
    _count: int = field(init=False, default=0)
    _room: int = field(init=False, default=0)

    def __attrs_post_init__(self) -> None:
        self.address = ctypes.addressof(self.described)
        self.match_address = ctypes.addressof(self.found)
        self.found.own = self.address
        self.alone = (ctypes.c_void_p * 1)(self.match_address)

    def __len__(self) -> int:
        return self._count

    def copy(self, count: int) -> Tokens:
        found = self.found
        copied = READ_TOKENS[min(count, found.copies)](found.copied)
        found.chain_asked = len(copied)
        return copied

    @property
    def on_branch(self) -> int:
        count: int = self.found.on_branch
        return count

    def find_branch(self, chain: int, count: int) -> Branch:
        if count <= 0 or not self.matched:
            return NO_BRANCH
        self.compiled.brief.rekindle_find_branch(self.match_address, chain)
        tokens = tuple(self.found.branch[: min(count, self.found.branch_length)])
        self.found.branch_asked = len(tokens)
        return Branch(self.found.fork, tokens)

    @property
    def nbytes(self) -> int:
        return self._tokens.itemsize * (len(self._tokens) + len(self._earlier) + len(self._newest))

    def append(self, tokens: Sequence[int]) -> None:
        first = self._count
        count = first + len(tokens)
        if count > self._room:
            self._grow(count)
        if count == first + 1:
            self._tokens[first] = tokens[0]
        else:
            # A list takes half of the time that another sequence takes.
            fresh = make_ints()
            fresh.fromlist(tokens if isinstance(tokens, list) else list(tokens))
            self._tokens[first:count] = fresh
            self.is_long = self.is_long or len(tokens) >= LONG_INDEX
        self._count = count
        self.described.count = count

    def read_tail(self, count: int) -> Tokens:
        return tuple(self._tokens[max(0, self._count - count) : self._count])

    def _grow(self, count: int) -> None:
        """Make room for twice as many tokens. The index is built again, since its hashes become longer."""
        room = 1 << max(FIRST_ROOM, 2 * count - 1).bit_length() - 1
        tokens = make_ints(room)
        tokens[: self._count] = self._tokens[: self._count]
        self._tokens = tokens
        self._room = room
        self._earlier = make_ints(room)
        self._newest = make_ints(room)
        described = self.described
        described.tokens, _ = self._tokens.buffer_info()
        described.earlier, _ = self._earlier.buffer_info()
        described.newest, _ = self._newest.buffer_info()
        described.indexed = 0
        self.is_long = self._count >= LONG_INDEX
        described.bits = room.bit_length() - 1


@frozen(eq=False)
class NativeTextMatcher:
    """Implements `TextMatcher`."""

    compiled: NativeLibrary

    def make_text(self) -> NativeText:
        return NativeText(self.compiled)

    def match(self, texts: Sequence[tuple[IndexedText, IndexedText | None]]) -> None:
        addresses = (ctypes.c_void_p * len(texts))()
        searched = list[NativeText]()
        searched_before = list[IndexedText | None]()  # the call still reads these, so they have to live until it ends
        is_long = False
        for index, (own, archive) in enumerate(texts):
            assert isinstance(own, NativeText)
            if archive is not own.searched:
                assert archive is None or isinstance(archive, NativeText)
                searched_before.append(own.searched)
                own.searched = archive
                own.found.archive = None if archive is None else archive.address
            is_long = is_long or own.is_long or (own.searched is not None and own.searched.is_long)
            addresses[index] = own.match_address
            searched.append(own)
        (self.compiled.code if is_long else self.compiled.brief).rekindle_match_texts(addresses, len(texts))
        for text in searched:
            text.matched = text.found.matched
        if is_long:
            for text in searched:
                text.is_long = False
                if text.searched is not None:
                    text.searched.is_long = False

    def match_next(self, own: IndexedText, token: int, archive: IndexedText | None) -> int:
        assert isinstance(own, NativeText)
        own.append((token,))
        if archive is not own.searched or own.is_long or (own.searched is not None and own.searched.is_long):
            self.match([(own, archive)])
            return own.matched
        self.compiled.brief.rekindle_match_texts(own.alone, 1)
        own.matched = own.found.matched
        return own.matched

"""Texts that proposals are copied from, indexed and searched by the compiled library (texts.h)."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import chain
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
        *((name, ctypes.c_int64) for name in ("count", "indexed", "bits", "room")),
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


# Indices of numbers of 64 bits, and the first byte of `copied`: fields of ctypes take four times as long to read.
MATCHED, COPIES, CHAIN_ASKED, COUNT = (
    field.offset // 8 for field in (MatchOf.matched, MatchOf.copies, MatchOf.chain_asked, TextOf.count)
)
COPIED: int = MatchOf.copied.offset


@define(eq=False)
class NativeText:
    """Implements `IndexedText`. Its index takes 8 to 16 bytes a token besides the 4 of the token.

    searched: the archive that was searched last. What was found refers to its memory, so it has to live as long.
    is_long: the next search indexes LONG_INDEX tokens or more.
    """

    compiled: NativeLibrary
    searched: NativeText | None = field(init=False, default=None)
    is_long: bool = field(init=False, default=False)
    described: TextOf = field(init=False)
    found: MatchOf = field(init=False)
    address: int = field(init=False)  # of `described`
    match_address: int = field(init=False)  # of `found`
    _description: memoryview = field(init=False)  # the numbers of `described`
    _numbers: memoryview = field(init=False)  # the numbers of `found`
    _bytes: bytearray = field(init=False, factory=lambda: bytearray(ctypes.sizeof(MatchOf)))  # of `found`
    _tokens: array[int] = field(init=False, factory=make_ints)
    _earlier: array[int] = field(init=False, factory=make_ints)
    _newest: array[int] = field(init=False, factory=make_ints)

    def __attrs_post_init__(self) -> None:
        described = bytearray(ctypes.sizeof(TextOf))
        self.described = TextOf.from_buffer(described)
        self.found = MatchOf.from_buffer(self._bytes)
        self.address = ctypes.addressof(self.described)
        self.match_address = ctypes.addressof(self.found)
        self.found.own = self.address
        self._description = memoryview(described).cast("q")
        self._numbers = memoryview(self._bytes).cast("q")

    def __len__(self) -> int:
        return self._description[COUNT]

    @property
    def matched(self) -> int:
        return self._numbers[MATCHED]

    def copy(self, count: int) -> Tokens:
        numbers = self._numbers
        count = min(count, numbers[COPIES])
        numbers[CHAIN_ASKED] = count
        return READ_TOKENS[count](self._bytes, COPIED)

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
        first = len(self)
        count = first + len(tokens)
        self.make_room(count)
        self._tokens[first:count] = make_tokens(tokens)
        self.is_long = self.is_long or len(tokens) >= LONG_INDEX
        self.described.count = count

    def read_tail(self, count: int) -> Tokens:
        return tuple(self._tokens[max(0, len(self) - count) : len(self)])

    def make_room(self, count: int) -> None:
        """Make room for so many tokens, and for at least twice as many as there was.

        The index is built again, since its hashes become longer.
        """
        described = self.described
        if count <= described.room:
            return
        known = len(self)
        room = 1 << max(FIRST_ROOM, 2 * count - 1).bit_length() - 1
        tokens = make_ints(room)
        tokens[:known] = self._tokens[:known]
        self._tokens = tokens
        self._earlier = make_ints(room)
        self._newest = make_ints(room)
        described.tokens, _ = self._tokens.buffer_info()
        described.earlier, _ = self._earlier.buffer_info()
        described.newest, _ = self._newest.buffer_info()
        described.indexed = 0
        described.room = room
        described.bits = room.bit_length() - 1
        self.is_long = known >= LONG_INDEX


def make_tokens(tokens: Sequence[int]) -> array[int]:
    """Return tokens as numbers of 32 bits. A list takes half of the time that another sequence takes."""
    made = make_ints()
    made.fromlist(tokens if isinstance(tokens, list) else list(tokens))
    return made


@define(eq=False)
class NativeTextBatch:
    """Implements `TextBatch`.

    archives: what each text is searched with from now on. Empty once the first search is over. is_long: the next search
    indexes many tokens, so it lets go of the interpreter.
    """

    compiled: NativeLibrary
    texts: Sequence[NativeText]
    archives: Sequence[NativeText | None]
    is_long: bool = field(init=False)
    _addresses: array[int] = field(init=False)
    _matched: array[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.is_long = any(text is not None and text.is_long for text in (*self.texts, *self.archives))
        self._addresses = array("q", [text.match_address for text in self.texts])
        self._matched = make_ints(len(self.texts))

    def match_appended(self, appended: Sequence[Sequence[int]]) -> list[int]:
        counts = make_tokens(list(map(len, appended)))
        tokens = make_tokens(list(chain.from_iterable(appended)))
        is_long = self.is_long or len(tokens) >= LONG_INDEX
        searched_before = self._give_archives() if self.archives else ()  # the search still reads these
        while True:
            code = self.compiled.code if is_long else self.compiled.brief
            full: int = code.rekindle_match_appended(
                *(self._addresses.buffer_info()[0], tokens.buffer_info()[0], counts.buffer_info()[0]),
                *(self._matched.buffer_info()[0], len(self.texts)),
            )
            if full < 0:
                break
            text = self.texts[full]
            text.make_room(len(text) + counts[full])
            is_long = is_long or text.is_long
        del searched_before
        if is_long:
            self._note_long_search()
        return self._matched.tolist()

    def _give_archives(self) -> Sequence[NativeText | None]:
        """Give each text its archive, and return the archives that they had before."""
        before = [text.searched for text in self.texts]
        for text, archive in zip(self.texts, self.archives, strict=True):
            text.searched = archive
            text.found.archive = None if archive is None else archive.address
        self.archives = ()
        return before

    def _note_long_search(self) -> None:
        """Note that nothing is left that takes long to index."""
        self.is_long = False
        for text in self.texts:
            text.is_long = False
            if text.searched is not None:
                text.searched.is_long = False


@frozen(eq=False)
class NativeTextMatcher:
    """Implements `TextMatcher`."""

    compiled: NativeLibrary

    def make_text(self) -> NativeText:
        return NativeText(self.compiled)

    def make_batch(self, texts: Sequence[tuple[IndexedText, IndexedText | None]]) -> NativeTextBatch:
        searched = list[NativeText]()
        archives = list[NativeText | None]()
        for own, archive in texts:
            assert isinstance(own, NativeText)
            assert archive is None or isinstance(archive, NativeText)
            searched.append(own)
            archives.append(archive)
        return NativeTextBatch(self.compiled, searched, archives)

"""The content of an object that was read in ranges, as `fill_target` reads a run's content."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

from attrs import define, field

from adapters.store.files.seekable import Damaged


@define(eq=False)
class ObjectPieces:
    """Neighbouring pieces of one object. Only what lies across two of them is copied."""

    pieces: Sequence[memoryview]
    descriptor: None = field(default=None, init=False)  # it is no file
    path: str = field(default="", init=False)
    _starts: list[int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._starts = [0, *accumulate(map(len, self.pieces))]

    @property
    def size(self) -> int:
        return self._starts[-1]

    @contextmanager
    def read_piece(self, at: int, length: int) -> Iterator[memoryview]:
        """Yield a piece of the content. Raises Damaged if there is less."""
        if not 0 <= at <= at + length <= self.size:
            raise Damaged("the object ends early")
        number = bisect_right(self._starts, at, hi=len(self.pieces)) - 1
        begin = at - self._starts[number]
        piece = self.pieces[number][begin : begin + length]
        yield piece if len(piece) == length else memoryview(self._join(number, begin, length))

    def _join(self, number: int, begin: int, length: int) -> bytes:
        found = bytearray()
        while len(found) < length:
            found += self.pieces[number][begin : begin + length - len(found)]
            begin = 0
            number += 1
        return bytes(found)

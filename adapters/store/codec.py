"""How rows are compressed, decided by what was measured here: bytes saved are only worth it where reading is slow."""

from __future__ import annotations

import os
import time
from typing import Literal, TypeAlias

from attrs import define, frozen

from adapters.store import seekable
from adapters.store.seekable import Buffer, Compress

Codec: TypeAlias = Literal["auto", "zstd", "store"]
LEVELS = {"store": -5, "zstd": 1}  # -5 leaves KV as it is and decodes at the speed of memory
DECODERS = max(2, min(16, os.cpu_count() or 1))  # pieces that are read and decoded at once
WORTH = 0.9  # of the time: less of a gain is not worth the processor


@define
class Mean:
    """Of rates, newer ones counting more. 0: nothing measured yet."""

    value: float = 0.0

    def add(self, value: float) -> None:
        self.value = value if not self.value else 0.7 * self.value + 0.3 * value


@frozen
class Trial:
    """One codec on one sample: bytes in by bytes out, and bytes decoded a second by one thread."""

    ratio: float
    decode: float


def trial(sample: Buffer, level: int) -> Trial:
    frame, target = seekable.compressor(level).compress(sample), memoryview(bytearray(len(memoryview(sample))))
    best = min(timed(frame, target) for _ in range(3))
    return Trial(len(target) / len(frame), len(target) / best)


def timed(frame: bytes, target: memoryview) -> float:
    start = time.perf_counter()
    seekable.decompress(frame, target)
    return max(time.perf_counter() - start, 1e-9)


def quicker(store: Trial, zstd: Trial, read: float) -> Literal["zstd", "store"]:
    """Which is restored sooner, reading `read` bytes a second while frames are decoded. Not known: store."""
    if not read:
        return "store"
    seconds = {
        name: max(1 / (one.ratio * read), 1 / (one.decode * DECODERS))
        for name, one in (("store", store), ("zstd", zstd))
    }
    return "zstd" if seconds["zstd"] < WORTH * seconds["store"] else "store"


@define
class Chooser:
    """Gives each file its compressor. For the writer's thread, but for `read`, which readers add to."""

    codec: Codec
    read: Mean
    chosen: str = ""
    _trials: tuple[Trial, Trial] | None = None

    def pick(self, sample: Buffer) -> Compress:
        self.chosen = self.codec if self.codec != "auto" else self._measured(sample)
        return seekable.compressor(LEVELS[self.chosen])

    def _measured(self, sample: Buffer) -> str:
        if not self.read.value:
            return "store"
        if self._trials is None:
            self._trials = (trial(sample, LEVELS["store"]), trial(sample, LEVELS["zstd"]))
        return quicker(*self._trials, self.read.value)

"""Chooses how rows are compressed. `zstd` makes smaller files; `store` is for disks that are faster than decoding."""

from __future__ import annotations

from typing import Literal, TypeAlias

from attrs import define

from adapters.processors import count_processors
from adapters.store.files import plain_frames, seekable
from adapters.store.files.seekable import Compress

Fixed: TypeAlias = Literal["zstd", "store"]
Codec: TypeAlias = Literal["auto"] | Fixed
CODECS: tuple[Fixed, ...] = ("store", "zstd")
ZSTD_LEVEL = 1
# Pieces that are read and decoded at the same time. Two for each core: while one waits for the disk, another is
# decoded.
DECODERS = max(4, min(16, 2 * count_processors()))
# Ratios of restore times are in thousandths, zstd files to plain ones.
EQUAL_RATIO = 1000  # both kinds of files are restored as quickly
REQUIRED_RATIO = 900  # `auto` takes zstd below this ratio; a smaller gain is not worth the processor time
SLOW_RATIO = 1200  # above this ratio the log names the option


def compute_ratio(store: int, zstd: int) -> int:
    """Return how long zstd files take against plain ones, in thousandths. 0 where either time is not known (0)."""
    return max(1, EQUAL_RATIO * zstd // store) if store and zstd else 0


def choose_codec(ratio: int) -> Fixed:
    """Choose for `auto` by what `compute_ratio` returned. Where nothing is known, it is `store`."""
    return "zstd" if 0 < ratio < REQUIRED_RATIO else "store"


def create_compressor(codec: Fixed) -> Compress:
    """Return a compressor for the frames of a file. `store` decodes at the speed of memory."""
    return plain_frames.create_plain_compressor() if codec == "store" else seekable.create_compressor(ZSTD_LEVEL)


@define
class CodecChooser:
    """Makes the compressor of each file. measured_choice: the choice of `auto`, known before the first request."""

    codec: Codec
    measured_choice: Fixed = "store"

    @property
    def choice(self) -> Fixed:
        return self.measured_choice if self.codec == "auto" else self.codec

    def create_compressor(self) -> Compress:
        return create_compressor(self.choice)

"""How rows are compressed: `zstd` makes smaller files and is the default, `store` is for disks that outrun decoding."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

from attrs import define

from adapters.store.files import seekable
from adapters.store.files.seekable import Compress

Fixed: TypeAlias = Literal["zstd", "store"]
Codec: TypeAlias = Literal["auto"] | Fixed
LEVELS: dict[Fixed, int] = {"store": -5, "zstd": 1}  # -5 leaves KV as it is and decodes at the speed of memory
# Pieces that are read and decoded at once. Two for each core: while one waits for the disk, another is decoded.
DECODERS = max(4, min(16, 2 * (os.cpu_count() or 1)))
ALIKE = 1000  # thousandths: both kinds of files are restored as quickly
WORTH = 900  # thousandths: `auto` takes zstd where it is restored in less of the time; less is not worth the processor
SLOW = 1200  # thousandths: where zstd takes more, the log names the option


def compared(store: int, zstd: int) -> int:
    """Return how long zstd files take against plain ones, in thousandths. 0 where either time is not known (0)."""
    return max(1, ALIKE * zstd // store) if store and zstd else 0


def quicker(ratio: int) -> Fixed:
    """Return what `auto` chooses by `compared`. Where nothing is known, it is store."""
    return "zstd" if 0 < ratio < WORTH else "store"


@define
class Chooser:
    """Gives each file its compressor. quicker: what `auto` comes to, before anybody is served."""

    codec: Codec
    quicker: Fixed = "store"

    @property
    def chosen(self) -> Fixed:
        return self.quicker if self.codec == "auto" else self.codec

    def compressor(self) -> Compress:
        return seekable.compressor(LEVELS[self.chosen])

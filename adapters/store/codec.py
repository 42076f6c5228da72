"""How rows are compressed: smaller files are only worth it where they are restored sooner, decoding included."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

from attrs import define

from adapters.store import seekable
from adapters.store.seekable import Compress

Fixed: TypeAlias = Literal["zstd", "store"]
Codec: TypeAlias = Literal["auto"] | Fixed
LEVELS: dict[Fixed, int] = {"store": -5, "zstd": 1}  # -5 leaves KV as it is and decodes at the speed of memory
DECODERS = max(2, min(16, os.cpu_count() or 1))  # pieces that are read and decoded at once
WORTH = 0.9  # of the time: less of a gain is not worth the processor


def quicker(store: int, zstd: int) -> Fixed:
    """By the times that the same rows take to be restored either way. 0, not known: store."""
    return "zstd" if store and 0 < zstd < WORTH * store else "store"


@define
class Chooser:
    """Gives each file its compressor. quicker: what `auto` comes to, measured before anybody is served."""

    codec: Codec
    quicker: Fixed = "store"

    @property
    def chosen(self) -> Fixed:
        return self.quicker if self.codec == "auto" else self.codec

    def compressor(self) -> Compress:
        return seekable.compressor(LEVELS[self.chosen])

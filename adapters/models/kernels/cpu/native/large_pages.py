"""Host memory for weights in large pages, where the system gives them.

A step reads every weight once, and large pages need far fewer address translations.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from adapters.process_memory import map_memory

PAGE = 2 << 20  # bytes of a large page
TOGETHER = 16 * PAGE  # bytes that are mapped together; pages that are never written take no memory
LINE = 64  # bytes of a cache line, at which weights begin


@define(eq=False)
class LargePages:
    """An allocator that places weights one behind the other. A part goes back to the system when all weights in it
    are gone.
    """

    _part: mmap.mmap | None = field(init=False, default=None)
    _used: int = field(init=False, default=0)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor with a storage of its own, of no more bytes than the tensor has."""
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // LINE) * LINE
        if not count or not self._has_room(size):
            return torch.empty(*shape, dtype=dtype)
        found = torch.frombuffer(self._part, dtype=dtype, count=count, offset=self._used).view(*shape)
        self._used += size
        return found

    def _has_room(self, size: int) -> bool:
        """Return whether there is room for this many bytes, after mapping a new part where needed."""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return False
        if self._part is None or self._used + size > len(self._part):
            asked = max(TOGETHER, -(-size // PAGE) * PAGE)
            try:
                self._part = map_memory(asked)
                self._used = 0
            except MemoryError:
                return False
        return True

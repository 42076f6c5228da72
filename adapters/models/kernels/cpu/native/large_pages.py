"""Host memory for weights, in large pages where the system gives them: a step reads every weight once, and looks up far
fewer addresses so.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from attrs import define, field
from torch import Tensor

from adapters.process_memory import mapped

PAGE = 2 << 20  # of the large ones
TOGETHER = 16 * PAGE  # what is asked of the system at once: pages that nobody writes to take no memory
LINE = 64  # of a cache: where weights begin


@define(eq=False)
class LargePages:
    """Weights lie behind each other in it. A part of it goes back to the system when all that lie there are gone."""

    _part: mmap.mmap | None = field(init=False, default=None)
    _used: int = field(init=False, default=0)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """What is in it is not said. A storage of its own, of no more bytes than it has."""
        count = math.prod(shape)
        size = -(-count * dtype.itemsize // LINE) * LINE
        if not count or not self._holds(size):
            return torch.empty(*shape, dtype=dtype)
        found = torch.frombuffer(self._part, dtype=dtype, count=count, offset=self._used).view(*shape)
        self._used += size
        return found

    def _holds(self, size: int) -> bool:
        """Is there room for so many bytes, or could it be made?"""
        if not hasattr(mmap, "MADV_HUGEPAGE"):
            return False
        if self._part is None or self._used + size > len(self._part):
            asked = max(TOGETHER, -(-size // PAGE) * PAGE)
            try:
                self._part, self._used = mapped(asked), 0
            except MemoryError:
                return False
        return True

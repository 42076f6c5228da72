"""The interface through which shards, drafts and packings read tensors by name."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """Where a shard gets its tensors from, by their Hugging Face names."""

    def read(self, name: str) -> Tensor:
        """The tensor `name` in any floating dtype on any device; the shard casts and moves it."""
        ...

"""The interface through which shards, drafts and packings read tensors by name."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class WeightSource(Protocol):
    """A source of tensors for shards, by their Hugging Face names."""

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`, in any floating dtype and on any device. The shard casts and moves it."""
        ...

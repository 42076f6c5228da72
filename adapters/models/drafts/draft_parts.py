"""What a draft is made of: its tensors, what is known of its rows, and what of it is beside the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.rope import Rotary
from adapters.models.decoder.shard import BUCKETS
from adapters.models.kernels.step import Step


@frozen(kw_only=True)
class DraftPlacement:
    """Where a draft is built, and how much room it has.

    capacity: rows of a slot. buckets: the row counts that `CachedDraft.extend` accepts and proposals are padded to.
    """

    device: torch.device = field(default=torch.device("cpu"), converter=torch.device)
    dtype: torch.dtype = torch.float32
    slots: int = 4
    capacity: int = 8192
    buckets: Sequence[int] = BUCKETS


class DraftWeights(WeightSource, Protocol):
    """Where a draft gets its tensors from, by their published names."""

    def has(self, name: str) -> bool: ...

    def digest(self) -> str:
        """Identifies the weights."""
        ...


class DraftShape(Protocol):
    """Of its rows, and of what its target must share with it."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def rotary(self) -> Rotary: ...

    @property
    def aux_layers(self) -> tuple[int, ...]: ...

    @property
    def block(self) -> int: ...

    def row_facts(self) -> tuple[object, ...]: ...

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int: ...


class Projection(Protocol):
    """The part of a draft that is beside its target, where the rest is in another process: of all that the target's
    auxiliary layers leave, what `CachedDraft.take` needs, D values a row. It comes and goes with the draft's weights.
    """

    @property
    def numbers(self) -> str:
        """What its bits depend on."""
        ...

    def features(self, step: Step, aux_hidden_states: Mapping[int, Tensor]) -> Tensor:
        """`[bucket, D]`; it may be a static buffer."""
        ...

    def offload(self) -> int: ...

    def load_back(self) -> int: ...

    def release(self) -> None: ...

    def memory(self) -> Mapping[str, int]:
        """Bytes: `weights`, `host` and `buffers`."""
        ...

"""Interfaces of a draft's parts: its tensors, its shape, and the projection that runs in the target's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from attrs import field, frozen
from torch import Tensor

from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.shard import BUCKETS
from adapters.models.kernels.step import Step

# Launches the picks of a draft step, the first of which is 0, and returns them: from float32 logits `[R, V]` one token
# for each row, int64 `[R]` on the same device. The host does not wait.
LaunchPicks: TypeAlias = Callable[[Tensor, int], Tensor]


@frozen(kw_only=True)
class DraftPlacement:
    """The device of a draft and its room.

    capacity: rows of a slot. buckets: the row counts that `CachedDraft.extend` accepts and proposals are padded to.
    """

    device: torch.device = field(default=torch.device("cpu"), converter=torch.device)
    dtype: torch.dtype = torch.float32
    slots: int = 4
    capacity: int = 8192
    buckets: Sequence[int] = BUCKETS


class DraftWeights(WeightSource, Protocol):
    """A source of a draft's tensors, by their published names."""

    def has_tensor(self, name: str) -> bool: ...

    def digest(self) -> str:
        """Return a text that identifies the weights."""
        ...


class DraftShape(Protocol):
    """The shape of a draft's rows, and the sizes that its target must share."""

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
    """The part of a draft that runs in the target's process when the rest runs in another one.

    It reduces the outputs of the target's auxiliary layers to D values a row, which `CachedDraft.extend_projected`
    takes. So only D values a row cross between the processes. It is loaded and offloaded with the draft's weights.
    """

    @property
    def bit_signature(self) -> str:
        """A text that names everything on which the bits of the result depend, besides the weights."""
        ...

    def project(self, step: Step, aux_hidden_states: Mapping[int, Tensor]) -> Tensor:
        """Return the features of the step's rows, `[bucket, D]`. The result may be a static buffer."""
        ...

    def offload(self) -> int: ...

    def load_back(self) -> int: ...

    def release(self) -> None: ...

    def memory(self) -> Mapping[str, int]:
        """Return bytes by use: `weights`, `host` and `buffers`."""
        ...

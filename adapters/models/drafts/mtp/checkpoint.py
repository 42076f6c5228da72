"""A model's prediction head in its checkpoint: `mtp.*`, as published Qwen3.5 models have it; other heads are refused.

Everything is checked against the headers before a byte of weights is allocated.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.safetensors_folder import Shapes, StoredTensor, check_tensors, digest_tensors
from adapters.models.decoder.decoder_layer import layer_tensors
from adapters.models.decoder.family import HeadShape
from adapters.models.decoder.rope import Rotary
from adapters.models.open_checkpoint import Checkpoint

PREFIX = "mtp."
LAYER = "mtp.layers.0."
# One more than the most proposals. A head is asked once for each of them, and the further it goes on from what it said
# itself, the less it is right: of the shipped one's, each is taken in about two of three cases where those before were.
BLOCK = 8


@frozen
class HeadConfig:
    """layer: of the head, which is one of the target's own kind. target_layers: how many the target has."""

    layer: HeadShape
    target_layers: int

    num_layers = 1
    block = BLOCK

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def num_kv_heads(self) -> int:
        return self.layer.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.layer.head_dim

    @property
    def rotary(self) -> Rotary:
        return self.layer.rotary

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The last one: the head goes on from where the target stops."""
        return (self.target_layers - 1,)

    def row_facts(self) -> tuple[object, ...]:
        """Besides weights, all that the numbers of a context row depend on."""
        return (PREFIX, self.rotary, self.layer.rms_norm_eps, self.num_kv_heads)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


def head_tensors(shape: HeadShape) -> Shapes:
    """Published names and shapes."""
    hidden = shape.hidden_size
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **dict.fromkeys(norms, (hidden,)),
        **layer_tensors(shape, LAYER),
    }


@frozen
class HeadCheckpoint:
    """A validated head. `open` reads headers only; `read` reads one tensor, named as published."""

    folder: Path
    config: HeadConfig
    tensors: Mapping[str, StoredTensor]

    @classmethod
    def open(cls, target: Checkpoint) -> HeadCheckpoint:
        """Raises CheckpointError, one line, where the target's checkpoint has none that can be run."""
        instead = "accepted: none, or the folder of a DFlash draft"
        if target.family.head_shape is None:
            kind = target.family.model_type
            raise CheckpointError(f"mtp: models of type {kind!r} have no prediction head of their own; {instead}")
        tensors = {name: entry for name, entry in target.others.items() if name.startswith(PREFIX)}
        if not tensors:
            raise CheckpointError(f"mtp: {target.folder} has no prediction head (tensors mtp.*); {instead}")
        shape = target.family.head_shape(target.config)
        check_tensors(target.folder, tensors, head_tensors(shape), "a prediction head of one layer")
        return cls(target.folder, HeadConfig(shape, target.config.num_layers), tensors)

    def read(self, name: str) -> Tensor:
        """One tensor, as stored, on the host."""
        return self.tensors[name].read(name)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def digest(self) -> str:
        """Identifies the weights, as `digest_of` does."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_tensors(self.tensors)

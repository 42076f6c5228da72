"""Opens a model's prediction head in the model's own checkpoint: tensors `mtp.*`, as in published Qwen3.5 models.

Other heads are refused. Everything is checked against the headers before weights are allocated.
"""

from __future__ import annotations

from pathlib import Path

import torch
from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.safetensors_folder import Shapes, check_expected_tensors
from adapters.models.decoder.config.deepseek_names import HEAD_PREFIX
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.family import USUAL_INPUTS, HeadInputs, HeadShape
from adapters.models.decoder.layers.attention_layer import list_attention_tensors
from adapters.models.drafts.stored_tensors import StoredTensors
from adapters.models.open_checkpoint import Checkpoint

PREFIX = HEAD_PREFIX
LAYER = "mtp.layers.0."
# One more than the most proposals. The head runs once for each proposal, and later proposals build on earlier ones.
# The shipped head's proposals are each accepted in about two of three cases if those before were accepted.
BLOCK = 8


@frozen
class HeadConfig:
    """A prediction head. layer: the shape of its layer, which is of the target's own kind. inputs: what it joins."""

    layer: HeadShape
    target_layers: int
    inputs: HeadInputs = USUAL_INPUTS

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
        """The target's last layer: the head continues from the target's final hidden state."""
        return (self.target_layers - 1,)

    def row_facts(self) -> tuple[object, ...]:
        """Return everything besides the weights on which the numbers of a context row depend."""
        latent = () if self.layer.latent is None else (self.layer.latent,)
        return (PREFIX, self.rotary, self.layer.rms_norm_eps, self.num_kv_heads, *latent)

    @property
    def parts(self) -> int:
        """Return the parts of a context row: keys and values, or one that is both."""
        return 2 if self.layer.latent is None else 1

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.parts * self.num_kv_heads * self.head_dim * dtype.itemsize


def list_head_tensors(shape: HeadShape) -> Shapes:
    """Return the published names and shapes of the head's tensors."""
    hidden = shape.hidden_size
    norms = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
    return {
        "mtp.fc.weight": (hidden, 2 * hidden),
        **dict.fromkeys(norms, (hidden,)),
        **list_attention_tensors(shape, LAYER),
    }


@frozen
class HeadCheckpoint(StoredTensors):
    """A validated head. `open` reads headers only; `read` reads one tensor, named as published."""

    folder: Path
    config: HeadConfig

    @classmethod
    def open(cls, target: Checkpoint) -> HeadCheckpoint:
        """Open the head of a checkpoint. Raises CheckpointError, one line, if it has none that can run."""
        instead = "accepted: none, or the folder of a draft"
        if target.family.head_shape is None:
            kind = target.family.model_type
            raise CheckpointError(f"mtp: models of type {kind!r} have no prediction head of their own; {instead}")
        tensors = {name: entry for name, entry in target.others.items() if name.startswith(PREFIX)}
        if not tensors:
            raise CheckpointError(f"mtp: {target.folder} has no prediction head (tensors mtp.*); {instead}")
        shape = target.family.head_shape(target.config)
        check_expected_tensors(target.folder, tensors, list_head_tensors(shape), "a prediction head of one layer")
        config = HeadConfig(shape, target.config.num_layers, target.family.head_inputs)
        return cls(folder=target.folder, config=config, tensors=tensors)

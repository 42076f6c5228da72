"""Checks of what a shard is asked: to be built, and to run a step. Used by `DenseShard`."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from adapters.models.decoder.config.dense_config import DenseConfig
from adapters.models.decoder.layers.tree_attention import check_tree
from adapters.models.decoder.shard import ShardPlacement
from adapters.models.kernels.step import Step


def check_arguments(config: DenseConfig, layers: range, placement: ShardPlacement) -> None:
    """Raise ValueError for a shard of these layers that cannot be built."""
    slots = placement.slots
    capacity = placement.capacity
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= config.num_layers:
        raise ValueError(f"{layers} is not a run of the model's {config.num_layers} layers")
    if slots < 1 or not 1 <= capacity <= config.max_positions:
        raise ValueError(f"{slots} slots of {capacity} rows; accepted: at least 1 of 1..{config.max_positions}")
    if not placement.buckets or any(bucket < 1 for bucket in placement.buckets):
        raise ValueError(f"buckets {tuple(placement.buckets)} are not positive row counts")
    if any(not 0 <= layer < config.num_layers for layer in placement.aux_layers):
        raise ValueError(f"aux_layers {tuple(placement.aux_layers)}: not all in 0..{config.num_layers - 1}")


def check_step(step: Step, inputs: Tensor, expected: tuple[int, ...], buckets: Sequence[int]) -> None:
    """Raise ValueError for a step that a forward cannot run. expected: the shape of its inputs."""
    if step.bucket not in buckets:
        raise ValueError(f"bucket {step.bucket} is not one of {tuple(buckets)}")
    if not 0 < step.rows <= step.bucket or inputs.shape != expected:
        raise ValueError(f"{step.rows} rows at bucket {step.bucket} do not go with inputs {tuple(inputs.shape)}")
    if len({part[0].slot for part in step.parts}) != len(step.parts):
        raise ValueError("a slot appears twice in one step")
    if step.branches:
        for part in step.parts:
            check_tree(part)

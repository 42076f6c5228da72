"""Tests of the ways in which the weights of a shard are read and checked."""

from __future__ import annotations

import pytest
import torch

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.finite_check import check_finite
from adapters.models.open_checkpoint import Checkpoint
from adapters.store.slab_memory import SlabMemory
from engine.loading.load_shards import stage_weights


def test_weights_that_are_not_finite_are_told_of_when_all_have_been_read() -> None:
    """The device is not waited for after each tensor, so an error is raised when all have been read."""
    checkpoint, read = Checkpoint.open(demo.FOLDERS["demo"]), list[str]()

    def load() -> None:
        with stage_weights(checkpoint, [], SlabMemory(), torch.bfloat16):
            for name, value in (("one", float("nan")), ("other", 1.0)):
                check_finite(torch.tensor([value]), "file", name)
                read.append(name)

    with pytest.raises(CheckpointError, match="file: one has values that are no numbers, or infinite"):
        load()
    assert read == ["one", "other"]
    with pytest.raises(CheckpointError, match="third"):
        check_finite(torch.tensor([float("inf")]), "file", "third")

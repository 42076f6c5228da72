"""Opens the folder of a Gemma 4 assistant: config.json and safetensors files, as published.

Everything is checked against the headers of the files and against the target before weights are allocated.
"""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_json
from adapters.checkpoint.safetensors_folder import check_expected_tensors, scan_tensors
from adapters.models.decoder.family import ModelConfig
from adapters.models.drafts.assistant.config import (
    TYPES,
    AssistantConfig,
    list_assistant_tensors,
    parse_assistant,
)
from adapters.models.drafts.stored_tensors import StoredTensors
from adapters.models.families import gemma4

# The head is the embedding. Centroids choose the part of the vocabulary that is scored; here, all of it is.
_IGNORED = ("lm_head.weight", "masked_embedding.centroids.weight", "masked_embedding.token_ordering")


def is_assistant(folder: Path) -> bool:
    """Return whether a folder says that it holds an assistant. A folder that cannot be read is none."""
    try:
        return read_json(folder / "config.json").get("model_type") in TYPES
    except CheckpointError:
        return False


@frozen
class AssistantCheckpoint(StoredTensors):
    """An opened, validated assistant. `open` reads headers only; `read` reads one tensor, named as published."""

    folder: Path
    config: AssistantConfig

    @classmethod
    def open(cls, folder: Path, target: ModelConfig) -> AssistantCheckpoint:
        """Open an assistant for `target`. Raises CheckpointError, one line, if the folder has none that fits."""
        try:
            config = parse_assistant(read_json(folder / "config.json"), target)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None
        expected = list_assistant_tensors(config)
        tensors = {
            name: entry
            for name, entry in scan_tensors(folder).items()
            if name not in _IGNORED and (name in expected or not gemma4.is_unused(name))
        }
        check_expected_tensors(folder, tensors, expected, f"a {config.layers.num_layers}-layer assistant")
        return cls(folder=folder, config=config, tensors=tensors)

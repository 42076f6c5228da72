"""The text files of a checkpoint as one object, whether they come from a folder or from a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen


@frozen
class TextContent:
    """The text files of a checkpoint.

    tokenizer: the content of tokenizer.json.
    settings: the content of tokenizer_config.json, or {}.
    generation: the content of generation_config.json, or {}.
    """

    tokenizer: Mapping[str, Any]
    settings: Mapping[str, Any]
    generation: Mapping[str, Any]
    end_tokens: tuple[int, ...]
    template: str | None

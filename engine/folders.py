"""Where the model is, and where things are kept that a start can find again."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_dir

from adapters import demo
from engine.options import Options


def user_folder() -> Path:
    return Path(user_cache_dir("rekindle", appauthor=False))


def cache_folder() -> Path:
    """Of the prefix cache, unless somebody chose another."""
    return user_folder() / "kv"


def model_folder(options: Options) -> Path:
    """Or its GGUF file."""
    return demo.FOLDERS.get(options.model) or Path(options.model)

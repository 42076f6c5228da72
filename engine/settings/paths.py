"""Where the model is, and where things are kept that a start can find again."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_dir

from adapters import demo
from engine.settings.options import Options

OWN = "mtp"  # in the place of a draft's folder: the model's own prediction head
SHIPPED = {"demo": str(demo.FOLDER / "draft"), "demo-hybrid": OWN}
"""What `auto` takes for models that come with a draft."""


def user_folder() -> Path:
    return Path(user_cache_dir("rekindle", appauthor=False))


def cache_folder() -> Path:
    """Of the prefix cache, unless somebody chose another."""
    return user_folder() / "kv"


def model_folder(options: Options) -> Path:
    """Or its GGUF file."""
    return demo.FOLDERS.get(options.model) or Path(options.model)


def draft_name(asked: str, model: str) -> str:
    """Its folder, OWN or none. asked: as `--draft` has it."""
    return SHIPPED.get(model, "none") if asked == "auto" else asked


def weight_folders(options: Options) -> tuple[Path, ...]:
    """Of the model, and of a draft that has one."""
    draft = draft_name(options.draft, options.model)
    return (model_folder(options), *(() if draft in {"none", OWN} else (Path(draft),)))

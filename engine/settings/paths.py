"""Finds the model, and the folders for files that a later start reads again."""

from __future__ import annotations

from pathlib import Path

from platformdirs import user_cache_dir

from adapters import demo
from engine.settings.model_options import ModelOptions
from engine.settings.options import Options

# The value of `--draft` for the model's own prediction head.
OWN = "mtp"
# The value of `--draft` for copies of earlier text, alone or joined to another value by a plus sign.
SUFFIX = "suffix"
# The value of `--draft` that leaves the choice to the server.
AUTO = "auto"
SHIPPED = {"demo": str(demo.FOLDER / "draft"), "demo-hybrid": OWN}
"""What `auto` takes for models that come with a draft."""


def find_user_folder() -> Path:
    return Path(user_cache_dir("rekindle", appauthor=False))


def find_cache_folder() -> Path:
    """Return the folder of the prefix cache, unless an option names another."""
    return find_user_folder() / "kv"


def find_model_folder(model: ModelOptions) -> Path:
    """Return the folder of the model, or its GGUF file."""
    return demo.FOLDERS.get(model.model) or Path(model.model)


def choose_draft_name(asked: str, model: str) -> str:
    """Return the draft's folder, OWN or `none`. asked: the value of `--draft`."""
    name = "none" if asked == SUFFIX else asked.removesuffix(f"+{SUFFIX}")
    return SHIPPED.get(model, "none") if name == AUTO else name


def copies_text(asked: str, model: str) -> bool:
    """Return whether earlier text is copied, alone or together with a draft. asked: the value of `--draft`.

    `auto` copies for a model that comes without a draft.
    """
    return asked == SUFFIX or asked.endswith(f"+{SUFFIX}") or (asked == AUTO and model not in SHIPPED)


def list_weight_folders(options: Options) -> tuple[Path, ...]:
    """Return the folders of the model and of a draft that has one of its own."""
    draft = choose_draft_name(options.speculation.draft, options.model.model)
    return (find_model_folder(options.model), *(() if draft in {"none", OWN} else (Path(draft),)))

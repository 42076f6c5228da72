"""Finds the models on this machine in the folders of other programs, and the names that a person may use for them."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import frozen

from adapters import demo
from adapters.checkpoint.gguf.metadata import PART, derive_model_name
from engine.settings.user_error import UserError

HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
SNAPSHOT = re.compile(r"models--(?P<name>.+)")
# The most folders below ~/models, and entries of them, that are examined. A whole disk may be mounted there.
DEEP = 4
MOST = 20_000
SHIPPED = tuple(demo.FOLDERS)
NOT_A_MODEL = "mmproj"  # the beginning of the names of llama.cpp's files for images


@frozen
class LocalModel:
    """A model on this machine. name: as `rekindle serve` takes it. path: of a folder, or of the (first) GGUF file."""

    name: str
    path: Path

    @property
    def names(self) -> tuple[str, ...]:
        """The names that may mean this model, the whole name first."""
        last = self.name.rpartition("/")[2]
        return self.name, last, derive_model_name(Path(last))


def find_hub_folder(environment: Mapping[str, str]) -> Path:
    """Return where huggingface_hub keeps its downloads."""
    if folder := environment.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(environment.get("HF_HOME") or cache / "huggingface").expanduser() / "hub"


def find_own_folder() -> Path:
    return Path.home() / "models"


def list_local_models(environment: Mapping[str, str]) -> list[LocalModel]:
    """Return all models, in alphabetical order."""
    found = [*list_hub_models(find_hub_folder(environment)), *list_models_below(find_own_folder())]
    return sorted(found, key=lambda model: (model.name.lower(), model.path))


def list_hub_models(folder: Path) -> Iterator[LocalModel]:
    """Yield a model for each repository with a checkpoint, and one for each GGUF file."""
    for kept in list_entries(folder):
        if not (match := SNAPSHOT.fullmatch(kept.name)):
            continue
        name = name_repository(match)
        snapshot = find_snapshot(kept)
        if snapshot is None:
            continue
        there = list_entries(snapshot)
        if snapshot / "config.json" in there:
            yield LocalModel(name, snapshot)
        for file in list_gguf_files(there):
            yield LocalModel(f"{name}/{file.name}", file)


def find_snapshot(kept: Path) -> Path | None:
    """Return the snapshot of the branch `main`, or else the newest one."""
    snapshots = {path.name: path for path in list_entries(kept / "snapshots") if is_folder(path)}
    try:
        return snapshots[(kept / "refs" / "main").read_text(encoding="ascii").strip()]
    except (OSError, UnicodeDecodeError, KeyError):
        return max(snapshots.values(), key=lambda path: path.stat().st_mtime_ns, default=None)


def list_models_below(root: Path) -> Iterator[LocalModel]:
    """Yield folders with a config.json, and GGUF files, named by their paths below `root`."""
    waiting = [root]
    seen = 0
    while waiting:
        folder = waiting.pop()
        there = list_entries(folder)
        seen += len(there)
        if seen > MOST:
            return
        if folder != root and folder / "config.json" in there:
            yield LocalModel(str(folder.relative_to(root)), folder)
        for file in list_gguf_files(there):
            yield LocalModel(str(file.relative_to(root)), file)
        if len(folder.relative_to(root).parts) < DEEP:
            waiting += [path for path in there if not path.name.startswith(".") and is_folder(path)]


def list_gguf_files(paths: Sequence[Path]) -> Iterator[Path]:
    """Yield GGUF files. Of several that are parts of one model, only the first."""
    for path in paths:
        part = PART.fullmatch(path.name)
        if path.suffix == ".gguf" and not path.name.startswith(NOT_A_MODEL) and (part is None or int(part[2]) == 1):
            yield path


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    # The folder belongs to another user.
    except OSError:
        return False


def list_entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def find_model(name: str, models: Sequence[LocalModel]) -> Path | None:
    """Return the model that a name means: by its whole name, its last part, or that without its ending. Raises
    UserError if several match.
    """
    for level in range(3):
        for fold in (str, str.lower):
            meant = {model.path: model.name for model in models if fold(model.names[level]) == fold(name)}
            if len(meant) > 1:
                raise UserError(f"{name}: matches {', '.join(sorted(meant.values()))}; give the full name")
            if meant:
                return next(iter(meant))
    return None


def list_similar(name: str, models: Sequence[LocalModel]) -> list[str]:
    """Return names that may have been meant, the most similar first."""
    named = {name_part.lower(): model.name for model in reversed(models) for name_part in model.names}
    named |= {shipped: shipped for shipped in SHIPPED}
    close = difflib.get_close_matches(name.lower(), named, 6, 0.6)
    return list(dict.fromkeys(named[similar] for similar in close))[:3]


def choose_served_name(path: Path) -> str:
    """Return the name of a model that is served from here: its repository, folder or file. A link keeps
    its own name.
    """
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow it
    if whole.parent.name == "snapshots" and (match := SNAPSHOT.fullmatch(whole.parent.parent.name)):
        return name_repository(match)
    return derive_model_name(whole)


def name_repository(match: re.Match[str]) -> str:
    return match["name"].replace("--", "/")


def build_missing_error(name: str, models: Sequence[LocalModel]) -> str:
    """Return the error for a model that is not here, with how to get it."""
    message = f"{name}: no such folder, and no model of that name in ~/models or the Hugging Face cache"
    if close := list_similar(name, models):
        message += f"; similar: {', '.join(close)}"
    if HUB_NAME.fullmatch(name):
        command = f"`hf download {name}` (of the package huggingface_hub)"
        return f"{message}; nothing is downloaded automatically: run {command}, then serve it"
    return f"{message}; `rekindle models` lists the models here, `hf download ORG/NAME` downloads one"


def locate_model(name: str, environment: Mapping[str, str]) -> str:
    """Return where the model of a name is. A path stays as it is. Raises UserError."""
    # No shell has expanded it.
    if name.startswith("~/"):
        return str(Path(name).expanduser())
    if name.startswith(("/", ".", "~")) or Path(name).exists():
        return name
    models = list_local_models(environment)
    path = find_model(name, models)
    if path is None:
        raise UserError(build_missing_error(name, models))
    return str(path)


def complete_paths(begun: str) -> Iterator[str]:
    """Return the entries that a path may go on with."""
    folder = begun[: begun.rindex("/") + 1]
    for path in list_entries(Path(folder).expanduser()):
        if not path.name.startswith("."):
            yield f"{folder}{path.name}{'/' if is_folder(path) else ''}"

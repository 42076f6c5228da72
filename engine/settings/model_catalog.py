"""Models that are on this machine already: where other programs keep them, and how a person calls them."""

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
DEEP, MOST = (
    4,
    20_000,
)  # folders below ~/models, and entries that are looked at there: somebody's whole disk may hang there
SHIPPED = tuple(demo.FOLDERS)
NOT_A_MODEL = "mmproj"  # how llama.cpp's files for images begin


@frozen
class LocalModel:
    """name: what `rekindle serve` takes it by. path: a folder, or the (first) GGUF file."""

    name: str
    path: Path

    @property
    def names(self) -> tuple[str, ...]:
        """Closest to the whole name first."""
        last = self.name.rpartition("/")[2]
        return self.name, last, derive_model_name(Path(last))


def hub_folder(environment: Mapping[str, str]) -> Path:
    """Where huggingface_hub keeps what it has downloaded."""
    if folder := environment.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(environment.get("HF_HOME") or cache / "huggingface").expanduser() / "hub"


def own_folder() -> Path:
    return Path.home() / "models"


def local_models(environment: Mapping[str, str]) -> list[LocalModel]:
    """By name, in the order of the alphabet."""
    found = [*in_hub(hub_folder(environment)), *below(own_folder())]
    return sorted(found, key=lambda one: (one.name.lower(), one.path))


def in_hub(folder: Path) -> Iterator[LocalModel]:
    """One for each repository with a checkpoint, and one for each GGUF file."""
    for kept in entries(folder):
        if not (match := SNAPSHOT.fullmatch(kept.name)):
            continue
        name, snapshot = repository(match), current(kept)
        if snapshot is None:
            continue
        there = entries(snapshot)
        if snapshot / "config.json" in there:
            yield LocalModel(name, snapshot)
        for file in gguf_files(there):
            yield LocalModel(f"{name}/{file.name}", file)


def current(kept: Path) -> Path | None:
    """The snapshot that the branch `main` stands at, or else the newest one."""
    snapshots = {path.name: path for path in entries(kept / "snapshots") if is_folder(path)}
    try:
        return snapshots[(kept / "refs" / "main").read_text(encoding="ascii").strip()]
    except (OSError, UnicodeDecodeError, KeyError):
        return max(snapshots.values(), key=lambda path: path.stat().st_mtime_ns, default=None)


def below(root: Path) -> Iterator[LocalModel]:
    """Folders with a config.json, and GGUF files, by their paths from here."""
    waiting, seen = [root], 0
    while waiting:
        folder = waiting.pop()
        there = entries(folder)
        seen += len(there)
        if seen > MOST:
            return
        if folder != root and folder / "config.json" in there:
            yield LocalModel(str(folder.relative_to(root)), folder)
        for file in gguf_files(there):
            yield LocalModel(str(file.relative_to(root)), file)
        if len(folder.relative_to(root).parts) < DEEP:
            waiting += [path for path in there if not path.name.startswith(".") and is_folder(path)]


def gguf_files(there: Sequence[Path]) -> Iterator[Path]:
    """Of several that are one model, the first."""
    for path in there:
        part = PART.fullmatch(path.name)
        if path.suffix == ".gguf" and not path.name.startswith(NOT_A_MODEL) and (part is None or int(part[2]) == 1):
            yield path


def is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # of somebody else
        return False


def entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def find(name: str, models: Sequence[LocalModel]) -> Path | None:
    """By its whole name, by the last part of it, or by that without its ending. Raises Refusal where several could be
    meant."""
    for level in range(3):
        for fold in (str, str.lower):
            meant = {one.path: one.name for one in models if fold(one.names[level]) == fold(name)}
            if len(meant) > 1:
                raise UserError(f"{name}: could be any of {', '.join(sorted(meant.values()))}; name one in full")
            if meant:
                return next(iter(meant))
    return None


def similar(name: str, models: Sequence[LocalModel]) -> list[str]:
    """What else may have been meant, likest first."""
    named = {each.lower(): one.name for one in reversed(models) for each in one.names}
    named |= {each: each for each in SHIPPED}
    close = difflib.get_close_matches(name.lower(), named, 6, 0.6)
    return list(dict.fromkeys(named[each] for each in close))[:3]


def served_name(path: Path) -> str:
    """What a model is called that is served from here: its repository, or its folder or file. A link has its own name:
    what it leads to in the hub's folder is called by its digest."""
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - resolve() would follow it
    if whole.parent.name == "snapshots" and (match := SNAPSHOT.fullmatch(whole.parent.parent.name)):
        return repository(match)
    return derive_model_name(whole)


def repository(match: re.Match[str]) -> str:
    return match["name"].replace("--", "/")


def missing(name: str, models: Sequence[LocalModel]) -> str:
    """How to come by a model that is not here."""
    told = f"{name}: no such folder, and no model of that name in ~/models or the Hugging Face cache"
    if close := similar(name, models):
        told += f"; similar: {', '.join(close)}"
    if HUB_NAME.fullmatch(name):
        return (
            f"{told}; nothing is downloaded here: `hf download {name}` (of the package huggingface_hub), then serve it"
        )
    return f"{told}; `rekindle models` lists what there is, `hf download ORG/NAME` gets another"


def located(name: str, environment: Mapping[str, str]) -> str:
    """Where a model is that is called by its name; what is a path stays one. Raises Refusal."""
    if name.startswith("~/"):  # no shell has read it
        return str(Path(name).expanduser())
    if name.startswith(("/", ".", "~")) or Path(name).exists():
        return name
    models = local_models(environment)
    path = find(name, models)
    if path is None:
        raise UserError(missing(name, models))
    return str(path)


def paths(begun: str) -> Iterator[str]:
    """What there is in the folder of a path that somebody has begun to type, as it would go on."""
    folder = begun[: begun.rindex("/") + 1]
    for path in entries(Path(folder).expanduser()):
        if not path.name.startswith("."):
            yield f"{folder}{path.name}{'/' if is_folder(path) else ''}"

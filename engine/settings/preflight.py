"""What can be seen to be wrong before torch is imported, which takes most of a start's time. Nothing stays changed."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from attrs import evolve

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.config_fields import read_json
from adapters.checkpoint.gguf.header import is_gguf
from adapters.checkpoint.gguf.metadata import read_metadata
from adapters.checkpoint.quantised.quantisation_config import find_quantisation
from adapters.http.wire.address import bind_listener
from adapters.models import ARCHITECTURES, FAMILIES
from adapters.store.files.private_folder import LOCK, Folder, FolderUnusable, check_private
from effects.scope import parse_scope
from engine.settings.model_catalog import located
from engine.settings.options import Options
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")
CHECKPOINT = (
    "accepted: a folder with a Hugging Face checkpoint (config.json, tokenizer.json, *.safetensors), or a GGUF file"
)
DRAFTS = ("auto", "mtp", "none")
MOST_KEYS = 1 << 20  # bytes of --api-key-file


def prepared(options: Options) -> Options:
    """The options, with the keys that a file holds. Raises Refusal."""
    if options.model not in demo.FOLDERS:
        options = evolve(options, model=located(options.model, os.environ))
        check_model(options.model)
    if options.draft not in DRAFTS and not Path(options.draft).is_dir():
        raise UserError(
            f"--draft {options.draft}: no such folder; accepted: one with a DFlash draft, {', '.join(DRAFTS)}"
        )
    if options.draft_device and options.draft == "none":
        raise UserError(f"--draft-device {options.draft_device} is for a draft, and --draft none asks for none")
    if options.trace is not None:
        check_trace(options.trace)
    if options.kv_cache_dir is not None and parse_scope(options.disk_prefix_cache).kind != "off":
        check_cache(options.kv_cache_dir)
    if options.api_key_file is None:
        return options
    return evolve(options, api_key=(*options.api_key, *read_keys(options.api_key_file)))


def check_address(options: Options) -> None:
    """Had for a moment: a server that is there already is a common fault, and else told of behind all imports."""
    try:
        bind_listener(options.host, options.port).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that could be looked up
        raise unheard(options, error) from error


def unheard(options: Options, error: OSError | UnicodeError) -> UserError:
    where = f"{options.host}:{options.port} (--host, --port)"
    another = "; --port 0 takes one that is free" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
    why = (getattr(error, "strerror", None) or str(error)).lower()
    return UserError(f"cannot listen on {where}: {why}{another}")


def check_model(name: str) -> None:
    path = Path(name)
    if not path.exists():
        raise UserError(f"{name}: no such {'file' if path.suffix == '.gguf' else 'folder'}; {CHECKPOINT}")
    if not path.is_dir():
        if not is_gguf(path):
            raise UserError(f"{name}: is a file; {CHECKPOINT}")
        check_gguf(path)
        return
    raw = read_config(path)
    try:
        find_quantisation(raw)
    except CheckpointError as error:
        raise UserError(f"{path}: {error}") from error
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        accepted = ", ".join(map(repr, FAMILIES))
        raise UserError(f"{path}: config.json: model_type {repr(kind)[:80]} is not supported; accepted: {accepted}")


def check_gguf(path: Path) -> None:
    """Its header alone: the type of every tensor, and which architecture it is."""
    try:
        kind = read_metadata(path).architecture
    except CheckpointError as error:
        raise UserError(str(error)) from error
    if kind not in ARCHITECTURES:
        accepted = ", ".join(map(repr, ARCHITECTURES))
        raise UserError(f"{path}: general.architecture {describe_value(kind)} is not supported; accepted: {accepted}")


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        gguf = min(folder.glob("*.gguf"), default=None)
        instead = "" if gguf is None else f"; a GGUF file is served by its own name, such as {gguf}"
        raise UserError(f"{folder}: config.json is missing{instead}; {CHECKPOINT}")
    try:
        return read_json(path)
    except CheckpointError as error:
        raise UserError(str(error)) from error


def check_trace(path: Path) -> None:
    """A trace that is there stays as it is until the model is loaded."""
    try:
        there, folder = path.exists(), path.parent.is_dir()
    except OSError as error:  # a name that is too long
        raise UserError(f"--trace {path}: {error.strerror}") from error
    if path.is_dir():
        raise UserError(f"--trace {path}: is a folder; accepted: a file that can be written")
    if not folder:
        raise UserError(f"--trace {path}: there is no folder {path.parent}")
    if not os.access(path if there else path.parent, os.W_OK):
        raise UserError(f"--trace {path}: permission denied")


def check_cache(path: Path) -> None:
    """As it will be opened: ours alone, and nobody's at the moment."""
    try:
        if not os.path.lexists(path):
            check_parent(path)
            return
        Folder.look(path).close()
        check_private(path, path.stat())
        check_unlocked(path)
        check_writable(path)
    except FolderUnusable as error:
        raise UserError(f"--kv-cache-dir {error}") from error
    except OSError as error:
        raise UserError(f"--kv-cache-dir {path}: {error.strerror}") from error


def check_parent(path: Path) -> None:
    """It will be made, with what is missing above it: made for a moment, since rights alone do not say (`/proc`)."""
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        raise FolderUnusable(f"{path}: {above} is not a folder")
    missing = [one for one in reversed((path.absolute(), *path.absolute().parents)) if not os.path.lexists(one)]
    made = list[Path]()
    try:
        for folder in missing:
            folder.mkdir(mode=0o700)
            made.append(folder)
        check_writable(path)
    except OSError as error:
        raise FolderUnusable(f"{path}: cannot be made: {(error.strerror or str(error)).lower()}") from error
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # somebody else has put something into it
                folder.rmdir()


def check_writable(folder: Path) -> None:
    """A file is made for a moment: rights alone do not say."""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise FolderUnusable(f"{folder}: nothing can be made in it: {why}") from error


def check_unlocked(path: Path) -> None:
    lock = path / LOCK
    if not lock.is_file() or lock.is_symlink():
        return
    descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FolderUnusable(f"{path}: another process is using this cache folder") from None
    finally:
        os.close(descriptor)


def read_keys(path: Path) -> tuple[str, ...]:
    """One a line; empty lines and white space around a key do not count."""
    flag = f"--api-key-file {path}"
    try:
        with path.open("rb") as file:
            about, data = os.fstat(file.fileno()), file.read(MOST_KEYS + 1)
    except OSError as error:
        raise UserError(f"{flag}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > MOST_KEYS:
        raise UserError(f"{flag}: larger than {MOST_KEYS >> 10} KiB; accepted: one key a line")
    keys = tuple(line.strip().decode("ascii", "replace") for line in data.splitlines() if line.strip())
    if not keys:
        raise UserError(f"{flag}: holds no key; accepted: one key a line")
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable():
            raise UserError(f"{flag}: key {number} is not printable ASCII")
    if stat.S_ISREG(about.st_mode) and about.st_mode & 0o077:
        log.warning("%s: others may read it; `chmod 600` it", flag)
    return keys

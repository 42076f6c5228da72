"""Finds mistakes before torch is imported, which takes most of a start. The checks change nothing."""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import logging
import os
import stat
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from adapters import demo
from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import read_json
from adapters.checkpoint.gguf.header import is_gguf
from adapters.checkpoint.gguf.metadata import read_metadata
from adapters.checkpoint.quantised.quantisation_config import find_quantisation
from adapters.http.wire.address import bind_listener
from adapters.models import ARCHITECTURES, FAMILIES
from adapters.models.explain_refusal import explain_refused_architecture, explain_refused_type
from adapters.store.files.private_folder import LOCK, FolderUnusable, PrivateFolder, check_private
from adapters.store.shared.store_url import INSTALL
from engine.settings.model_catalog import locate_model
from engine.settings.options import Options, evolve_options
from engine.settings.paths import choose_draft_name
from engine.settings.server_options import HttpOptions
from engine.settings.user_error import UserError

log = logging.getLogger("rekindle")
CHECKPOINT = (
    "accepted: a folder with a Hugging Face checkpoint (config.json, tokenizer.json, *.safetensors), or a GGUF file"
)
DRAFTS = ("auto", "mtp", "none")
COPIES = "suffix, or one of these and +suffix"
MOST_KEYS = 1 << 20  # bytes of --api-key-file


def prepare_options(options: Options) -> Options:
    """Return the options with the path of the model and the keys of a file. Raises UserError."""
    if options.model.model not in demo.FOLDERS:
        options = evolve_options(options, model=locate_model(options.model.model, os.environ))
        check_model(options.model.model)
    asked = options.speculation.draft
    draft = choose_draft_name(asked, "")
    if draft not in DRAFTS and not Path(draft).exists():
        accepted = f"a folder or GGUF file with a draft, {', '.join(DRAFTS)}, {COPIES}"
        raise UserError(f"--draft {asked}: no such folder or file; accepted: {accepted}")
    if (device := options.speculation.draft_device) and draft == "none" and asked != "auto":
        raise UserError(f"--draft-device {device} has no effect with --draft {asked}: leave one out")
    if options.diagnostics.trace is not None:
        check_trace(options.diagnostics.trace)
    if options.cache.kv_cache_dir is not None and options.cache.uses_disk:
        check_cache_folder(options.cache.kv_cache_dir)
    if (url := options.shared_tier.kv_shared_tier) and importlib.util.find_spec("obstore") is None:
        raise UserError(f"--kv-shared-tier {url}: {INSTALL}")
    return evolve_options(options, api_key=collect_keys(options.http))


def collect_keys(http: HttpOptions) -> tuple[str, ...]:
    """Return the API keys of --api-key and of the file. Raises UserError."""
    return http.api_key if http.api_key_file is None else (*http.api_key, *read_keys(http.api_key_file))


def check_address(http: HttpOptions) -> None:
    """Bind the address for a moment. A server that runs already is a common mistake, and is otherwise found after all
    imports.
    """
    try:
        bind_listener(http.host, http.port).close()
    # UnicodeError: the name cannot be looked up.
    except (OSError, UnicodeError) as error:
        raise build_bind_error(http, error) from error


def build_bind_error(http: HttpOptions, error: OSError | UnicodeError) -> UserError:
    where = f"{http.host}:{http.port} (--host, --port)"
    another = "; --port 0 takes a free port" if getattr(error, "errno", None) == errno.EADDRINUSE else ""
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
        raise UserError(f"{path}: {explain_refused_type(kind)}")


def check_gguf(path: Path) -> None:
    """Check the header of a GGUF file: the types of its tensors and its architecture."""
    try:
        kind = read_metadata(path).architecture
    except CheckpointError as error:
        raise UserError(str(error)) from error
    if kind not in ARCHITECTURES:
        raise UserError(f"{path}: {explain_refused_architecture(kind)}")


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        gguf = min(folder.glob("*.gguf"), default=None)
        instead = "" if gguf is None else f"; name the GGUF file itself, such as {gguf}"
        raise UserError(f"{folder}: config.json is missing{instead}; {CHECKPOINT}")
    try:
        return read_json(path)
    except CheckpointError as error:
        raise UserError(str(error)) from error


def check_trace(path: Path) -> None:
    """Check that the trace can be written. An existing file stays as it is until the model is loaded."""
    try:
        there = path.exists()
        folder = path.parent.is_dir()
    # The name is too long.
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}") from error
    if path.is_dir():
        raise UserError(f"--trace {path}: is a folder; accepted: a file that can be written")
    if not folder:
        raise UserError(f"--trace {path}: there is no folder {path.parent}")
    if not os.access(path if there else path.parent, os.W_OK):
        raise UserError(f"--trace {path}: permission denied")


def check_cache_folder(path: Path) -> None:
    """Check the cache folder as it will be opened: ours alone, and not in use."""
    try:
        if not os.path.lexists(path):
            check_parent(path)
            return
        PrivateFolder.open_read_only(path).close()
        check_private(path, path.stat())
        check_unlocked(path)
        check_writable(path)
    except FolderUnusable as error:
        raise UserError(f"--kv-cache-dir {error}") from error
    except OSError as error:
        raise UserError(f"--kv-cache-dir {path}: {error.strerror}") from error


def check_parent(path: Path) -> None:
    """Make the folder and its missing parents for a moment, since permissions alone do not tell (`/proc`)."""
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not above.is_dir():
        raise FolderUnusable(f"{path}: {above} is not a folder")
    missing = [
        folder for folder in reversed((path.absolute(), *path.absolute().parents)) if not os.path.lexists(folder)
    ]
    made = list[Path]()
    try:
        for folder in missing:
            folder.mkdir(mode=0o700)
            made.append(folder)
        check_writable(path)
    except OSError as error:
        raise FolderUnusable(f"{path}: cannot be created: {(error.strerror or str(error)).lower()}") from error
    finally:
        for folder in reversed(made):
            # Another process has put something into it.
            with suppress(OSError):
                folder.rmdir()


def check_writable(folder: Path) -> None:
    """Make a file for a moment, since permissions alone do not tell."""
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        why = (error.strerror or str(error)).lower()
        raise FolderUnusable(f"{folder}: no file can be created in it: {why}") from error


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
    """Return keys, one a line. Empty lines and white space around a key do not count. Raises UserError."""
    flag = f"--api-key-file {path}"
    try:
        with path.open("rb") as file:
            about = os.fstat(file.fileno())
            data = file.read(MOST_KEYS + 1)
    except OSError as error:
        raise UserError(f"{flag}: {(error.strerror or str(error)).lower()}") from error
    if len(data) > MOST_KEYS:
        raise UserError(f"{flag}: larger than {MOST_KEYS >> 10} KiB; accepted: one key on each line")
    keys = tuple(line.strip().decode("ascii", "replace") for line in data.splitlines() if line.strip())
    if not keys:
        raise UserError(f"{flag}: holds no key; accepted: one key on each line")
    for number, key in enumerate(keys, 1):
        if not key.isascii() or not key.isprintable():
            raise UserError(f"{flag}: key {number} is not printable ASCII")
    if stat.S_ISREG(about.st_mode) and about.st_mode & 0o077:
        log.warning("%s: other users can read it; run `chmod 600` on it", flag)
    return keys

"""The digest that identifies weights.

Hashing takes about as long as importing torch, which is not needed here. So a thread may hash at start while torch is
imported (`start_digest`), and `digest_of_files` takes the result.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TypeAlias

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.config_fields import open_regular, read_json

MAX_HEADER = 16 << 20  # bytes: eight times what 10,000 tensors need; the format itself allows 100 MB
_WHOLE = 256 << 20  # bytes up to which the whole content is hashed
_PIECE = 1 << 20
_PIECES = 64
_TOGETHER = 16 << 20  # bytes that are hashed at once, since the thread waits for the GIL after each call

# Each file with the size of its header, its whole size, and its time of modification in ns.
Files: TypeAlias = tuple[tuple[Path, int, int, int], ...]
_pending = dict[Files, Future[str]]()


def digest_of_files(headers: Mapping[Path, int], forms: Iterable[str] = ()) -> str:
    """Return 32 hex digits that identify weights: blake2b over each file's header, size and content.

    Up to 256 MiB in all, the whole content is hashed. Above that, 64 pieces of 1 MiB per file stand for it, evenly
    spread with both ends included. This distinguishes models and training steps, but it does not detect a forgery.

    headers: the files, with the size of each header in bytes. forms: the names of the packings, which are hashed too.
    """
    files = stat_files(headers)
    packed = sorted(forms)
    begun = None if packed else _pending.pop(files, None)
    if begun is not None and begun.exception() is None:
        return begun.result()
    return hash_files(files, packed)


def start_digest(folder: Path) -> None:
    """Start a thread that computes the digest of a folder's safetensors files for the next `digest_of_files`.

    Errors are ignored here: that call raises them.
    """
    try:
        files = stat_files({file: read_header_length(file) for file in list_files(folder)})
    except (OSError, ValueError, CheckpointError):
        return
    found = _pending[files] = Future[str]()

    def take() -> None:
        try:
            found.set_result(hash_files(files))
        except (OSError, MemoryError) as error:
            found.set_exception(error)

    Thread(target=take, name="digest", daemon=True).start()


def list_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a folder. Raises OSError, CheckpointError or ValueError."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    names = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError("no file names")
    return [folder / name for name in set(names.values())]


def read_header_length(file: Path) -> int:
    """Return the size of a file's header in bytes. Raises OSError, CheckpointError or ValueError."""
    with open_regular(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
    if length > MAX_HEADER:
        raise ValueError("not a safetensors file")
    return 8 + length


def stat_files(headers: Mapping[Path, int]) -> Files:
    stats = ((file, header, file.stat()) for file, header in sorted(headers.items()))
    return tuple((file, header, stat.st_size, stat.st_mtime_ns) for file, header, stat in stats)


def hash_files(files: Files, forms: Iterable[str] = ()) -> str:
    """Compute the digest, see `digest_of_files`. Raises OSError or MemoryError."""
    whole = sum(size for _, _, size, _ in files) <= _WHOLE
    buffer = memoryview(bytearray(_TOGETHER))
    digest = hashlib.blake2b(digest_size=16, person=b"rekindle-weights")
    for form in forms:
        digest.update(f"{form};".encode())
    for file, header, size, _ in files:
        digest.update(f"{size}:".encode())
        with file.open("rb") as source:
            digest.update(source.read(header))
            starts = range(0, size, _PIECE) if whole else _spread_pieces(size)
            filled = 0
            for start in starts:
                source.seek(start)
                filled += source.readinto(buffer[filled : filled + _PIECE])
                if filled + _PIECE > _TOGETHER:
                    digest.update(buffer[:filled])
                    filled = 0
            digest.update(buffer[:filled])
    return digest.hexdigest()


def _spread_pieces(size: int) -> list[int]:
    last = max(size - _PIECE, 0)
    return sorted({last * piece // (_PIECES - 1) for piece in range(_PIECES)})

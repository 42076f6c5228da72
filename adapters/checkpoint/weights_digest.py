"""What identifies weights. To hash it takes as long as to import torch, which is not needed here: a thread of its own
may do that meanwhile.
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

MAX_HEADER = 16 << 20  # eight times what 10,000 tensors need; the format itself allows 100 MB
_WHOLE = 256 << 20
_PIECE = 1 << 20
_PIECES = 64
_TOGETHER = 16 << 20  # bytes that are hashed at once: after each piece a thread would wait for the interpreter

Files: TypeAlias = tuple[tuple[Path, int, int, int], ...]  # each with the bytes of its header and in all, and its time
_begun = dict[Files, Future[str]]()


def digest_of_files(headers: Mapping[Path, int], forms: Iterable[str] = ()) -> str:
    """Identifies weights: 32 hex digits of blake2b over every file's header, size and content, and how that is read.

    Up to 256 MiB in all the whole content is hashed. Above, 64 pieces of 1 MiB a file, evenly spread with both ends
    included, stand for it: that tells apart models and training steps, not a forgery.

    headers: of each file how many bytes come first, before all tensors. forms: in which they are packed.
    """
    files, packed = as_they_are(headers), sorted(forms)
    begun = None if packed else _begun.pop(files, None)
    if begun is not None and begun.exception() is None:
        return begun.result()
    return hashed(files, packed)


def begin(folder: Path) -> None:
    """The digest of a folder's safetensors, for whoever asks for it next. What goes wrong here, and what cannot be
    known from these files alone, is left to them.
    """
    try:
        files = as_they_are({file: header_of(file) for file in files_of(folder)})
    except (OSError, ValueError, CheckpointError):
        return
    found = _begun[files] = Future[str]()

    def take() -> None:
        try:
            found.set_result(hashed(files))
        except (OSError, MemoryError) as error:
            found.set_exception(error)

    Thread(target=take, name="digest", daemon=True).start()


def files_of(folder: Path) -> list[Path]:
    """Raises OSError, CheckpointError or ValueError."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    names = read_json(folder / "model.safetensors.index.json").get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError("no file names")
    return [folder / name for name in set(names.values())]


def header_of(file: Path) -> int:
    """Raises OSError, CheckpointError or ValueError."""
    with open_regular(file) as opened:
        length = int.from_bytes(opened.read(8), "little")
    if length > MAX_HEADER:
        raise ValueError("not a safetensors file")
    return 8 + length


def as_they_are(headers: Mapping[Path, int]) -> Files:
    stats = ((file, header, file.stat()) for file, header in sorted(headers.items()))
    return tuple((file, header, stat.st_size, stat.st_mtime_ns) for file, header, stat in stats)


def hashed(files: Files, forms: Iterable[str] = ()) -> str:
    whole, buffer = sum(size for _, _, size, _ in files) <= _WHOLE, memoryview(bytearray(_TOGETHER))
    digest = hashlib.blake2b(digest_size=16, person=b"rekindle-weights")
    for form in forms:
        digest.update(f"{form};".encode())
    for file, header, size, _ in files:
        digest.update(f"{size}:".encode())
        with file.open("rb") as source:
            digest.update(source.read(header))
            starts = range(0, size, _PIECE) if whole else _spread(size)
            filled = 0
            for start in starts:
                source.seek(start)
                filled += source.readinto(buffer[filled : filled + _PIECE])
                if filled + _PIECE > _TOGETHER:
                    digest.update(buffer[:filled])
                    filled = 0
            digest.update(buffer[:filled])
    return digest.hexdigest()


def _spread(size: int) -> list[int]:
    last = max(size - _PIECE, 0)
    return sorted({last * piece // (_PIECES - 1) for piece in range(_PIECES)})

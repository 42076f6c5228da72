"""Damages files of any kind that the project reads, as a disk, a copy or a stranger can."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

from adapters.store.files import seekable
from adapters.store.files.seekable import Damaged
from tests.store.files.test_crafted import CRAFTED, joined, parts, sparse

BYTES = ("bits", "cut", "zeros", "hole", "tail twice", "part moved", "another's", "empty", "grown")
HARMS = (
    *BYTES,
    *("sparse", "frames swapped", "frame of another", "frame twice", "crafted", "gone", "a folder", "a link", "a pipe"),
)


def harm(file: Path, others: Sequence[Path], random: Random) -> str:
    """Do something to a file; what. others: files that it could be taken for."""
    raw, kind = file.read_bytes(), random.choice(HARMS)
    if kind in {"gone", "a folder", "a link", "a pipe"}:
        replaced(file, others, kind)
    elif kind == "sparse":
        if random.random() < 0.5:
            sparse(file, random.choice((2, 1000, 30_000_000)))
        else:
            os.truncate(file, len(raw) + random.choice((1, 4096, 1 << 32)))
    elif kind.startswith("frame") or kind == "crafted":
        try:
            file.write_bytes(reframed(raw, random.choice(others).read_bytes(), kind, random))
        except (
            Damaged,
            seekable.zstandard.ZstdError,
            seekable.struct.error,
            UnicodeDecodeError,
        ):  # it has no frames, or a head that is no text
            file.write_bytes(spoilt(raw, raw, "bits", random))
    else:
        file.write_bytes(spoilt(raw, random.choice(others).read_bytes(), kind, random))
    return kind


def replaced(file: Path, others: Sequence[Path], kind: str) -> None:
    file.unlink()
    if kind == "a folder":
        file.mkdir()
    elif kind == "a link":
        file.symlink_to(others[-1])
    elif kind == "a pipe":
        os.mkfifo(file)


def spoilt(raw: bytes, other: bytes, kind: str, random: Random) -> bytes:
    data, size = bytearray(raw), len(raw)
    at = random.randrange(size + 1)
    stop = min(size, at + random.choice((1, 16, 512, 4096)))
    match kind:
        case "bits":
            for _ in range(random.choice((1, 1, 3, 20)) if size else 0):
                data[random.randrange(size)] ^= 1 << random.randrange(8)
        case "cut":
            del data[at:]
        case "zeros":
            data[at:stop] = bytes(stop - at)
        case "hole":
            del data[at:stop]
        case "tail twice":
            data += data[at:]
        case "part moved":
            to = random.randrange(size + 1)
            data[to : to + stop - at] = data[at:stop]
        case "another's":
            data[:] = other
        case "empty":
            data.clear()
        case _:
            data += random.randbytes(random.choice((1, 17, 5000)))
    return bytes(data)


def reframed(raw: bytes, other: bytes, kind: str, random: Random) -> bytes:
    """Every frame whole, every checksum right, and not the file that it was."""
    if kind == "crafted":
        return random.choice(list(CRAFTED.values()))(raw)
    mine, theirs = parts(raw), parts(other)
    at = random.randrange(len(mine))
    if kind == "frames swapped":
        to = random.randrange(len(mine))
        mine[at], mine[to] = mine[to], mine[at]
    elif kind == "frame twice":
        mine.insert(at, mine[at])
    else:
        mine[at] = random.choice(theirs)
    return joined(mine)

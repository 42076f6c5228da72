"""The corpus: Python source of the standard library that runs the training, deduplicated and split by file."""

from __future__ import annotations

import gzip
import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

MAX_CHARS = 400_000
HELD_OUT_ONE_IN = 50
SKIPPED_FOLDERS = frozenset({"site-packages", "__pycache__", "lib2to3", "encodings", "bad_data"})
GENERATED = "_sysconfigdata"


@frozen
class Corpus:
    """Source texts. `held_out` files are never trained on. `digest`: blake2b of all of them, in order."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    python: str
    digest: str

    def save(self, path: Path) -> None:
        """One compressed JSON file."""
        body = {"python": self.python, "train": self.train, "held_out": self.held_out}
        path.write_bytes(gzip.compress(json.dumps(body).encode(), mtime=0))

    @staticmethod
    def load(path: Path) -> Corpus:
        """What `save` wrote. The digest is computed again."""
        body = json.loads(gzip.decompress(path.read_bytes()))
        return assemble(body["train"], body["held_out"], body["python"])


def read_stdlib() -> Corpus:
    """Every source file of the running interpreter's standard library, its tests included, without duplicates.

    Which side of the split a file falls on depends on its text alone, so a copy of a file cannot be on both sides.
    """
    train: list[str] = []
    held_out: list[str] = []
    seen: set[str] = set()
    for text in source_files(Path(sysconfig.get_path("stdlib"))):
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        if digest not in seen:
            seen.add(digest)
            (train if int(digest, 16) % HELD_OUT_ONE_IN else held_out).append(text)
    return assemble(train, held_out, platform.python_version())


def source_files(folder: Path) -> Iterator[str]:
    """UTF-8 Python files of reasonable size, sorted by path; tables and what the build generated are left out."""
    for path in sorted(folder.rglob("*.py")):
        inside = path.relative_to(folder).parts
        if SKIPPED_FOLDERS.intersection(inside) or path.name.startswith(GENERATED):
            continue
        try:
            text = path.read_text(encoding="utf-8").expandtabs(4)
        except UnicodeDecodeError:
            continue
        if 200 <= len(text) <= MAX_CHARS and is_mostly_ascii(text):
            yield text


def is_mostly_ascii(text: str) -> bool:
    return sum(map(str.isascii, text)) > 0.98 * len(text)


def assemble(train: list[str], held_out: list[str], python: str) -> Corpus:
    digest = hashlib.blake2b(digest_size=16, person=b"rekindle-corpus")
    for part in (train, held_out):
        digest.update(len(part).to_bytes(8, "big"))
        for text in part:
            digest.update(hashlib.blake2b(text.encode()).digest())
    return Corpus(tuple(train), tuple(held_out), python, digest.hexdigest())

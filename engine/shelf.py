"""Bytecode of the modules that a server imports, in one file.

Python looks for each of 1,700 modules in the folders of its path, and then opens, checks and reads a file of its own:
an eighth of a start. A start that has had to writes them into one file, and the next one takes them from there, under
the rules that Python has for its files: of a source that has another time or size nothing is taken, nor where a folder
in which the module would be looked for has changed. It lies beside them, for one version of Python (PEP 3147), not
where that is told to write none, nor where it may not; and whoever may write to the sources may write to it.
"""

from __future__ import annotations

import marshal
import mmap
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, TypedDict

from engine.bytecode import beside, replace

HEAD = len(MAGIC_NUMBER) + 32 + 8  # then how long the index is
PYC = 16  # bytes of a module's own file before its code: magic number, flags, the source's time and size


class Piece(NamedTuple):
    """Of a module: its source, with time in nanoseconds and size in bytes; Python's own file of its code, and where
    that is in this one; the folder that it is looked for in, and the one that modules in it are, where it has any.
    """

    source: str
    time: int
    size: int
    cached: str
    start: int
    stop: int
    folder: str
    inside: str | None


class Index(TypedDict):
    """path: `sys.path`. times: of folders that modules were found in, and of those of the path; -1: there is none."""

    size: int
    path: tuple[str, ...]
    times: dict[str, int]
    pieces: dict[str, tuple[Any, ...]]


class Taken(SourceFileLoader):
    """A module's, whose code is known. Python's own in everything else."""

    code: bytes = b""

    def get_code(self, fullname: str) -> CodeType | None:
        kept, self.code = self.code, b""
        code: CodeType | None = marshal.loads(kept) if kept else None  # noqa: S302 - as Python does with its own
        return super().get_code(fullname) if code is None or code.co_filename != self.path else code


class CodeShelf(MetaPathFinder):
    """path: of the file. taken: modules that came from it."""

    def __init__(self, path: Path) -> None:
        self.path, self.taken = path, set[str]()
        self._before, self._pieces, self._times = set[str](), dict[str, Piece](), dict[str, int]()
        self._held: mmap.mmap | None = None
        self._tops: tuple[tuple[str, ...], frozenset[str]] = (), frozenset()
        self._same = dict[str, bool]()

    def begin(self) -> None:
        """Modules that are imported from now on are looked for here first."""
        self._before = set(sys.modules)
        found = opened(self.path)
        if found is None:
            return
        index, self._held = found
        self._pieces = {name: Piece(*piece) for name, piece in index["pieces"].items()}
        self._times, self._same = index["times"], {}
        tops = set[str]()
        for known, folder in zip(index["path"], sys.path, strict=False):
            if known != folder or not self._unchanged(folder):
                break
            tops.add(folder)
        self._tops = tuple(sys.path), frozenset(tops)
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, _: ModuleType | None = None) -> ModuleSpec | None:
        piece, held = self._pieces.get(fullname), self._held
        if piece is None or held is None:
            return None
        if path is None:
            here = piece.folder in self._tops[1] and self._tops[0] == tuple(sys.path)
        else:
            here = len(path) == 1 and path[0] == piece.folder and self._unchanged(piece.folder)
        if not here or stamp(piece.source) != (piece.time, piece.size):
            return None
        loader = Taken(fullname, piece.source)
        try:
            loader.code = held[piece.start : piece.stop]
        except ValueError:  # it has just been closed
            return None
        self.taken.add(fullname)
        spec = ModuleSpec(fullname, loader, origin=piece.source, is_package=piece.inside is not None)
        spec.has_location, spec.cached = True, piece.cached
        if piece.inside is not None:
            spec.submodule_search_locations = [piece.inside]
        return spec

    def close(self) -> None:
        """No more are taken."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        if self._held is not None:
            self._held.close()
        self._held, self._pieces = None, {}

    def keep(self) -> None:
        """For the next process, if this one has found any elsewhere: together with what is there."""
        self.close()
        more = {} if sys.dont_write_bytecode else self._missing()
        if not more:
            return
        known, found = dict[str, tuple[Piece, bytes]](), opened(self.path)
        if found is not None:
            index, held = found
            with held:
                for name, piece in ((name, Piece(*piece)) for name, piece in index["pieces"].items()):
                    if stamp(piece.source) == (piece.time, piece.size):
                        known[name] = piece, held[piece.start : piece.stop]
        write(self.path, {**known, **more})

    def _missing(self) -> dict[str, tuple[Piece, bytes]]:
        """With their code: modules that Python has found, and has files of its own of, where they can be taken."""
        found = dict[str, tuple[Piece, bytes]]()
        for name, module in list(sys.modules.items()):
            spec: Any = getattr(module, "__spec__", None)
            fits = spec is not None and spec.name == name and type(spec.loader) is SourceFileLoader
            if not fits or name in self._before or name in self.taken or not spec.origin or not spec.cached:
                continue
            own, file = os.path.split(spec.origin)
            inside, folder = (own, os.path.dirname(own)) if file == "__init__.py" else (None, own)  # noqa: PTH120
            parent = sys.modules.get(name.rpartition(".")[0])
            if folder not in sys.path if parent is None else [*parent.__path__] != [folder]:
                continue
            with suppress(OSError):
                content, (time, size) = Path(spec.cached).read_bytes(), stamp(spec.origin)
                if content[:PYC] == MAGIC_NUMBER + bytes(4) + numbers(time // 10**9, size):
                    found[name] = Piece(spec.origin, time, size, spec.cached, 0, 0, folder, inside), content[PYC:]
        return found

    def _unchanged(self, folder: str) -> bool:
        """As it was when something was found in it, or nothing was. Asked once of each."""
        if folder not in self._same:
            self._same[folder] = folder in self._times and stamp(folder)[0] == self._times[folder]
        return self._same[folder]


def stamp(path: str) -> tuple[int, int]:
    """Time, and size: -1 and 0 where nothing is."""
    try:
        found = os.stat(path)  # noqa: PTH116 - 1,700 times
    except OSError:
        return -1, 0
    return found.st_mtime_ns, found.st_size


def numbers(*of: int) -> bytes:
    return b"".join((one & 0xFFFFFFFF).to_bytes(4, "little") for one in of)


def opened(path: Path) -> tuple[Index, mmap.mmap] | None:
    """None where there is none that is whole, and of this Python."""
    with suppress(OSError, ValueError), path.open("rb") as file:
        head = file.read(HEAD)
        index = file.read(int.from_bytes(head[-8:], "little"))
        if head[:-8] == MAGIC_NUMBER + sha256(index).digest():
            found: Index = marshal.loads(index)  # noqa: S302 - as Python does with its own
            if os.fstat(file.fileno()).st_size == found["size"]:
                return found, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return None


def write(path: Path, modules: dict[str, tuple[Piece, bytes]]) -> None:
    folders = {piece.folder for piece, _ in modules.values()} | {*sys.path}

    def index(start: int) -> bytes:
        pieces = dict[str, tuple[Any, ...]]()
        for name, (piece, code) in modules.items():
            pieces[name] = tuple(piece._replace(start=start, stop=start + len(code)))
            start += len(code)
        times = {folder: stamp(folder)[0] for folder in folders}
        return marshal.dumps({"size": start, "path": tuple(sys.path), "times": times, "pieces": pieces})

    room = HEAD + 2 * len(index(0))  # of which the index takes what it takes
    content = index(room)
    head = MAGIC_NUMBER + sha256(content).digest() + len(content).to_bytes(8, "little")
    replace(path, [head, content, bytes(room - HEAD - len(content)), *(code for _, code in modules.values())])


SHELF = CodeShelf(beside("modules"))

"""Bytecode of the modules that a server imports, in one file.

Python looks for each of 1,700 modules in the folders of its path, and then opens, checks and reads a file of its own:
an eighth of a start. A start that has had to writes them into one file, and the next one takes them from there, nearly
as Python has it for its files: of a source that has another time or size nothing is taken, nor where a folder in which
the module would be looked for has changed. (What changes in folders of these, such as one that becomes a package, is
not seen.) It lies beside them, for one version of Python (PEP 3147), not where that is told to write none, nor where it
may not; and whoever may write to the sources may write to it.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, TypedDict

from engine.bytecode import beside, replace

PYC = 16  # bytes of a module's own file before its code: magic number, flags, the source's time and size


class KeptModule(NamedTuple):
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


class ShelfIndex(TypedDict):
    """path: `sys.path`. times: of folders that modules were found in, and of those of the path; -1: there is none."""

    size: int
    path: tuple[str, ...]
    times: dict[str, int]
    pieces: dict[str, tuple[Any, ...]]


FORM = MAGIC_NUMBER + sha256(repr((KeptModule._fields, *ShelfIndex.__annotations__)).encode()).digest()
HEAD = len(FORM) + 32 + 8  # then the index's digest and how long it is


class TakenLoader(SourceFileLoader):
    """A module's, whose code is known. Python's own in everything else, and where that is none."""

    code: bytes = b""

    def get_code(self, fullname: str) -> CodeType | None:
        kept, self.code = self.code, b""
        with suppress(EOFError, TypeError, ValueError):
            code = marshal.loads(kept)  # noqa: S302 - as Python does with its own
            if isinstance(code, CodeType) and code.co_filename == self.path:
                return code
        return super().get_code(fullname)


class CodeShelf(MetaPathFinder):
    """path: of the file. taken: modules that came from it."""

    def __init__(self, path: Path) -> None:
        self.path, self.taken = path, set[str]()
        self._looked: tuple[str, ...] | None = None  # `sys.path` as it was at the beginning
        self._before, self._pieces, self._times = set[str](), dict[str, KeptModule](), dict[str, int]()
        self._file = -1
        self._tops, self._same = frozenset[str](), dict[str, bool]()

    def begin(self) -> None:
        """Modules that are imported from now on are looked for here first."""
        self._before, self._looked = set(sys.modules), looked()
        found = opened(self.path)
        if found is None:
            return
        index, self._file = found
        self._pieces = {name: KeptModule(*piece) for name, piece in index["pieces"].items()}
        self._times, self._same = index["times"], {}
        tops = set[str]()
        for known, folder in zip(index["path"], self._looked, strict=False):
            if known != folder or not os.path.isabs(folder) or not self._unchanged(folder):  # noqa: PTH117
                break
            tops.add(folder)
        self._tops = frozenset(tops)
        sys.meta_path.insert(0, self)

    def find_spec(self, fullname: str, path: Sequence[str] | None, _: ModuleType | None = None) -> ModuleSpec | None:
        piece = self._pieces.get(fullname)
        if piece is None:
            return None
        if path is None:
            here = piece.folder in self._tops and self._looked == looked()
        else:
            here = len(path) == 1 and path[0] == piece.folder and self._unchanged(piece.folder)
        if not here or stamp(piece.source) != (piece.time, piece.size):
            return None
        loader = TakenLoader(fullname, piece.source)
        try:
            loader.code = os.pread(self._file, piece.stop - piece.start, piece.start)
        except OSError:  # it has just been closed
            return None
        self.taken.add(fullname)
        spec = ModuleSpec(fullname, loader, origin=piece.source, is_package=piece.inside is not None)
        spec.has_location, spec.cached = True, piece.cached
        if piece.inside is not None:
            spec.submodule_search_locations = [piece.inside]
        return spec

    def close(self) -> None:
        """No more are taken. Another thread may be looking through the finders: that list stays as it is."""
        sys.meta_path = [one for one in sys.meta_path if one is not self]
        self._pieces, file, self._file = {}, self._file, -1
        if file >= 0:
            os.close(file)

    def keep(self) -> bool:
        """For the next process, if this one has found any elsewhere: together with what is there, as far as Python
        would still find it there. Was there anything?
        """
        self.close()
        path, self._looked = self._looked, None
        if path is None or sys.dont_write_bytecode or not writable(self.path.parent):
            return False
        more = self._missing(path)
        if not more:
            return False
        known, found = dict[str, tuple[KeptModule, bytes]](), opened(self.path)
        if found is not None:
            index, file = found
            with os.fdopen(file, "rb") as held:
                for name, piece in ((name, KeptModule(*piece)) for name, piece in index["pieces"].items()):
                    held.seek(piece.start)
                    known[name] = piece, held.read(piece.stop - piece.start)
        write(self.path, path, {**known, **more})
        return True

    def _missing(self, path: Sequence[str]) -> dict[str, tuple[KeptModule, bytes]]:
        """With their code: modules that Python has found, and has files of its own of, where they can be taken."""
        found = dict[str, tuple[KeptModule, bytes]]()
        for name, module in list(sys.modules.items()):
            spec: Any = getattr(module, "__spec__", None)
            fits = spec is not None and spec.name == name and type(spec.loader) is SourceFileLoader
            if not fits or name in self._before or name in self.taken or not spec.origin or not spec.cached:
                continue
            own, file = os.path.split(spec.origin)
            inside, folder = (own, os.path.dirname(own)) if file == "__init__.py" else (None, own)  # noqa: PTH120
            parent = sys.modules.get(name.rpartition(".")[0])
            if folder not in path if parent is None else [*getattr(parent, "__path__", ())] != [folder]:
                continue
            with suppress(OSError):
                content, (time, size) = Path(spec.cached).read_bytes(), stamp(spec.origin)
                if content[:PYC] == MAGIC_NUMBER + bytes(4) + numbers(time // 10**9, size):
                    found[name] = KeptModule(spec.origin, time, size, spec.cached, 0, 0, folder, inside), content[PYC:]
        return found

    def _unchanged(self, folder: str) -> bool:
        """As it was when something was found in it, or nothing was. Asked once of each."""
        if folder not in self._same:
            self._same[folder] = folder in self._times and stamp(folder)[0] == self._times[folder]
        return self._same[folder]


def looked() -> tuple[str, ...]:
    """Where modules of no package are looked for. Python passes over what is no text."""
    return tuple(one for one in sys.path if isinstance(one, str))


def stamp(path: str) -> tuple[int, int]:
    """Time, and size: -1 and 0 where nothing is."""
    try:
        found = os.stat(path)  # noqa: PTH116 - 1,700 times
    except OSError:
        return -1, 0
    return found.st_mtime_ns, found.st_size


def numbers(*of: int) -> bytes:
    return b"".join((one & 0xFFFFFFFF).to_bytes(4, "little") for one in of)


def writable(folder: Path) -> bool:
    """As far as can be told without trying; who makes it may write there."""
    return not folder.exists() or os.access(folder, os.W_OK)


def opened(path: Path) -> tuple[ShelfIndex, int] | None:
    """With what it is read by. None where there is none that is whole, of this Python and this form."""
    with suppress(OSError), path.open("rb") as file:
        size, head = os.fstat(file.fileno()).st_size, file.read(HEAD)
        length = int.from_bytes(head[-8:], "little")
        index = file.read(length) if length <= size else b""
        if head[:-8] == FORM + sha256(index).digest():
            found: ShelfIndex = marshal.loads(index)  # noqa: S302 - as Python does with its own
            if size == found["size"]:
                return found, os.dup(file.fileno())
    return None


def write(path: Path, looked: Sequence[str], modules: Mapping[str, tuple[KeptModule, bytes]]) -> None:
    """Those that Python finds there now. Times of folders are from before it is asked: who comes later is seen."""
    times = {folder: stamp(folder)[0] for folder in {piece.folder for piece, _ in modules.values()} | {*looked}}
    there = dict[str, tuple[KeptModule, bytes]]()
    for name, (piece, code) in modules.items():
        spec = PathFinder.find_spec(name, [piece.folder] if "." in name else [*looked])
        if spec is not None and spec.origin == piece.source and stamp(piece.source) == (piece.time, piece.size):
            there[name] = piece, code

    def index(start: int) -> bytes:
        pieces = dict[str, tuple[Any, ...]]()
        for name, (piece, code) in there.items():
            pieces[name] = tuple(piece._replace(start=start, stop=start + len(code)))
            start += len(code)
        return marshal.dumps({"size": start, "path": tuple(looked), "times": times, "pieces": pieces})

    room = HEAD + 2 * len(index(0))  # of which the index takes what it takes
    content = index(room)
    head = FORM + sha256(content).digest() + len(content).to_bytes(8, "little")
    replace(path, [head, content, bytes(room - HEAD - len(content)), *(code for _, code in there.values())])


SHELF = CodeShelf(beside("modules"))

"""Bytecode of the methods that are written for classes, kept as Python keeps that of modules.

attrs, and dataclasses like it, write the source of `__init__` and others and have it compiled whenever a class is made:
1,200 times at a start, which is a seventh of it. What comes of a source is the same each time, so it lies beside the
modules' bytecode, under the same rules: for one version of Python (PEP 3147), not where that is told to write none, nor
where it may not, and whoever may write to the sources may write to it.
"""

from __future__ import annotations

import dataclasses
import marshal
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from hashlib import blake2b, sha256
from importlib import import_module
from importlib.util import MAGIC_NUMBER, cache_from_source
from pathlib import Path
from types import CodeType
from typing import Any

# What attrs compiles with is no part of its interface: what is asked in another way is compiled as it is asked.
PLACES = ((vars(import_module("attr._make")), "compile"), (vars(dataclasses), "exec"))
MOST = 4096  # pieces of code in a file: beyond that, those alone that this process has asked for
LEFT_S = 3600  # what somebody was writing for longer, nobody is any more
SALT = re.compile(r"^ +-?\d+,$", re.MULTILINE)  # of a class's hash, another one in each process


class Bytecode:
    """Of sources, by their digests. path: of the file that they are read from and written to."""

    def __init__(self, path: Path) -> None:
        self.path, self.new = path, 0
        self._known, self._asked = read(path), dict[bytes, CodeType]()

    def compiled(self, source: Any, filename: str, mode: str, *more: Any, **named: Any) -> Any:
        """As `compile` has it, but that nothing is inherited from whoever asks."""
        if more or named or not isinstance(source, str):
            return compile(source, filename, mode, *more, **named)
        key = blake2b(f"{mode} {filename}\n{SALT.sub('', source)}".encode(), digest_size=16).digest()
        code = self._known.get(key)
        if code is None:
            code = self._known[key] = compile(source, filename, mode, 0, dont_inherit=True)
            self.new += 1
        self._asked[key] = code
        return code

    def executed(self, source: Any, *scopes: Any, **named: Any) -> None:
        """As `exec` has it in scopes that it is told."""
        code = self.compiled(source, "<string>", "exec") if isinstance(source, str) else source
        exec(code, *scopes, **named)  # noqa: S102 - in the place of `exec`

    def begin(self) -> None:
        """Classes that are made from now on ask here."""
        for (names, name), own in zip(PLACES, (self.compiled, self.executed), strict=True):
            names[name] = own

    def keep(self) -> None:
        """For the next process, if this one has asked for anything new; classes compile for themselves again."""
        for names, name in PLACES:
            names.pop(name, None)
        if self.new and not sys.dont_write_bytecode:
            write(self.path, self._known if len(self._known) <= MOST else self._asked)
        self._known, self._asked, self.new = {}, {}, 0


def read(path: Path) -> dict[bytes, CodeType]:
    """Nothing where there is none that is whole, and of this Python."""
    with suppress(OSError):
        content = path.read_bytes()
        head = MAGIC_NUMBER + sha256(content[len(MAGIC_NUMBER) + 32 :]).digest()
        if content.startswith(head):
            found: dict[bytes, CodeType] = marshal.loads(memoryview(content)[len(head) :])  # noqa: S302 - as modules are
            return found
    return {}


def write(path: Path, known: Mapping[bytes, CodeType]) -> None:
    content = marshal.dumps({**known})
    replace(path, [MAGIC_NUMBER, sha256(content).digest(), content])


def replace(path: Path, content: Iterable[bytes]) -> None:
    """All of it or nothing, with the rights that the source has, as Python writes its own."""
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{path.name}.*"):
            if time.time() - left.stat().st_mtime > LEFT_S:
                left.unlink()
        rights = Path(__file__).stat().st_mode & 0o666 | 0o200
        with os.fdopen(os.open(aside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, rights), "wb") as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        with suppress(OSError):
            aside.unlink()


def beside(name: str) -> Path:
    """A file among those that Python keeps of this package."""
    return Path(cache_from_source(str(Path(__file__).with_name(f"{name}.py"))))


OWN = Bytecode(beside("methods"))

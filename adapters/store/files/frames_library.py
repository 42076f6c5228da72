"""Finds the compiled library that makes, reads and sums frames (frames.h, sums.h), and memory for what it makes."""

from __future__ import annotations

import ctypes
from functools import cache

_make_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_char_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_find_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


@cache
def load_functions() -> ctypes.CDLL | None:
    """Return the library's functions, whose calls release the GIL. None where there is no library."""
    from adapters.models.kernels.cpu.native.native_library import find_library  # noqa: PLC0415 - readers need none

    library = find_library()
    return None if library is None else library.code


@cache
def load_brief_functions() -> ctypes.PyDLL | None:
    """Return the same functions, whose calls keep the GIL."""
    from adapters.models.kernels.cpu.native.native_library import find_library  # noqa: PLC0415 - readers need none

    library = find_library()
    return None if library is None else library.brief


def make_bytes(size: int) -> bytes:
    """Return bytes whose content is not set yet. CPython allows that until other code has a reference to them."""
    made: bytes = _make_bytes(None, size)
    return made


def find_address(made: bytes) -> int:
    """Return where the content of bytes lies."""
    address: int = _find_address(made)
    return address

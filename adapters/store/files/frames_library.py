"""Finds the compiled library that makes, reads and sums frames (frames.h, sums.h), and memory for what it makes."""

from __future__ import annotations

import ctypes
from functools import cache


@cache
def load_functions() -> ctypes.CDLL | None:
    """Return the library's functions, which let go of the interpreter. None where there is no library."""
    from adapters.models.kernels.cpu.native.native_library import find_library  # noqa: PLC0415 - readers need none

    library = find_library()
    return None if library is None else library.code


@cache
def load_brief_functions() -> ctypes.PyDLL | None:
    """Return the same functions, which keep the interpreter."""
    from adapters.models.kernels.cpu.native.native_library import find_library  # noqa: PLC0415 - readers need none

    library = find_library()
    return None if library is None else library.brief


def make_bytes(size: int) -> bytes:
    """Return bytes whose content is not set yet. CPython allows that until other code has a reference to them."""
    make = ctypes.pythonapi.PyBytes_FromStringAndSize
    make.argtypes = [ctypes.c_char_p, ctypes.c_ssize_t]
    make.restype = ctypes.py_object
    made: bytes = make(None, size)
    return made


def find_address(made: bytes) -> int:
    find = ctypes.pythonapi.PyBytes_AsString
    find.argtypes = [ctypes.py_object]
    find.restype = ctypes.c_void_p
    address: int = find(made)
    return address

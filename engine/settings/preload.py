"""Opens the libraries that a server needs. The system's linker opens one at a time and does not need the interpreter.

Torch's libraries take a fifth of a second, those for GPUs more. So they are opened first of all, on a thread, while
Python modules are imported: the command line, modules without torch, and then torch itself. An import that opens
another library meanwhile waits for them. So small libraries, Python's own among them, come before.
"""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import NoReturn

from adapters import process_memory

# Every module with libraries of its own that a server imports before torch.
SMALL = (
    *("asyncio", "bz2", "cmath", "csv", "decimal", "lzma", "multiprocessing.shared_memory", "queue", "resource"),
    *("statistics", "unicodedata", "uuid", "zlib"),
    *(
        "llguidance",
        "msgspec",
        "numpy",
        "tokenizers",
        "watchfiles",
        "zstandard",
    ),  # uvicorn takes watchfiles if it is there
)
OPENING = "torch"  # what the thread is called
CALLED = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain")  # of a GPU's driver


@contextmanager
def preload_libraries(words: Sequence[str]) -> Iterator[None]:
    """Open torch's libraries on a thread while the block runs, if these words of a command line start a server."""
    if words[:1] != ["serve"] or not {"-h", "--help"}.isdisjoint(words):
        yield
        return
    process_memory.limit_arenas()
    # Imported modules stay, so there is nothing to collect (`start_progress.speed_up_imports`).
    gc.disable()
    try:
        for name in SMALL:
            with suppress(ImportError):  # the import that needs it reports this
                import_module(name)
        if gpu_driver() is not None and importlib.util.find_spec("triton") is not None:
            with suppress(ImportError):
                import_module("triton")
        Thread(target=open_torch, name=OPENING).start()
        yield
    finally:
        gc.enable()


def is_preloading() -> bool:
    return any(thread.name == OPENING for thread in threading.enumerate())


def exit_process(status: int) -> NoReturn:
    """End the process. If libraries are still being opened, end it at once: an interpreter that ends meanwhile would
    crash.
    """
    if is_preloading():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def open_torch() -> None:
    """Open libraries as `import torch` does, but without the interpreter's lock, which `ctypes.CDLL` holds. What fails
    here fails again in torch.
    """
    dlopen = getattr(ctypes.CDLL(None), "dlopen", None)
    if dlopen is None:
        return
    dlopen.restype = ctypes.c_void_p
    for name, mode in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL)):
        if found := torch_library(name):
            dlopen(os.fsencode(found), mode | os.RTLD_NOW)


def torch_library(name: str) -> Path | None:
    """Return the path of a library of torch. None if this build has none of that name, or there is no torch."""
    found = importlib.util.find_spec("torch")
    library = None if found is None or found.origin is None else Path(found.origin).with_name("lib") / name
    return library if library is not None and library.is_file() else None


@cache
def gpu_driver() -> ctypes.CDLL | None:
    """Return the driver of the GPU with the functions that are called looked up. None if there is none, or torch has no
    use for it.
    """
    if torch_library("libtorch_cuda.so") is None:
        return None
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if all(hasattr(driver, name) for name in CALLED) else None

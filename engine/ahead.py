"""What a server imports besides torch, while a thread has torch's libraries opened."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from importlib import import_module
from pathlib import Path
from threading import Thread

# Of others, with libraries of their own or of Python's: the linker opens one at a time, so these come first.
OTHERS = (
    *("llguidance", "msgspec", "numpy", "prometheus_client", "tokenizers"),
    *("uvicorn.protocols.http.h11_impl", "zstandard"),
)
OURS = ("engine.door", "engine.trace", "adapters.http.app", "adapters.http.server", "adapters.text.text")


def import_beside_torch() -> None:
    """All that needs no torch. Opening its libraries takes 0.2 s, more where they are CUDA's, and no interpreter: some
    thousand operators register themselves.
    """
    for name in OTHERS:
        import_module(name)
    Thread(target=open_torch, name="torch", daemon=True).start()
    for name in OURS:
        import_module(name)


def open_torch() -> None:
    """As `import torch` does it, but without the interpreter's lock, which `ctypes.CDLL` keeps. What goes wrong here
    goes wrong again there, and is told there.
    """
    found, dlopen = importlib.util.find_spec("torch"), getattr(ctypes.CDLL(None), "dlopen", None)
    if found is None or found.origin is None or dlopen is None:
        return
    dlopen.restype = ctypes.c_void_p
    folder = Path(found.origin).with_name("lib")
    for name, mode in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL)):
        dlopen(os.fsencode(folder / name), mode | os.RTLD_NOW)

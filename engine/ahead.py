"""What a server imports besides torch, while a thread has torch's libraries opened."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread

from adapters.checkpoint import digest
from engine.later import import_later
from engine.plan import Where

# Of others, with libraries of their own or of Python's: the linker opens one at a time, so these come first.
OTHERS = (
    *("llguidance", "msgspec", "numpy", "prometheus_client", "tokenizers"),
    *("uvicorn.protocols.http.h11_impl", "zstandard"),
)
OURS = ("engine.door", "engine.trace", "adapters.http.app", "adapters.http.server", "adapters.text.text")
# What torch's operations do to tensors without numbers, in Python: a quarter of `import torch`, and for its compiler.
TRACED, COMPILER = "torch._meta_registrations", ("torch._dynamo",)
# Seconds that a thread may keep the interpreter for while another one wants it. With 0.005, Python's own, the lane, and
# its device with it, waits for the event loop several times a step, which waits for others with each event that it
# writes: 32 streams on a GPU took 11.3 ms, and 7.1 with 0.0003. With this, one step in a hundred is late by 2 less.
SWITCH_S = 0.0001


def import_beside_torch(folders: Iterable[Path], gpu: int | None = None) -> None:
    """All that needs no torch. Opening its libraries takes 0.2 s, more where they are CUDA's, and no interpreter: some
    thousand operators register themselves. Nor do others that begin here: the digests of the weights in `folders`, and
    where a GPU is going to be used, and is there, its context and Triton's digest of itself.
    """
    sys.setswitchinterval(SWITCH_S)
    import_later(TRACED, COMPILER)
    for folder in folders:
        digest.begin(folder)
    driver = None if gpu is None or not torch_library("libtorch_cuda.so") else gpu_driver()
    if driver is not None:
        Thread(target=open_gpu, args=(driver, gpu), name="gpu", daemon=True).start()
    for name in OTHERS:
        import_module(name)
    triton = driver is not None and importlib.util.find_spec("triton") is not None
    if triton:
        import_module("adapters.models.kernels.triton_compile").key_beside()
    Thread(target=open_torch, name="torch", daemon=True).start()
    for name in OURS:
        import_module(name)
    for name in kernels() if triton else ():
        with suppress(ImportError):  # goes wrong again where there turns out to be a GPU for it
            import_module(name)


def kernels() -> Iterator[str]:
    """The modules of what is written in Triton, and for it alone."""
    package = import_module("adapters.models.kernels.triton")
    return (found.name for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))


def open_torch() -> None:
    """As `import torch` does it, but without the interpreter's lock, which `ctypes.CDLL` keeps. What goes wrong here
    goes wrong again there, and is told there.
    """
    dlopen = getattr(ctypes.CDLL(None), "dlopen", None)
    if dlopen is None:
        return
    dlopen.restype = ctypes.c_void_p
    for name, mode in (("libtorch_global_deps.so", os.RTLD_GLOBAL), ("libtorch.so", os.RTLD_LOCAL)):
        if found := torch_library(name):
            dlopen(os.fsencode(found), mode | os.RTLD_NOW)


def torch_library(name: str) -> Path | None:
    """None where this build of torch has none of that name, or there is no torch."""
    found = importlib.util.find_spec("torch")
    library = None if found is None or found.origin is None else Path(found.origin).with_name("lib") / name
    return library if library is not None and library.is_file() else None


def gpu_driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def open_gpu(driver: ctypes.CDLL, number: int) -> None:
    """Its context, which torch then finds. What goes wrong here goes wrong again there, and is told there."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), number):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def first_gpu(devices: Sequence[Where]) -> int | None:
    """Of those that were asked for, the first one of this process that is a GPU, or may be one."""
    found = (re.fullmatch(r"(?:auto|cuda)(?::(\d+))?", one.device) for one in devices if not one.remote)
    return next((int(one[1] or 0) for one in found if one), None)

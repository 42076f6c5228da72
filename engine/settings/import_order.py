"""Imports what a server needs besides torch while torch's libraries are opened (`preload.py`)."""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Thread

from adapters.checkpoint import weights_digest
from adapters.models.kernels.factory import has_triton, list_triton_modules, start_kernel_key
from engine.settings.placement import DeviceLocation
from engine.settings.preload import gpu_driver, is_preloading

TEXT = "adapters.text.model_text"  # its tokenizer is read while torch is imported
# Modules that a server needs later. With a GPU, those that are left when torch can be imported are imported while the
# model is loaded, which leaves the interpreter idle half of the time. Without a GPU, the processor is busy with the
# model then.
# loaded, which leaves the interpreter idle half of the time there. A processor has the model's own work to do then.
OURS = (
    *(
        "engine.core.event_loop",
        "engine.core.submission",
        "engine.core.trace",
        "adapters.http.wire.connection",
        "adapters.http.answer.reply",
    ),
    *("adapters.http.apis.openai_stored_responses", "adapters.http.app", "adapters.http.wire.server"),
)
# Seconds that a thread may keep the interpreter while another one wants it. With 0.005, Python's own value, the lane
# and its device wait for the event loop several times a step, and the event loop waits for others with each event that
# it writes. 32 streams on a GPU took 11.3 ms a step, and 7.1 ms with 0.0003. With this value, one step in a hundred is
# 2 ms less late.
SWITCH_S = 0.0001


def import_beside_torch(folders: Iterable[Path], gpu: int | None = None) -> None:
    """Import what needs no torch. With a GPU, continue only until torch's libraries are open."""
    sys.setswitchinterval(SWITCH_S)
    for folder in folders:
        weights_digest.start_digest(folder)
    driver = None if gpu is None else gpu_driver()
    if driver is not None:
        Thread(target=open_gpu, args=(driver, gpu), name="gpu", daemon=True).start()
    triton = driver is not None and has_triton()
    if triton:
        start_kernel_key()
    import_module(TEXT)
    for name in list_triton_modules() if triton else ():
        # The same import fails again, and is reported, if there turns out to be a GPU for it.
        with suppress(ImportError):
            import_module(name)
    for name in OURS:
        if driver is not None and not is_preloading():
            return
        import_module(name)


def open_gpu(driver: ctypes.CDLL, number: int) -> None:
    """Open the context of a GPU, which torch then finds. What fails here fails again in torch, which reports it."""
    device = ctypes.c_int()
    context = ctypes.c_void_p()
    if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), number):
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def first_gpu(devices: Sequence[DeviceLocation]) -> int | None:
    """Return the number of the first device of this process that is a GPU, or may be one."""
    found = (
        re.fullmatch(r"(?:auto|cuda)(?::(\d+))?", location.device) for location in devices if not location.is_remote
    )
    return next((int(match[1] or 0) for match in found if match), None)

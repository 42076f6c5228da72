"""How soon a thread gives way to others, and is heard itself: the slices that Linux's scheduler plans with.

From Linux 6.12 on (EEVDF) whoever wakes with a shorter slice than the thread that runs goes first, if it has had less
than its share. Shares of a processor stay what they are, whatever else runs there.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading

HEARD_NS = 100_000  # of who is waited for, and has little to do at a time; the kernel takes no less
WORK_NS = 10_000_000  # of who computes all the time
SETATTR = {"x86_64": 314, "aarch64": 274}  # sched_setattr(2), which few C libraries have a function for
FAIR = {getattr(os, name) for name in ("SCHED_OTHER", "SCHED_BATCH") if hasattr(os, name)}


class Attributes(ctypes.Structure):
    """`struct sched_attr` as of Linux 3.14."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def take_slices(ns: int) -> bool:
    """Of the calling thread, and of those that it starts from now on. False where the system does not let it, or does
    not run it by shares; a kernel before 6.12 passes over what it is asked.
    """
    number = SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or (policy := os.sched_getscheduler(0)) not in FAIR:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    asked = Attributes(ctypes.sizeof(Attributes), policy, 0, nice, 0, ns, 0, 0)
    return not ctypes.CDLL(None).syscall(ctypes.c_long(number), 0, ctypes.byref(asked), 0)

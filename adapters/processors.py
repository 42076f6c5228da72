"""The processors that this process may use."""

from __future__ import annotations

import os
import sys


def count_processors() -> int:
    """Return the number of processors that this process may run on.

    `os.cpu_count` counts all of the machine. A container, `taskset` and a fleet on one machine give a process fewer.
    """
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

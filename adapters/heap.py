"""What the C library holds of memory that nobody uses any more."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Free pages go back to the system, those between allocations too. Some 20 ms, in which others' wait."""
    call = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if call is not None:
        call(0)

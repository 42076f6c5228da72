"""Calls from the threads of a device to the event loop. The lane reports what a decode step gave in this way.

Theory of operation
-------------------

`call_soon_threadsafe` of asyncio wakes the event loop by a write to a socket, and Python lets go of the interpreter for
that write. The event loop takes the interpreter then, and the lane cannot go on until the event loop waits for
something. So the work of the event loop for a token comes between two decode steps, although it could be done while the
next step computes.

A `LoopCaller` wakes the event loop by a write that keeps the interpreter. The lane goes on and begins its next step. A
step lets go of the interpreter as soon as it computes, and the event loop does its work meanwhile.

Invariants:

* Functions are called on the event loop, in the order of the calls from all threads.
* The pipe holds at most one byte, so a write never waits.
* The pipe is closed when neither the event loop nor a thread refers to its `LoopCaller`. Until then its numbers are not
  used for another file, so a late call writes nowhere else.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import deque
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary, finalize, ref

from anyio.lowlevel import current_token
from attrs import define, field

# `PyDLL` keeps the interpreter during a call, and `CDLL` does not.
_system = ctypes.PyDLL(None)
_system.write.argtypes = _system.read.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]
_system.write.restype = _system.read.restype = ctypes.c_ssize_t
_BYTE = ctypes.create_string_buffer(1)


@define(eq=False)
class LoopCaller:
    """Calls functions on one event loop, for any thread. Made on the event loop."""

    _loop: ref[asyncio.AbstractEventLoop]
    _read_end: int = field(init=False)
    _write_end: int = field(init=False)
    _waiting: deque[tuple[Context, Callable[..., object], tuple[Any, ...]]] = field(init=False, factory=deque)
    _is_woken: bool = field(init=False, default=False)

    def __attrs_post_init__(self) -> None:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        finalize(self, close_pipe, self._read_end, self._write_end)

    def call(self, context: Context, function: Callable[..., object], *arguments: object) -> None:
        """Have a function called on the event loop, in a context. Called on any thread.

        Raises RuntimeError if the event loop has closed.
        """
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._waiting.append((context, function, arguments))
        if not self._is_woken:
            self._is_woken = True
            _system.write(self._write_end, _BYTE, 1)

    def serve(self) -> None:
        """Call the functions that wait. Called on the event loop when the pipe has something to read.

        What a function raises goes to the exception handler of the event loop, as with `call_soon`.
        """
        _system.read(self._read_end, _BYTE, 1)
        # Cleared first: a call that comes while these functions run is called now, or it wakes the event loop again.
        self._is_woken = False
        for _ in range(len(self._waiting)):
            context, function, arguments = self._waiting.popleft()
            try:
                context.run(function, *arguments)
            except Exception as error:  # noqa: BLE001 - the handler gets it
                details = {"message": f"exception in {function}", "exception": error}
                asyncio.get_running_loop().call_exception_handler(details)


# By event loop. A caller refers to its event loop weakly, so an event loop that is gone takes its caller with it.
_callers: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCaller] = WeakKeyDictionary()


def make_loop_caller() -> Callable[..., object]:
    """Return a function that any thread may call: it has its first argument called with the others on this event loop.

    Called on the event loop. The call happens in a copy of the context of now. All functions that are returned on one
    event loop keep the order of their calls. They raise RuntimeError if the event loop has closed.
    """
    loop = cast("asyncio.AbstractEventLoop", current_token().native_token)
    caller = _callers.get(loop)
    if caller is None:
        caller = LoopCaller(ref(loop))
        loop.add_reader(caller._read_end, caller.serve)  # noqa: SLF001
        _callers[loop] = caller
    return partial(caller.call, copy_context())


def close_pipe(*ends: int) -> None:
    """Close both ends of a pipe."""
    for end in ends:
        os.close(end)

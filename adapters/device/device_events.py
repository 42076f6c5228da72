"""Events of a device that are not the outcome of an effect, and the port by which they reach the engine.

The executor is built while a model is loaded, and the engine that folds its events is built around the executor. Both
get the same port: the executor reports to it, and the engine connects to it once an event loop runs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from attrs import define, field, frozen

from adapters.device.lane.lane import make_loop_caller
from effects.ids import SlotId


@frozen
class SlotRowsLost:
    """These slots do not have the rows that the engine counts on."""

    slots: tuple[SlotId, ...]


@frozen
class DraftProcessChanged:
    """The process of a remote draft is gone, or it is there again."""

    is_there: bool


@frozen
class ExpertUseCounted:
    """Decode steps have used experts. counts: uses of each expert since the last report (`HostExperts.report`)."""

    counts: tuple[int, ...]


DeviceEvent: TypeAlias = SlotRowsLost | DraftProcessChanged | ExpertUseCounted


@define(eq=False)
class DeviceEventPort:
    """Carries events from the threads of a device to one handler on the event loop.

    An event that is reported before a handler is connected is dropped: nothing has been opened for a request yet, so
    the engine counts on no rows.
    """

    _handler: Callable[[DeviceEvent], object] = field(init=False, default=lambda _: None)
    _call_on_loop: Callable[..., object] = field(init=False, default=lambda *_: None)

    def connect(self, handler: Callable[[DeviceEvent], object]) -> None:
        """Deliver events to `handler` from now on. Called on the event loop, before the first launch."""
        self._handler = handler
        self._call_on_loop = make_loop_caller()

    def deliver(self, event: DeviceEvent) -> None:
        """Call the handler at once. Called on the event loop."""
        self._handler(event)

    def report(self, event: DeviceEvent) -> None:
        """Have the handler called on the event loop, in the order of the reports. Called on any thread.

        An outcome that the same thread reports afterwards arrives after the event.
        """
        with suppress(RuntimeError):  # the event loop has closed, so the engine has ended
            self._call_on_loop(self._handler, event)

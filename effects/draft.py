"""Draft residency: bring the draft's weights in, send them away."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import DeviceFailed, Lane


@frozen
class DraftUnparked:
    """The draft's weights are on the device."""

    bytes: int = 0  # that were moved
    ns: int = 0  # what that took; 0: not measured


@frozen
class DraftParked:
    """The draft is no longer needed by this request; its weights may have left the device."""

    bytes: int = 0
    ns: int = 0


@frozen
class UnparkDraft:
    outcomes: ClassVar = (DraftUnparked, DeviceFailed)
    lane: ClassVar = Lane.DEVICE


@frozen
class ParkDraft:
    """Nobody needs the draft now. Its weights go to host memory, or, to be released, nowhere."""

    outcomes: ClassVar = (DraftParked, DeviceFailed)
    lane: ClassVar = Lane.DEVICE
    release: bool = False

"""Draft residency: bring the draft's weights in, send them away."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import DeviceFailed, Lane


@frozen
class DraftUnparked:
    """The draft's weights are on the device."""


@frozen
class DraftParked:
    """The draft is no longer needed by this request; its weights may have left the device."""


@frozen
class UnparkDraft:
    outcomes: ClassVar = (DraftUnparked, DeviceFailed)
    lane: ClassVar = Lane.DEVICE


@frozen
class ParkDraft:
    outcomes: ClassVar = (DraftParked, DeviceFailed)
    lane: ClassVar = Lane.DEVICE

"""Where models' weights are: bring them in, send them away."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import DeviceFailed, ModelName, Side


@frozen
class ModelLoaded:
    """The model's weights are on its device."""

    bytes: int = 0  # that were moved
    ns: int = 0  # what that took; 0: not measured
    name: ModelName = "draft"


@frozen
class ModelUnloaded:
    """The model is no longer needed by this request; its weights may have left the device."""

    bytes: int = 0
    ns: int = 0


@frozen
class LoadModel:
    outcomes: ClassVar = (ModelLoaded, DeviceFailed)
    side: ClassVar = Side.DEVICE
    name: ModelName


@frozen
class UnloadModel:
    """Nobody needs it now. Its weights go to host memory where they are kept, or else nowhere."""

    outcomes: ClassVar = (ModelUnloaded, DeviceFailed)
    side: ClassVar = Side.DEVICE
    name: ModelName
    keep: bool = True

"""Residency of models: load their weights to the device, and unload them."""

from __future__ import annotations

from typing import ClassVar

from attrs import frozen

from effects.ids import DeviceFailed, ModelName, Side


@frozen
class ModelLoaded:
    """The model's weights are on its device."""

    bytes: int = 0  # that were moved
    ns: int = 0  # nanoseconds that the move took; 0: not measured
    name: ModelName = "draft"


@frozen
class ModelUnloaded:
    """The model is no longer needed by this request; its weights may have left the device."""

    bytes: int = 0
    ns: int = 0


@frozen
class LoadModel:
    """Move a model's weights to its device, and lease the model to the request."""

    outcomes: ClassVar = (ModelLoaded, DeviceFailed)
    side: ClassVar = Side.DEVICE
    name: ModelName


@frozen
class UnloadModel:
    """Move a model's weights off its device, because no request needs them now."""

    outcomes: ClassVar = (ModelUnloaded, DeviceFailed)
    side: ClassVar = Side.DEVICE
    name: ModelName
    keep: bool = True  # keep the weights in host memory; otherwise release them, and read them from disk next time

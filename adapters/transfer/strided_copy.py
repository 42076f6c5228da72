"""Copies rows between host memory and a GPU with its copy engines, so that its processors are left to computation.

CUDA's driver copies boxes of three dimensions, with a pitch between rows and a distance between planes
(`cuMemcpy3DAsync`). Torch does not offer that. It would gather rows into memory of its own with a kernel, and copy
that.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

HOST = 1  # CU_MEMORYTYPE_HOST
DEVICE = 2  # CU_MEMORYTYPE_DEVICE


class BoxSide(ctypes.Structure):
    """Half of CUDA_MEMCPY3D, the source or the target. Fields are in bytes, but for `height`: rows of a plane."""

    _fields_ = (
        ("x", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("z", ctypes.c_size_t),
        ("level", ctypes.c_size_t),
        ("kind", ctypes.c_uint),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_ulonglong),
        ("array", ctypes.c_void_p),
        ("reserved", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


class Box(ctypes.Structure):
    """CUDA_MEMCPY3D of CUDA's driver interface."""

    _fields_ = (
        ("source", BoxSide),
        ("target", BoxSide),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    )


@cache
def _load_driver() -> Any:
    return ctypes.CDLL("libcuda.so.1").cuMemcpy3DAsync_v2


def copy_box(target: Tensor, source: Tensor) -> None:
    """Copy `[layers, parts, heads, rows, width]` between host memory and the current device, on the current stream.

    Raises ValueError where the shapes differ or one side is no box: a head's rows must be contiguous, a plane (the
    keys or values of a layer) must be a multiple of the distance between heads, and planes equally far apart. Raises
    RuntimeError where CUDA fails.
    """
    if source.shape != target.shape or source.dtype != target.dtype or source.is_cuda == target.is_cuda:
        raise ValueError(f"{source.dtype} {tuple(source.shape)} does not go to {target.dtype} {tuple(target.shape)}")
    layers, parts, heads, rows, width = source.shape
    on = source if source.is_cuda else target
    box = Box(make_box_side(source), make_box_side(target), rows * width * source.itemsize, heads, layers * parts)
    failed = _load_driver()(ctypes.byref(box), ctypes.c_void_p(torch.cuda.current_stream(on.device).cuda_stream))
    if failed:
        raise RuntimeError(f"cuMemcpy3DAsync of {tuple(source.shape)}: CUDA error {failed}")


def make_box_side(rows: Tensor) -> BoxSide:
    """Return one side of a copy for `[layers, parts, heads, rows, width]`. ValueError if its strides are no box."""
    layer, plane, pitch, row, number = rows.stride()
    if number != 1 or row != rows.shape[4] or plane % pitch or layer != rows.shape[1] * plane:
        raise ValueError(f"rows of strides {rows.stride()} are no box")
    there = {"kind": DEVICE, "device": rows.data_ptr()} if rows.is_cuda else {"kind": HOST, "host": rows.data_ptr()}
    return BoxSide(pitch=pitch * rows.itemsize, height=plane // pitch, **there)

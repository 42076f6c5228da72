"""The factory of everything that depends on a backend: the one module outside the backends that imports them.

Other packages ask here for an implementation and see interfaces only: `Kernels` (`layer_interface.py`),
`SamplingKernels` (`sampling_interface.py`), `StepPacer` (`step_pacer.py`) and `KernelCompiler`
(`compiler_interface.py`). A backend is imported when it is first asked for, so an installation without Triton serves on
a processor. This module imports no torch itself, because a start asks it for work that overlaps the loading of torch's
libraries.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # all of these import torch
    from threading import Thread

    import torch

    from adapters.models.kernels.interfaces.compiler_interface import KernelCompiler
    from adapters.models.kernels.interfaces.expert_kernels import ExpertKernels
    from adapters.models.kernels.interfaces.layer_interface import Kernels
    from adapters.models.kernels.interfaces.sampling_interface import SamplingKernels
    from adapters.models.kernels.interfaces.step_pacer import StepPacer
    from adapters.models.kernels.interfaces.text_matching import TextMatcher

# The backends are imported inside the functions: those for CUDA need Triton, and all need torch.
# ruff: noqa: PLC0415


def build_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Return the operations of decoder layers for a device. dtype: the model's.

    Raises ValueError for a setting of the environment that the compiled library does not know.
    """
    if device.type == "cuda":
        from adapters.models.kernels.cuda.kernels import TritonKernels

        return TritonKernels(device)
    from adapters.models.kernels.cpu.kernels import CpuKernels

    return CpuKernels(dtype)


def build_expert_kernels(dtype: torch.dtype) -> ExpertKernels:
    """Return the products by which the host computes experts of a device's layers. dtype: the model's.

    Raises ValueError as `build_kernels` does.
    """
    from adapters.models.kernels.cpu.kernels import CpuKernels

    return CpuKernels(dtype)


@cache
def build_sampling(device: torch.device) -> SamplingKernels:
    """Return the operations that pick tokens from logits on a device; the same object for the same device."""
    if device.type == "cuda":
        from adapters.models.kernels.cuda.sampling import CudaSampling

        return CudaSampling(device)
    from adapters.models.kernels.cpu.sampling import HostSampling

    return HostSampling(device)


def build_step_pacer(device: torch.device) -> StepPacer:
    """Return what keeps decode steps at an even pace; on a processor it does nothing."""
    if device.type == "cuda":
        from adapters.models.kernels.cuda.step_pacer import CudaStepPacer

        return CudaStepPacer(device)
    from adapters.models.kernels.interfaces.step_pacer import NoStepPacer

    return NoStepPacer()


def build_compiler() -> KernelCompiler:
    """Return what compiles a GPU's kernels ahead of their first launch. Raises ImportError without Triton."""
    from adapters.models.kernels.cuda.compilation.compiler import TritonCompiler

    return TritonCompiler()


def build_text_matcher() -> TextMatcher | None:
    """Return what searches texts for earlier tokens like their end; None where there is no compiled library."""
    from adapters.models.kernels.cpu.native.native_library import find_library
    from adapters.models.kernels.cpu.native.texts import NativeTextMatcher

    library = find_library()
    return None if library is None else NativeTextMatcher(library)


def explain_missing_library() -> str:
    """Return why no compiled library serves on a processor; empty where one does."""
    from adapters.models.kernels.cpu.native.native_library import explain_missing

    return explain_missing()


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def start_kernel_key() -> Thread:
    """Start to compute Triton's digest of itself on a thread, which takes half a second. Imports no torch."""
    from adapters.models.kernels.cuda.compilation.compile import start_key

    return start_key()


def list_triton_modules() -> Iterator[str]:
    """List the modules that are written in Triton. None of them imports torch."""
    package = import_module("adapters.models.kernels.triton")
    return (found.name for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."))

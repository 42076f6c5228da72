"""Launches of Triton's kernels that look up the compiled form of a kernel only once for each kind of arguments."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_forms = dict[Hashable, tuple[Any, tuple[Any, ...]]]()  # the compiled form, and its constants in order
_withheld: ContextVar[bool] = ContextVar("withheld", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """Launch `kernel[grid](*args, **options)` in less time on the host.

    Triton inspects all arguments of each launch to find the compiled form, although it is the same one for every
    layer. args: the kernel's parameters without constants, in order. options: constants, and Triton's own options.
    """
    if _withheld.get():
        with suppress(
            TypeError
        ):  # the kernel has a constant that cannot be written down, so it is compiled where it is launched
            kernel.warmup(*args, grid=grid, **options)
        return
    key = (id(kernel), *options.items(), *map(specialization_key, args))
    found = _forms.get(key)
    if found is not None:
        form, constants = found
        form[(*grid, 1, 1)[:3]](*args, *constants)
    elif (form := kernel[grid](*args, **options)) is not None:
        if hasattr(form, "result"):  # newer Tritons return a future for a kernel that another thread compiles
            form = form.result()
        _forms[key] = form, tuple(options[name] for name in kernel.arg_names[len(args) :])


@contextmanager
def withhold_launches() -> Iterator[None]:
    """Withhold the launches of this context: Triton only looks for the compiled forms, and compiles those that are
    missing.
    """
    outer = _withheld.set(True)
    try:
        yield
    finally:
        _withheld.reset(outer)


def specialization_key(arg: Any) -> Hashable:
    """Return all facts of an argument that a compiled form may depend on: of a tensor its dtype, its device and its
    alignment, of a descriptor its block, of an integer its value.
    """
    if isinstance(arg, Tensor):
        return arg.dtype, arg.get_device(), arg.data_ptr() % 16
    if isinstance(arg, float):
        return float
    if (base := getattr(arg, "base", None)) is not None:
        return base.dtype, base.get_device(), *arg.block_shape, getattr(arg, "layout", None), arg.padding
    return type(arg), arg

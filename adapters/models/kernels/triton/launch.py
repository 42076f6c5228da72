"""Launches of Triton's kernels, of which each form is chosen once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_forms = dict[Hashable, tuple[Any, tuple[Any, ...]]]()  # what was compiled, and its constants in order
_withheld: ContextVar[bool] = ContextVar("withheld", default=False)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`, in less time on the host: Triton looks at all arguments of each launch for
    the form that was compiled for their like, though layer by layer it is the same one.

    args: the kernel's parameters but for constants, in order. options: constants, and what Triton takes besides.
    """
    if _withheld.get():
        with suppress(TypeError):  # a constant that cannot be written down: it is compiled where it is launched
            kernel.warmup(*args, grid=grid, **options)
        return
    key = (id(kernel), *options.items(), *map(likeness, args))
    found = _forms.get(key)
    if found is not None:
        form, constants = found
        form[(*grid, 1, 1)[:3]](*args, *constants)
    elif (form := kernel[grid](*args, **options)) is not None:
        if hasattr(form, "result"):  # it was compiled aside, and newer Tritons give what stands for it
            form = form.result()
        _forms[key] = form, tuple(options[name] for name in kernel.arg_names[len(args) :])


@contextmanager
def withholding() -> Iterator[None]:
    """Nothing is launched in here by this context: Triton looks for the forms alone, and compiles what is not there."""
    outer = _withheld.set(True)
    try:
        yield
    finally:
        _withheld.reset(outer)


def likeness(arg: Any) -> Hashable:
    """Of an argument all that a form may depend on: of a tensor its type, its device and what its address is a multiple
    of, of a descriptor what it brings, of a whole number all.
    """
    if isinstance(arg, Tensor):
        return arg.dtype, arg.get_device(), arg.data_ptr() % 16
    if isinstance(arg, float):
        return float
    if (base := getattr(arg, "base", None)) is not None:
        return base.dtype, base.get_device(), *arg.block_shape, getattr(arg, "layout", None), arg.padding
    return type(arg), arg

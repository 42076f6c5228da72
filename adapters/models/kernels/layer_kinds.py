"""Of a model's layers most are of one kind: what the first one of it makes on its first use, the others find made."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from adapters.models.kernels.offload import rebuilt

ALIGNED = 16  # bytes: what compilers of kernels tell addresses apart by

# By the identity of layers, which of them are left out; None: none of any.
_left_out: ContextVar[dict[int, Container[int]] | None] = ContextVar("left_out", default=None)


@contextmanager
def one_of_each() -> Iterator[None]:
    """Forwards of this thread on a GPU compute one layer of each kind. What they leave is of no meaning: kernels are
    there then, and buffers, after a fraction of the launches. Nothing is recorded meanwhile, and layers stay what they
    are.
    """
    outer = _left_out.set({})
    try:
        yield
    finally:
        _left_out.reset(outer)


def leaves_out() -> bool:
    """Is what forwards do now not all that they are there for?"""
    return _left_out.get() is not None


def left_out(numbers: range, layers: Sequence[Any]) -> Container[int]:
    """Of a forward through layers of these numbers and weights: none, or within `one_of_each` all but the first ones of
    each kind.
    """
    known = _left_out.get()
    if known is None:
        return ()
    if id(layers) not in known:
        first = {kind(layer): number for number, layer in reversed(list(zip(numbers, layers, strict=True)))}
        known[id(layers)] = set(numbers).difference(first.values())
    return known[id(layers)]


def kind(layer: object) -> str:
    """Layers of one kind launch the same kernels: they differ in the numbers of their weights alone."""
    return repr(rebuilt(layer, lambda one: (one.shape, one.stride(), one.dtype, one.data_ptr() % ALIGNED)))

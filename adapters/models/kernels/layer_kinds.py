"""Kinds of layers: most layers of a model launch the same kernels, so warming up one layer of each kind is enough."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from adapters.models.kernels.offload import map_tensors

ALIGNED = 16  # bytes; Triton compiles another form for addresses that are no multiple of this

# By the identity of a list of layers, which of them are left out. None: nothing is left out.
_left_out: ContextVar[dict[int, Container[int]] | None] = ContextVar("left_out", default=None)


@contextmanager
def run_one_of_each() -> Iterator[None]:
    """Let forwards of this context on a GPU compute only one layer of each kind.

    Their results mean nothing, but kernels and buffers exist afterwards, after a fraction of the launches. Nothing is
    recorded as a graph meanwhile. The layers themselves must not change.
    """
    outer = _left_out.set({})
    try:
        yield
    finally:
        _left_out.reset(outer)


def is_leaving_out() -> bool:
    """Return whether forwards of this context leave layers out now."""
    return _left_out.get() is not None


def skipped_layers(numbers: range, layers: Sequence[Any]) -> Container[int]:
    """Return which layers a forward leaves out: none, or inside `run_one_of_each` all but the first of each kind.

    numbers, layers: the layers of the forward and their weights.
    """
    known = _left_out.get()
    if known is None:
        return ()
    if id(layers) not in known:
        first = {describe_kind(layer): number for number, layer in reversed(list(zip(numbers, layers, strict=True)))}
        known[id(layers)] = set(numbers).difference(first.values())
    return known[id(layers)]


def describe_kind(layer: object) -> str:
    """Return a text that is equal for layers that launch the same kernels: they differ in the numbers of their
    weights alone.
    """
    return repr(map_tensors(layer, lambda one: (one.shape, one.stride(), one.dtype, one.data_ptr() % ALIGNED)))

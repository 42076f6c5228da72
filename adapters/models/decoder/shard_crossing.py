"""The numbers that cross from one shard of a model to the next one, for every token of a step.

For most models these are hidden states alone. A layer of Gemma 4 may read more: inputs of its own, which are made from
the token in the first shard, and the keys and values of an earlier layer. Both cross behind the hidden states, in one
tensor `[bucket, width]` of the model's dtype. The shard behind the cut writes such keys and values into memory of its
own, as the layer before the cut does. So it *borrows* that layer: it keeps, exports and restores the layer's rows as if
it computed them.

Rows cross as the bytes that are stored. So they are the same bits on both sides, in any format of rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import define, frozen
from torch import Tensor

from adapters.models.decoder.cache.kv_cache import KvCache
from adapters.models.decoder.layers.layer_buffers import Buffers
from adapters.models.kernels.step import Step


@frozen
class Crossing:
    """The numbers of one token that cross a cut.

    hidden: of its hidden state. inputs: of the inputs of all layers behind the cut. rows: for each layer before the cut
    that is borrowed behind it, how many numbers its keys and values take.
    """

    hidden: int
    inputs: int = 0
    rows: tuple[tuple[int, int], ...] = ()

    @property
    def width(self) -> int:
        return self.hidden + self.inputs + sum(size for _, size in self.rows)


@define(eq=False)
class CrossingPort:
    """Takes apart what a shard is given, and puts together what it leaves.

    given, left: the numbers of a token, at both ends of the shard. find_cache: returns the cache of a layer's rows, and
    the layer's index in it.
    """

    given: Crossing
    left: Crossing
    find_cache: Callable[[int], tuple[KvCache, int]]

    def make_left(self, hidden: Tensor) -> Tensor:
        """Return the tensor that the next shard is given: `hidden` itself if nothing else crosses."""
        width = self.left.width
        return hidden if width == self.left.hidden else hidden.new_zeros(len(hidden), width)

    def make_inputs(self, hidden: Tensor, layers: int) -> Tensor | None:
        """Return a tensor for the inputs of so many layers, `[bucket, layers, P]`; None: they have none."""
        inputs = self.given.inputs
        return hidden.new_zeros(len(hidden), layers, inputs // layers) if inputs else None

    def receive(self, step: Step, given: Tensor, buffers: Buffers) -> None:
        """Put the tensor that a shard is given into its buffers, and the borrowed layers' rows where they belong."""
        sizes = [self.given.hidden, self.given.inputs, *(size for _, size in self.given.rows)]
        hidden, inputs, *rows = torch.split(given, sizes, 1)
        buffers.hidden.copy_(hidden)
        if self.given.inputs:
            assert buffers.row_inputs is not None
            buffers.row_inputs.copy_(inputs.view(buffers.row_inputs.shape))
        for (layer, _), numbers in zip(self.given.rows, rows, strict=True):
            self._write_rows(layer, step, numbers)

    def leave(self, step: Step, buffers: Buffers) -> None:
        """Fill the tensor that the next shard is given. Called before rows behind a window are given back."""
        left = buffers.forward.hidden
        if left is buffers.hidden:
            return
        sizes = [self.left.hidden, self.left.inputs, *(size for _, size in self.left.rows)]
        hidden, inputs, *rows = torch.split(left, sizes, 1)
        hidden.copy_(buffers.hidden)
        if self.left.inputs:
            assert buffers.row_inputs is not None
            inputs.copy_(buffers.row_inputs.flatten(1)[:, -self.left.inputs :])
        for (layer, _), numbers in zip(self.left.rows, rows, strict=True):
            self._read_rows(layer, step, numbers)

    def _write_rows(self, layer: int, step: Step, numbers: Tensor) -> None:
        cache, index = self.find_cache(layer)
        spec = cache.spec
        at = 0
        for segment in step.segments:
            part = numbers[at : at + segment.count].contiguous().view(torch.uint8)
            rows = part.view(segment.count, len(cache.layout.parts), spec.heads, -1).permute(1, 2, 0, 3)
            cache.put_bytes(index, segment.slot, segment.start, rows)
            at += segment.count

    def _read_rows(self, layer: int, step: Step, numbers: Tensor) -> None:
        cache, index = self.find_cache(layer)
        at = 0
        for segment in step.segments:
            rows = (
                cache.read(index, segment.slot, segment.start, segment.start + segment.count)
                .permute(2, 0, 1, 3)
                .flatten(1)
            )
            numbers[at : at + segment.count].copy_(rows.contiguous().view(numbers.dtype))
            at += segment.count

"""A layer of a DFlash draft over the rows of blocks, with the convolutions of DFlash 2 if it has them."""

from __future__ import annotations

from attrs import frozen
from torch import Tensor

from adapters.models.decoder.layers.decoder_layer import finish_layer, project_inputs
from adapters.models.decoder.layers.feed_forward import run_feed
from adapters.models.drafts.dflash.weights import DraftLayer
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.kernels.interfaces.layer_interface import Kernels, Rope
from adapters.models.kernels.step_batch import BlockBatch


@frozen(eq=False)
class BlockAttention:
    """The attention of one layer's blocks. caches: the keys and values of the layer."""

    caches: tuple[Tensor, Tensor]
    mask: AttentionMask
    rope: Rope

    def run(self, kernels: Kernels, layer: DraftLayer, qkv: Tensor, batch: BlockBatch) -> Tensor:
        """Write the block's keys and values behind its context rows, and return what its rows attend to."""
        q = kernels.rotate_store(qkv, layer.decoder.prep, self.rope, batch, *self.caches)
        return kernels.attend_block(q, *self.caches, batch, self.mask)


def run_block_layer(
    kernels: Kernels,
    layer: DraftLayer,
    attention: BlockAttention,
    residual: Tensor,
    delta: Tensor | None,
    *,
    batch: BlockBatch,
) -> Tensor:
    """Run one layer: add `delta`, the result of the layer before, to the residual stream, and return its own result."""
    frame = layer.decoder.frame
    if layer.convolutions is None:
        attended = attention.run(kernels, layer, project_inputs(kernels, frame, residual, delta), batch)
        return finish_layer(kernels, frame, residual, attended, batch)
    around_attention, around_feed = layer.convolutions
    x = kernels.add_norm(residual, delta, frame.input_norm, frame.eps)
    x, factors = around_attention.enter(kernels, x, batch)
    attended = attention.run(kernels, layer, kernels.linear(x, frame.projection), batch)
    mixed = around_attention.leave(kernels.linear(attended, frame.out), factors, batch)
    x = kernels.add_norm(residual, mixed, frame.post_norm, frame.eps)
    x, factors = around_feed.enter(kernels, x, batch)
    return around_feed.leave(run_feed(kernels, frame.feed, x, batch), factors, batch)

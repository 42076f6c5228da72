"""The static tensors that a shard's forwards of one bucket write to, and the layers that run as one call there."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.decoder.layers.decoder_layer import DecoderLayer
from adapters.models.decoder.layers.tree_attention import TreeGroups
from adapters.models.kernels.interfaces.attention_rule import AttentionMask
from adapters.models.kernels.interfaces.experts_interface import GatedWeights
from adapters.models.kernels.interfaces.fused_layers import Embedding, FusedLayers
from adapters.models.kernels.interfaces.layer_interface import Kernels, Rope, WholeLayer
from adapters.models.kernels.step import Forward
from adapters.models.kernels.step_batch import StateBatch


@define(eq=False)
class Buffers:
    """The static tensors of one bucket. fused_layers: layers that run together, by the first one's number.

    row_inputs: `[R, layers, P]`, inputs of each layer's own, where a model has such; of the step that runs, and of this
    shard's layers and those behind them. hidden: of the step's rows; `forward.hidden` is another tensor if more than
    hidden states crosses to the next shard.
    """

    batch: StateBatch
    hidden: Tensor
    logits: Tensor | None
    forward: Forward
    fused_layers: Mapping[int, tuple[int, FusedLayers]]
    tree: TreeGroups | None = field(init=False, default=None)
    row_inputs: Tensor | None = field(init=False, default=None)
    fed: Tensor | None = field(init=False, default=None)

    def make_fed(self) -> Tensor:
        """Return the buffer of what experts of the host returned, `[R, D]`, made on first use."""
        if self.fed is None:
            self.fed = torch.zeros_like(self.hidden)
        return self.fed

    def logits_of(self, vocabulary: int) -> Tensor:
        """Return the buffer of logits, made on first use: it is large, and a prefill's bucket never needs it."""
        if self.logits is None:
            self.logits = torch.zeros(len(self.hidden), vocabulary, device=self.hidden.device)
        return self.logits

    @property
    def nbytes(self) -> int:
        aux_hidden_states = [
            aux_states for aux_states in self.forward.aux_hidden_states.values() if aux_states is not self.hidden
        ]
        left = None if self.forward.hidden is self.hidden else self.forward.hidden
        own = (self.logits, self.fed, self.tree, self.batch.table, self.hidden, left, *aux_hidden_states)
        return sum(tensor.nbytes for tensor in own if tensor is not None)


def fuse_layers(
    kernels: Kernels,
    layers: Mapping[int, tuple[DecoderLayer, tuple[Tensor, Tensor]]],
    rope: Rope,
    forward: Forward,
    embedding: Tensor | None,
) -> Mapping[int, tuple[int, FusedLayers]]:
    """Return the runs of layers that the kernels can carry out in one call: for each first layer, its end and the call.

    layers: the layers with attention, by number, and their caches. embedding: given if these contain the model's first
    layer, which then looks up the tokens as well.
    """
    found = dict[int, tuple[int, FusedLayers]]()
    whole = list[tuple[int, WholeLayer]]()
    for number, (layer, caches) in layers.items():
        if layer.is_plain and rope.query_scale is None and isinstance(layer.frame.feed, GatedWeights):
            before = forward.aux_hidden_states.get(number - 1)
            whole.append((number, whole_layer(layer, layer.frame.feed, caches, before)))
    for _, pairs in groupby(enumerate(whole), lambda pair: pair[1][0] - pair[0]):
        run = [tensor for _, tensor in pairs]
        made = kernels.fuse_layers(
            [layer for _, layer in run],
            rope,
            len(forward.hidden),
            Embedding(embedding) if run[0][0] == 0 and embedding is not None else None,
        )
        if made is not None:
            found[run[0][0]] = run[-1][0] + 1, made
    return found


def whole_layer(
    layer: DecoderLayer,
    feed: GatedWeights,
    caches: tuple[Tensor, Tensor],
    before: Tensor | None = None,
    mask: AttentionMask | None = None,
) -> WholeLayer:
    frame = layer.frame
    return WholeLayer(
        input_norm=frame.input_norm,
        projection=frame.projection,
        width=layer.width,
        prep=layer.prep,
        k_cache=caches[0],
        v_cache=caches[1],
        out=frame.out,
        post_norm=frame.post_norm,
        feed=feed,
        eps=frame.eps,
        before=before,
        mask=AttentionMask(causal=True) if mask is None else mask,
    )

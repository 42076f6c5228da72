"""Embedding and head of a target whose layers are elsewhere, for a draft that is here."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from attrs import define
from torch import Tensor

from adapters.checkpoint.weight_source import WeightSource
from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.shard import OutputHead, TargetHead
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.offload import count_bytes


@define(eq=False, slots=False)
class CopiedEnds:
    """Copies of the embedding and the head on a device of this process. They are read when a draft first needs them.

    config: that of a dense decoder. kernels: pack the head; None if no draft runs on the device of these layers.
    """

    config: Any
    weights: WeightSource
    kernels: Kernels | None
    dtype: torch.dtype
    device: torch.device

    @property
    def head(self) -> TargetHead:
        output = self.output
        return TargetHead(self.embedding, output.packed, output.norm)

    @property
    def _read(self) -> WeightReader:
        return WeightReader(self.weights, self.device, self.dtype, wide_norms=self.config.wide_norms)

    @cached_property
    def embedding(self) -> Tensor:
        scale = float(torch.tensor(self.config.embedding_scale, dtype=self.dtype))
        table = self._read("model.embed_tokens.weight")
        return table if scale == 1 else table * scale

    @cached_property
    def output(self) -> OutputHead:
        if self.kernels is None:
            raise ValueError("the head is not on the device of these layers")
        norm = self._read.norm("model.norm.weight", zero_centred=self.config.zero_centred)
        own = self._read("model.embed_tokens.weight") if self.config.embedding_scale != 1 else self.embedding
        head = self._read.head(own if self.config.tie_word_embeddings else None)
        return OutputHead(self.kernels.pack(head), norm)

    @property
    def nbytes(self) -> int:
        """The bytes of the weights that were read so far."""
        own = self.__dict__
        output = own.get("output")
        return count_bytes((own.get("embedding"), None if output is None else (output.packed, output.norm)))

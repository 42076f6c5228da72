"""The first step of drafts that read several layers of their target: their outputs are reduced to D values a row.

A draft does this itself if it is in the target's process. For a draft in another process `FeatureProjection` does it in
the target's process, so that only these values cross and not the outputs of all auxiliary layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.decoder.layers.weight_reader import WeightReader
from adapters.models.decoder.pipeline.pipelined_chunks import use_device, use_inference_mode
from adapters.models.drafts.draft_parts import DraftWeights
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.offload import OffloadableWeights
from adapters.models.kernels.step import Step
from adapters.models.kernels.step_batch import Batch


@frozen(eq=False)
class TapFusion:
    """The weights that reduce the outputs of K auxiliary layers, which lie side by side, to D values a row.

    fc: the packed product. layer_norms: norms of each layer's output, or none. joint_norm: of all outputs together.
    out_norm: of the result. None: there is no such norm.
    """

    fc: Any
    eps: float
    layer_norms: tuple[Tensor, ...] = ()
    joint_norm: Tensor | None = None
    out_norm: Tensor | None = None

    def run(self, kernels: Kernels, taps: Tensor) -> Tensor:
        """Return the features `[R, D]` of taps `[R, K * width]`."""
        if self.joint_norm is not None:
            taps = kernels.add_norm(taps, None, self.joint_norm, self.eps)
        if self.layer_norms:
            parts = zip(taps.chunk(len(self.layer_norms), 1), self.layer_norms, strict=True)
            taps = torch.cat([kernels.add_norm(part.contiguous(), None, norm, self.eps) for part, norm in parts], 1)
        features = kernels.linear(taps, self.fc)
        return features if self.out_norm is None else kernels.add_norm(features, None, self.out_norm, self.eps)


@frozen
class TapShape:
    """The auxiliary layers that a draft reads. width: of each output. features: values a row of the result. load: loads
    the weights.
    """

    layers: tuple[int, ...]
    width: int
    features: int
    load: Callable[[WeightReader, Kernels], TapFusion]


@define(eq=False)
class ProjectionBuffers:
    """The static tensors of one bucket. taps: `[bucket, K * width]`; out: `[bucket, D]`."""

    batch: Batch
    taps: Tensor
    out: Tensor


@define(eq=False)
class FeatureProjection:
    """Computes a draft's features from the outputs of the auxiliary layers, with the bits that the draft would compute.

    kernels: an instance of the projection's own, for the target's device.
    """

    shape: TapShape
    source: DraftWeights
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    _offloadable: OffloadableWeights[TapFusion] = field(init=False)
    _buffers: dict[int, ProjectionBuffers] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._offloadable = OffloadableWeights(self._load_weights, self.device)
        self._offloadable.load_back()

    def _load_weights(self) -> TapFusion:
        with use_device(self.device):
            return self.shape.load(WeightReader(self.source, self.device, self.dtype), self.kernels)

    @property
    def bit_signature(self) -> str:
        return repr(self.kernels.bit_signature)

    def project(self, step: Step, aux_hidden_states: Mapping[int, Tensor]) -> Tensor:
        loaded = self._offloadable.loaded
        assert loaded is not None, "the projection's weights are offloaded"
        buffers = self._find_buffers(step.bucket)

        def body() -> None:
            buffers.out.copy_(loaded.run(self.kernels, buffers.taps))

        with use_inference_mode(), use_device(self.device):
            here = [aux_hidden_states[layer].to(self.device) for layer in self.shape.layers]
            torch.cat(here, 1, out=buffers.taps)
            buffers.batch.load(step, None)
            self.kernels.prepare_step(buffers.batch)
            self.kernels.launch("project", buffers.batch, body)
        return buffers.out

    def offload(self) -> int:
        self._forget_recordings()
        return self._offloadable.offload()

    def load_back(self) -> int:
        """Bring the weights back and return their bytes. Raises as `OffloadableWeights.load_back` does."""
        return self._offloadable.load_back()

    def release(self) -> None:
        self._forget_recordings()
        self._offloadable.release()

    def memory(self) -> Mapping[str, int]:
        # Other threads call this as well, so it iterates over a copy.
        buffers = tuple(self._buffers.values())
        held = sum(buffer.batch.table.nbytes + buffer.taps.nbytes + buffer.out.nbytes for buffer in buffers)
        return {"weights": self._offloadable.weights_bytes, "host": self._offloadable.host_bytes, "buffers": held}

    def _forget_recordings(self) -> None:
        """Drop the buffers and the recorded graphs, which contain the weights' addresses."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.kernels = self.kernels.copy_for_shard()
        self._buffers.clear()

    def _find_buffers(self, bucket: int) -> ProjectionBuffers:
        if bucket not in self._buffers:
            width = len(self.shape.layers) * self.shape.width
            taps = torch.zeros(bucket, width, dtype=self.dtype, device=self.device)
            out = torch.zeros(bucket, self.shape.features, dtype=self.dtype, device=self.device)
            self._buffers[bucket] = ProjectionBuffers(Batch(bucket, self.device), taps, out)
        return self._buffers[bucket]

"""The first step of a DFlash draft, for a draft that runs in another process than its target.

The step reduces the outputs of the auxiliary layers to D values a row. It runs in the target's process, so that only
these values cross and not the outputs of all auxiliary layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

from adapters.models.decoder.pipelined_chunks import use_device, use_inference_mode
from adapters.models.decoder.weight_reader import WeightReader
from adapters.models.drafts.dflash.config import DFlashConfig
from adapters.models.drafts.draft_parts import DraftWeights
from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.offload import OffloadableWeights
from adapters.models.kernels.step import Step
from adapters.models.kernels.step_batch import Batch


@frozen
class ProjectionWeights:
    fc: Any
    norm: Tensor


@define(eq=False)
class ProjectionBuffers:
    """The static tensors of one bucket. fused: `[bucket, K D]`; out: `[bucket, D]`."""

    batch: Batch
    fused: Tensor
    out: Tensor


@define(eq=False)
class FeatureProjection:
    """Computes norm(fc(outputs of the auxiliary layers)), as the draft itself would.

    kernels: an instance of the projection's own, for the target's device.
    """

    config: DFlashConfig
    source: DraftWeights
    kernels: Kernels
    device: torch.device
    dtype: torch.dtype
    _offloadable: OffloadableWeights[ProjectionWeights] = field(init=False)
    _buffers: dict[int, ProjectionBuffers] = field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self._offloadable = OffloadableWeights(self._load_weights, self.device)
        self._offloadable.load_back()

    def _load_weights(self) -> ProjectionWeights:
        with use_device(self.device):
            read = WeightReader(self.source, self.device, self.dtype)
            return ProjectionWeights(self.kernels.pack(read("fc.weight")), read("hidden_norm.weight"))

    @property
    def bit_signature(self) -> str:
        return repr(self.kernels.bit_signature)

    def project(self, step: Step, aux_hidden_states: Mapping[int, Tensor]) -> Tensor:
        loaded = self._offloadable.loaded
        assert loaded is not None, "the projection's weights are offloaded"
        buffers = self._find_buffers(step.bucket)

        def body() -> None:
            joined = self.kernels.linear(buffers.fused, loaded.fc)
            buffers.out.copy_(self.kernels.add_norm(joined, None, loaded.norm, self.config.rms_norm_eps))

        with use_inference_mode(), use_device(self.device):
            here = [aux_hidden_states[layer].to(self.device) for layer in self.config.aux_layers]
            torch.cat(here, 1, out=buffers.fused)
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
        held = sum(buffer.batch.table.nbytes + buffer.fused.nbytes + buffer.out.nbytes for buffer in buffers)
        return {"weights": self._offloadable.weights_bytes, "host": self._offloadable.host_bytes, "buffers": held}

    def _forget_recordings(self) -> None:
        """Drop the buffers and the recorded graphs, which contain the weights' addresses."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.kernels = self.kernels.copy_for_shard()
        self._buffers.clear()

    def _find_buffers(self, bucket: int) -> ProjectionBuffers:
        if bucket not in self._buffers:
            width = self.config.hidden_size
            fused = torch.zeros(bucket, len(self.config.aux_layers) * width, dtype=self.dtype, device=self.device)
            out = torch.zeros(bucket, width, dtype=self.dtype, device=self.device)
            self._buffers[bucket] = ProjectionBuffers(Batch(bucket, self.device), fused, out)
        return self._buffers[bucket]

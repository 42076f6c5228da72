"""What a family of models has to say of itself: all that the engine, the probe and the drafts know of any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError, describe_value
from adapters.checkpoint.packed_matrix import StepLayout
from adapters.checkpoint.safetensors_folder import Shapes
from adapters.checkpoint.weight_source import WeightSource
from adapters.models import FAMILIES
from adapters.models.decoder.decoder_layer import LayerShape
from adapters.models.decoder.feed_forward import Matrix
from adapters.models.decoder.host_experts import HostExperts
from adapters.models.decoder.rope import Rotary
from adapters.models.decoder.shard import Shard, ShardPlacement
from adapters.models.kernels.experts_interface import ExpertsShape
from adapters.models.kernels.interface import Kernels
from adapters.models.kernels.product_list import Products


class ModelConfig(Protocol):
    """A model's shape, as config.json tells it. Its repr is part of the model's identity."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def experts(self) -> ExpertsShape | None:
        """Of the layers whose feed-forward is one of experts, where there are any."""
        ...

    @property
    def max_positions(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype | None:
        """What config.json says the weights are in; None if it says nothing."""
        ...

    def kv_bytes_per_token(self, dtype: torch.dtype, layers: range | None = None) -> int:
        """Of these layers, or of all, in what their rows are kept in."""
        ...

    def state_bytes(self, dtype: torch.dtype, device: str = ..., layers: range | None = None) -> tuple[int, int]:
        """What positional state takes, of a slot, with what is set aside of the rows after it; and of a place.

        device: the kind of it, "cpu" or "cuda", whose kernels keep different things of these rows. The most there can
        be: on a CPU what is proven decides which.
        """
        ...

    def tensors(self, layers: range | None = None) -> Shapes:
        """Names and shapes that layers `[first, last)` need: with the embedding if first, norm and head if last."""
        ...

    def matrices(self, layers: range | None = None) -> Iterator[Matrix]:
        """Every weight of these layers that may be packed, with the tensors that it is made of; with the last layer,
        the head.
        """
        ...

    def products(
        self,
        rows: Sequence[int],
        *,
        capacity: int,
        dtype: torch.dtype,
        threads: int,
        memory: int = ...,
        layouts: Mapping[str, StepLayout] = ...,
    ) -> Products:
        """Everything that is multiplied in steps of so many rows. A product that is not listed is never run.

        capacity: rows of a slot. threads: that serve. memory: bytes that weights may take in host memory. layouts: of
        tensors that may be multiplied with as they are packed.
        """
        ...

    def probed(self) -> Sequence[tuple[ModelConfig, range]]:
        """One layer of every kind, each as a range of layers of a small model with this model's shapes."""
        ...


class Build(Protocol):
    """Builds a shard of a family's models."""

    def __call__(
        self,
        config: Any,
        weights: WeightSource,
        kernels: Kernels,
        placement: ShardPlacement,
        *,
        offloaded: HostExperts | None = ...,
    ) -> Shard:
        """Return the shard that `placement` describes. offloaded: has the experts' weights; None: the shard itself."""
        ...


class HeadShape(LayerShape, Protocol):
    """Of the layer of a model's own prediction head."""

    @property
    def rotary(self) -> Rotary: ...


@frozen
class Family:
    """model_type: of config.json. parse: config.json, or CheckpointError with one line that says what is accepted.

    named: what a published tensor is called here; empty for one that the model is served without. head_shape: of a
    model's own prediction head (`mtp.*`), which a checkpoint may have; None: such models have none.
    """

    model_type: str
    parse: Callable[[Mapping[str, Any]], ModelConfig]
    build: Build
    named: Callable[[str], str] = str
    head_shape: Callable[[Any], HeadShape] | None = None


def family_of(raw: Mapping[str, Any]) -> Family:
    """Of a config.json. Raises CheckpointError."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        accepted = ", ".join(map(repr, FAMILIES))
        raise CheckpointError(f"config.json: model_type {describe_value(kind)} is not supported; accepted: {accepted}")
    found = import_module(FAMILIES[kind]).FAMILY
    assert isinstance(found, Family)
    return found

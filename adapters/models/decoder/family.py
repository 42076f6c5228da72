"""The interface of a model family: everything that the engine, the probe and the drafts know of a model."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
from attrs import frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.checkpoint.packed_matrix import StepLayout
from adapters.checkpoint.safetensors_folder import Shapes, StoredTensor
from adapters.checkpoint.weight_source import WeightSource
from adapters.models import FAMILIES
from adapters.models.decoder.config.rope import Rotary
from adapters.models.decoder.cpu_experts import CpuExperts
from adapters.models.decoder.layers.feed_forward import Matrix, cut_up
from adapters.models.decoder.layers.host_experts import HostExperts
from adapters.models.decoder.layers.latent_layer import LatentLayerShape, LatentShape
from adapters.models.decoder.shard import Shard, ShardPlacement
from adapters.models.decoder.shard_crossing import Crossing
from adapters.models.explain_refusal import explain_refused_type
from adapters.models.kernels.formats.row_format import Rows, RowTypes
from adapters.models.kernels.interfaces.experts_interface import ExpertsShape
from adapters.models.kernels.interfaces.layer_interface import Kernels
from adapters.models.kernels.interfaces.product_list import Products


class ModelConfig(Protocol):
    """A model's shape, as read from config.json. Its repr is part of the model's identity."""

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
        """The shape of feed-forwards with experts; None if no layer has one."""
        ...

    @property
    def embedding_scale(self) -> float:
        """The factor of embedded tokens. A draft needs a scaled copy of the embedding if it is not 1."""
        ...

    @property
    def max_positions(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the weights according to config.json; None if it names none."""
        ...

    @property
    def latent(self) -> LatentShape | None:
        """The sizes of attention over compressed rows; None if the layers have other attention."""
        ...

    def kv_bytes_per_token(self, rows: Rows, layers: range | None = None) -> int:
        """Return the bytes of one row of keys and values in these layers, or in all. rows: their types."""
        ...

    def check_rows(self, types: RowTypes) -> None:
        """Raise ValueError for formats of rows that the heads of some layer do not have."""
        ...

    def state_bytes(self, dtype: torch.dtype, device: str = ..., layers: range | None = None) -> tuple[int, int]:
        """Return the bytes of positional state: of a slot, with the data of its unsettled rows, and of a checkpoint.

        device: "cpu" or "cuda"; their kernels keep different data of unsettled rows. It is an upper limit: on a CPU the
        proven operations decide which data are kept.
        """
        ...

    def find_crossing(self, cut: int, dtype: torch.dtype, rows: Rows) -> Crossing:
        """Return what crosses from layer `cut - 1` to layer `cut`. dtype: of the computation. rows: of cached rows."""
        ...

    def shared_bytes(self, dtype: torch.dtype, bucket: int, layers: range | None = None) -> int:
        """Return the bytes of rows that all slots share, for steps of up to `bucket` rows. layers: None: all."""
        ...

    def tensors(self, layers: range | None = None) -> Shapes:
        """Return names and shapes of the tensors of these layers, or of all.

        The embedding comes with the first layer, and the norm and the head with the last one.
        """
        ...

    def matrices(self, layers: range | None = None) -> Iterator[Matrix]:
        """Yield every weight of these layers that may be packed, with the tensors that it is made of.

        The head comes with the last layer.
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
        """Return all products of steps with these numbers of rows. A product that is not listed is never run.

        capacity: rows of a slot. threads: of the processor, while it serves. memory: bytes that weights may take in
        host memory. layouts: of tensors that may be multiplied in packed form.
        """
        ...

    def list_probed_layers(self) -> Sequence[tuple[ModelConfig, range]]:
        """Return one layer of every kind, each as a range of layers of a small model with this model's shapes."""
        ...


class CutUp(Protocol):
    """A function that cuts a tensor of all experts into the tensors of each, by name."""

    def __call__(self, name: str, entry: StoredTensor, wanted: Container[str]) -> Mapping[str, StoredTensor]:
        """Return the parts. A tensor that is not cut is returned as it is. wanted: the names that the family needs."""
        ...


class Build(Protocol):
    """A function that builds a shard of a family's models."""

    def __call__(
        self,
        config: Any,
        weights: WeightSource,
        kernels: Kernels,
        placement: ShardPlacement,
        *,
        offloaded: HostExperts | None = ...,
        cpu_experts: CpuExperts | None = ...,
    ) -> Shard:
        """Return the shard that `placement` describes.

        offloaded: gets the weights of experts; None: the shard keeps them on its device. cpu_experts: compute the
        experts of their layers on the host; None: the device computes all.
        """
        ...


class HeadShape(LatentLayerShape, Protocol):
    """The shape of the layer in a model's own prediction head."""

    @property
    def rotary(self) -> Rotary: ...


@frozen
class HeadInputs:
    """The inputs of a prediction head, where they are not those of most heads.

    is_normed: the target's hidden state goes through the target's final norm. hidden_first: the published projection
    takes the hidden state before the embedding.
    """

    is_normed: bool = True
    hidden_first: bool = False


USUAL_INPUTS = HeadInputs()


def use_own_shape(config: Any) -> Any:
    """Return the shape of a prediction head whose layer is like the model's own."""
    return config


def keep_name(published: str, config: ModelConfig) -> str:  # noqa: ARG001 - the interface of `Family.named`
    return published


@frozen
class Family:
    """A family of models.

    model_type: the name in config.json. parse: reads config.json, or raises CheckpointError with one line that says
    what is accepted. named: returns our name of a published tensor; empty for a tensor that is not used. Names of the
    prediction head begin with HEAD_PREFIX. cut_up: cuts a tensor of all experts into one tensor for each expert.
    head_shape: returns the shape of the model's own prediction head (`mtp.*`), which a checkpoint may have; None: such
    models have none. head_inputs: what that head joins. is_unused: returns whether a tensor of this name may be in a
    checkpoint although no layer uses it.
    """

    model_type: str
    parse: Callable[[Mapping[str, Any]], ModelConfig]
    build: Build
    named: Callable[[str, Any], str] = keep_name
    cut_up: CutUp = cut_up
    head_shape: Callable[[Any], HeadShape] | None = None
    head_inputs: HeadInputs = USUAL_INPUTS
    is_unused: Callable[[str], bool] = lambda _: False


def family_of(raw: Mapping[str, Any]) -> Family:
    """Return the family that a config.json names. Raises CheckpointError."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise CheckpointError(explain_refused_type(kind))
    found = import_module(FAMILIES[kind]).FAMILY
    assert isinstance(found, Family)
    return found

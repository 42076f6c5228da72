"""The tensors of a draft in its files, which the checkpoints of all kinds of draft have in common."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from attrs import frozen
from torch import Tensor

from adapters.checkpoint.safetensors_folder import StoredTensor, digest_tensors


@frozen
class StoredTensors:
    """A draft's tensors by their published names. Implements `DraftWeights`."""

    tensors: Mapping[str, StoredTensor]

    def read(self, name: str) -> Tensor:
        """Return one tensor on the host, in its stored dtype. Raises KeyError if the draft has no such tensor."""
        return self.tensors[name].read(name)

    def has_tensor(self, name: str) -> bool:
        return name in self.tensors

    def digest(self) -> str:
        """Return the digest of the weights, which identifies them (`digest_tensors`)."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return digest_tensors(self.tensors)

"""The interfaces between a daemon and the thing that it serves: layers, a draft or a prompt scorer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from attrs import define, field
from torch import Tensor

from adapters.remote.protocol.messages import Op, WireMessage


@define(eq=False)
class OpAnswer:
    """The answer to a request: a message, and the tensors that it describes, in order."""

    message: WireMessage
    tensors: Mapping[str, Tensor] = field(factory=dict[str, Tensor])


# Carries out one op. Its arguments are the object that has the op, the request, and the tensors of the request.
Work: TypeAlias = Callable[..., OpAnswer]
Ops: TypeAlias = Mapping[Op, tuple[type[Any], Work]]


class Answerer(Protocol):
    """The thing that a daemon has loaded: layers of a target, a draft or a prompt scorer."""

    ops: ClassVar[Ops]

    @property
    def device(self) -> torch.device: ...

    def describe_loaded(self, *, shared: bool) -> WireMessage:
        """Return the answer to the request that loaded it. shared: shared memory is in use."""
        ...

    def close(self) -> None: ...

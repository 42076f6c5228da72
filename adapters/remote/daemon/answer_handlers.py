"""What a daemon answers, and whom it asks for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from attrs import define, field
from torch import Tensor

from adapters.remote.protocol.messages import Op, WireMessage


@define(eq=False)
class Answering:
    """What an op came to, and its tensors."""

    message: WireMessage
    tensors: Mapping[str, Tensor] = field(factory=dict[str, Tensor])


# A method of whatever has the op: it is given the arguments and the bytes of the tensors.
Work: TypeAlias = Callable[..., Answering]
Ops: TypeAlias = Mapping[Op, tuple[type[Any], Work]]


class Answerer(Protocol):
    """What a daemon has for its server: layers of a target, a draft or a drafter."""

    ops: ClassVar[Ops]

    @property
    def device(self) -> torch.device: ...

    def loaded(self, *, shared: bool) -> WireMessage:
        """What it says of itself."""
        ...

    def close(self) -> None: ...

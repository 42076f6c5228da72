"""A decode step that the device runs or will run next, and its members. Used by `overlapped_decode.py`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define
from torch import Tensor

from adapters.device.sampling.sampler import LaunchedPicks
from adapters.device.slots.slots import SlotState
from adapters.models.kernels.step import Forward, Step
from effects.decode import RunDecode
from effects.ids import RequestId


@define(eq=False)
class BatchMember:
    """One request of a launch.

    effect: as it was launched. steps_left: steps that it may still take, the one in flight included. has_ended: its
    last outcome is reported; if it has a row in the step in flight, that row lies after its end and is dropped.
    """

    request: RequestId
    slot: int
    state: SlotState
    effect: RunDecode
    steps_left: int
    has_ended: bool = False


@define(eq=False)
class InFlightStep:
    """A step that the device runs now or will run next.

    picking: the tokens that are picked from `logits`. It is None while the pick of the step before has to be known
    first, because a grammar or penalties of a request ask for it.
    """

    members: Sequence[BatchMember]
    step: Step
    forward: Forward
    logits: Tensor
    picking: LaunchedPicks | None


def last_tokens(members: Sequence[BatchMember]) -> Tensor:
    """Return the last token of each slot, which the host knows and the next step feeds: int64 `[R]` on the host."""
    return torch.tensor([member.state.tokens[-1] for member in members], dtype=torch.int64)

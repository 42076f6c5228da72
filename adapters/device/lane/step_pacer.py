"""An even pace of steps, kept by a GPU itself."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

LATE = 8  # steps, of which the second longest says how soon they come: one alone may have been late
LONGEST_NS = 100_000_000  # of it


@define(eq=False)
class StepPacer:
    """A step ends no sooner behind the one before it than steps of late have taken. The device waits for that, so the
    host needs to be in time for nothing, and what it was told in other streams goes on meanwhile.
    """

    device: torch.device
    clock: Tensor | None = field(init=False, default=None)  # what `beat` has it for
    _kept: bool = field(init=False, default=False)

    def beat(self) -> None:
        """Behind a step, in its stream, and before anybody hears of it."""
        if self.device.type != "cuda":
            return
        from adapters.models.kernels.triton.launch import launch  # noqa: PLC0415
        from adapters.models.kernels.triton.step_pacer_kernel import beat  # noqa: PLC0415 - needs Triton, so a GPU build

        if self.clock is None:
            self.clock = torch.zeros(2 + LATE, dtype=torch.int64, device=self.device)
        launch(beat, (1,), self.clock, int(not self._kept), LATE=LATE, LONGEST=LONGEST_NS, num_warps=1)
        self._kept = True

    def stop(self) -> None:
        """There is no reason for one any more."""
        self._kept = False

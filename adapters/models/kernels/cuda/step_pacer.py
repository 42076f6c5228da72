"""An even pace of decode steps, kept by the GPU's own clock (`triton/step_pacer_kernel.py`)."""

from __future__ import annotations

import torch
from attrs import define, field
from torch import Tensor

from adapters.models.kernels.triton.step_pacer_kernel import beat
from adapters.models.kernels.triton_launch import launch

LATE = (
    8  # latest steps whose durations are kept; the second longest sets the pace, since a single one may be an outlier
)
LONGEST_NS = 100_000_000  # a step is held back for no longer than this, or than the interval that is asked for


@define(eq=False)
class CudaStepPacer:
    """Implements `StepPacer`. The device itself waits, so the host need not be in time for anything, and work in other
    streams goes on meanwhile.
    """

    device: torch.device
    clock: Tensor | None = field(init=False, default=None)  # int64 [2 + LATE], as the kernel `beat` describes it
    _is_running: bool = field(init=False, default=False)

    def beat(self, interval_ns: int = 0) -> None:
        if self.clock is None:
            self.clock = torch.zeros(2 + LATE, dtype=torch.int64, device=self.device)
        anew = int(not self._is_running)
        launch(beat, (1,), self.clock, anew, interval_ns, LATE=LATE, LONGEST=LONGEST_NS, num_warps=1)
        self._is_running = True

    def stop(self) -> None:
        self._is_running = False

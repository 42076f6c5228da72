"""The interface that paces decode steps while a prefill runs as well; `factory.build_step_pacer` builds one."""

from __future__ import annotations

from typing import Protocol


class StepPacer(Protocol):
    """Holds a step back until the steps before it have had their usual time, so that steps end at an even pace."""

    def beat(self, interval_ns: int = 0) -> None:
        """Hold the current step back, if it came early. Called in the steps' stream, right behind a step.

        interval_ns: from the end of the step before to the end of this one, at least, even if steps take less.
        """
        ...

    def stop(self) -> None:
        """End the pace. The next `beat` begins a new one and holds nothing back."""
        ...


class NoStepPacer:
    """Implements `StepPacer` where nothing overlaps a step, as on a processor: it holds nothing back."""

    def beat(self, interval_ns: int = 0) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""

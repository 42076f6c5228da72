"""The form of times of decode steps (`TimedStep`) in traces: each is a list of its five numbers."""

from __future__ import annotations

from typing import Any

from cattrs import Converter

from states.rates import TimedStep

NUMBERS: Any = tuple[int, int, int, int, int]  # the fields of a `TimedStep`


def register_timed_steps(converter: Converter) -> None:
    """Let a converter read and write times of decode steps. By itself, cattrs does not find the types of the fields.

    Reading raises ValueError for negative numbers, as for other impossible rates.
    """

    def structure(value: Any, _: Any) -> TimedStep:
        numbers = converter.structure(value, NUMBERS)
        if min(numbers) < 0:
            raise ValueError(f"impossible time of a decode step: {numbers}")
        return TimedStep(*numbers)

    converter.register_structure_hook(TimedStep, structure)
    converter.register_unstructure_hook(TimedStep, list)

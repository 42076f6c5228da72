"""The step pacer: decode steps on a GPU keep an interval by the clock of the GPU."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from adapters.models.kernels.factory import build_step_pacer
from adapters.models.kernels.interfaces.step_pacer import NoStepPacer

CYCLES = 2_000_000  # of a GPU's clock, about a millisecond
SLACK_NS = 50_000_000  # others may have the device for so long


def test_a_processor_keeps_none():
    pacer = build_step_pacer(torch.device("cpu"))
    pacer.beat()
    pacer.stop()
    assert isinstance(pacer, NoStepPacer)


@pytest.mark.cuda
def test_a_step_is_over_no_sooner_than_the_second_longest_of_late_says():
    from adapters.models.kernels.cuda.step_pacer import LATE, LONGEST_NS, CudaStepPacer  # noqa: PLC0415 - needs Triton

    pacer, seen = CudaStepPacer(torch.device("cuda")), list[list[int]]()

    def step(times: int) -> list[int]:
        torch.cuda._sleep(times * CYCLES)  # noqa: SLF001
        pacer.beat()
        torch.cuda.synchronize()
        assert pacer.clock is not None
        return pacer.clock.tolist()

    for _ in range(LATE):
        step(1)  # what is loaded takes its time
    seen = [step(1 + 4 * (number % LATE == 3) + number % 3) for number in range(3 * LATE)]
    late = seen[0][2:]
    for number, ((before, *_), (over, count, *took)) in enumerate(pairwise(seen), seen[0][1]):
        late[number % LATE] = newest = took[number % LATE]
        assert (count, took) == (number + 1, late), "one is new"
        pause = sorted(late)[-2]
        assert pause <= over - before, "it was waited for"
        assert min(newest, LONGEST_NS) <= over - before < max(pause, newest) + SLACK_NS or newest == LONGEST_NS
        assert newest > CYCLES / 4, "in which it slept"
    pacer.stop()
    assert step(1)[1:] == [4 * LATE - 1, *late], "of what began at no known time nothing is kept"


@pytest.mark.cuda
def test_a_step_is_over_no_sooner_than_the_interval_that_was_asked_for():
    from adapters.models.kernels.cuda.step_pacer import CudaStepPacer  # noqa: PLC0415 - needs Triton

    pacer, ends = CudaStepPacer(torch.device("cuda")), list[int]()
    for interval_ns in (0, *[8_000_000] * 6, *[16_000_000] * 3):
        torch.cuda._sleep(CYCLES)  # noqa: SLF001
        pacer.beat(interval_ns)
        torch.cuda.synchronize()
        assert pacer.clock is not None
        ends.append(pacer.clock.tolist()[0])
    gaps = [end - before for before, end in pairwise(ends)]
    assert all(8_000_000 <= gap < 8_000_000 + SLACK_NS for gap in gaps[:6])
    assert all(16_000_000 <= gap < 16_000_000 + SLACK_NS for gap in gaps[6:])

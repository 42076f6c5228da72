"""The clock of a GPU, by which it keeps steps apart, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["anew", "interval"])
def beat(clock_ptr, anew, interval, LATE: tl.constexpr, LONGEST: tl.constexpr):
    """Wait until the step's usual time has passed. Runs in the steps' stream behind each step, one program of one
    warp.

    clock: int64 `[2 + LATE]`: when the step before was over, in nanoseconds; how many steps were paced; the durations
    of the last ones, without what they waited for. anew: no step was paced before this one, so its beginning is not
    known. interval: nanoseconds from the step before that pass at least, even if steps usually take less.
    """
    before = tl.load(clock_ptr)
    count = tl.load(clock_ptr + 1)
    at = tl.arange(0, LATE)
    late = tl.load(clock_ptr + 2 + at)
    now = globaltimer()
    if anew == 0:
        late = tl.where(at == count % LATE, tl.minimum(now - before, LONGEST), late)
        index = tl.argmax(late, 0)
        usual = tl.minimum(before + tl.max(tl.where(at == index, 0, late), 0), now + LONGEST)
        until = tl.maximum(usual, before + interval)
        while now < until:
            now = globaltimer()
        count += 1
    tl.store(clock_ptr + 2 + at, late)
    tl.store(clock_ptr, now)
    tl.store(clock_ptr + 1, count)

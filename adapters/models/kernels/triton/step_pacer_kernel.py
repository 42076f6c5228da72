"""A GPU's own clock, by which it keeps steps apart, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["anew"])
def beat(clock_ptr, anew, LATE: tl.constexpr, LONGEST: tl.constexpr):
    """Runs in the steps' stream behind each of them, and ends when that is to be over. One program of one warp.

    clock: int64 `[2 + LATE]`: when the step before was over, in nanoseconds; how many were kept apart; what the last of
    these took, without what they waited for. anew: nobody kept the pace before this one, so its beginning is not known.
    """
    before, count, at = tl.load(clock_ptr), tl.load(clock_ptr + 1), tl.arange(0, LATE)
    late = tl.load(clock_ptr + 2 + at)
    now = globaltimer()
    if anew == 0:
        late = tl.where(at == count % LATE, tl.minimum(now - before, LONGEST), late)
        place = tl.argmax(late, 0)
        until = tl.minimum(before + tl.max(tl.where(at == place, 0, late), 0), now + LONGEST)
        while now < until:
            now = globaltimer()
        count += 1
    tl.store(clock_ptr + 2 + at, late)
    tl.store(clock_ptr, now)
    tl.store(clock_ptr + 1, count)

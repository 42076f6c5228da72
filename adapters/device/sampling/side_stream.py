"""What a GPU does beside what it is told meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_aside = dict[tuple[torch.device, int], torch.cuda.Stream]()  # of each stream that was ever left


@contextmanager
def aside(used: Tensor) -> Iterator[torch.cuda.Stream]:
    """A stream of its own, behind all that the current one has been told so far. used: nobody else is given its memory
    until that is done.
    """
    here = torch.cuda.current_stream(used.device)
    key = (here.device, here.cuda_stream)
    if key not in _aside:
        # torch has few streams for everybody, and others for those of high priority: what copies or records has none
        _aside[key] = torch.cuda.Stream(here.device, priority=-1)  # type: ignore[no-untyped-call]
    stream = _aside[key]
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield stream
    used.record_stream(stream)

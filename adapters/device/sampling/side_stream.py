"""A CUDA stream for work that runs parallel to what the current stream gets afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_aside = dict[tuple[torch.device, int], torch.cuda.Stream]()  # by device and current stream


@contextmanager
def side_stream(used: Tensor) -> Iterator[torch.cuda.Stream]:
    """Make a stream current that begins behind all work of the current one so far.

    used: a tensor that the work reads. Its memory is not reused before that work is done.
    """
    here = torch.cuda.current_stream(used.device)
    key = (here.device, here.cuda_stream)
    if key not in _aside:
        # torch shares a few streams per priority among all callers. Only this module asks for high priority ones.
        _aside[key] = torch.cuda.Stream(here.device, priority=-1)  # type: ignore[no-untyped-call]
    stream = _aside[key]
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield stream
    used.record_stream(stream)

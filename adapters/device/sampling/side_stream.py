"""A CUDA stream on which a copy runs while the current stream goes on with later work.

The sampler uses it to bring picked tokens to pinned memory while the next forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_side_streams = dict[tuple[torch.device, int], torch.cuda.Stream]()  # by device and current stream


@contextmanager
def side_stream(source: Tensor) -> Iterator[torch.cuda.Stream]:
    """Make a stream current that waits for all work launched on the current one so far.

    source: a tensor that the new work reads. Its memory is not reused before that work is done.
    """
    current = torch.cuda.current_stream(source.device)
    key = (current.device, current.cuda_stream)
    if key not in _side_streams:
        # torch shares a few streams per priority among all callers. Only this module asks for high priority ones.
        _side_streams[key] = torch.cuda.Stream(current.device, priority=-1)  # type: ignore[no-untyped-call]
    stream = _side_streams[key]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield stream
    source.record_stream(stream)

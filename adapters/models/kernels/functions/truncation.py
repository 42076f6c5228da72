"""The likeliest tokens of rows of logits on a host, and per-row values as a column.

Every comparison is exact, so a row's neighbours cannot matter. Ties go to the lower token id.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF


def find_likeliest(logits: Tensor, count: int) -> Tensor:
    """Return the ids of the `count` largest logits of each row, likeliest first: int64 `[R, count]`. The lower id
    comes first among equals.
    """
    logits = logits + 0.0  # makes -0 equal to 0, also where bits are compared
    if (ids := _find_likeliest_without_ties(logits, count)) is not None:
        return ids
    bits = logits.view(torch.int32).long()
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of the floats, and below a tie-break
    keys = (ordered << 32) | (_LOW - torch.arange(logits.shape[-1]))
    return _LOW - (torch.topk(keys, count).values & _LOW)


def _find_likeliest_without_ties(logits: Tensor, count: int) -> Tensor | None:
    """Return the same in a third of the time, or None where equal logits stand on both sides of a row's last one."""
    values, ids = logits.topk(count)
    last = values[:, -1:]
    if 0 < count < logits.shape[-1] and not torch.equal((logits == last).sum(-1), (values == last).sum(-1)):
        return None
    ids = ids.sort(-1).values
    return ids.gather(-1, logits.gather(-1, ids).sort(dim=-1, descending=True, stable=True).indices)


def make_column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return one value for each row, `[R, 1]`, in the dtype and on the device of `like`. The host does not wait."""
    return torch.tensor(values, dtype=like.dtype).unsqueeze(1).to(like.device, non_blocking=True)

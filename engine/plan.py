"""Which layers of a target run where: the devices and weights that were asked for, and the runs of layers they give."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate

DEVICE = re.compile(r"(auto|cpu|cuda)(?::(\d{1,4}))?")


def read_devices(text: str) -> tuple[str, ...]:
    """`cpu:0,cuda:1`: one for each shard, in the order of the layers. ValueError for what is no such list."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        match = DEVICE.fullmatch(name)
        if match is None:
            raise ValueError(
                f"{name[:40]!r} is no device here. Accepted: cpu:0, cuda:N or auto:N, with commas between them."
            )
        if match[1] == "cpu" and int(match[2] or 0):
            raise ValueError(f"{name!r}: all processors are one device. Accepted: cpu:0, several times if you like.")
    return names


def read_weights(text: str) -> tuple[float, ...]:
    """`0.08,0.46,0.46`: one for each device. ValueError for what is no list of finite numbers above 0."""
    found = list[float]()
    for word in text.split(","):
        try:
            weight = float(word.replace("_", "x"))
        except ValueError:
            weight = math.nan
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"{word.strip()[:40]!r} is no weight. Accepted: finite numbers above 0, with commas between them."
            )
        found.append(weight)
    return tuple(found)


def layer_ranges(layers: int, weights: Sequence[float]) -> tuple[range, ...]:
    """So many layers in runs as long as their weights say: a run ends where all weights so far put it, rounded half up,
    and each has a layer at least. ValueError for more runs than layers.
    """
    count, ranges, begin = len(weights), list[range](), 0
    if count > layers:
        raise ValueError(f"{count} shards for {layers} layers; accepted: at most one for each layer")
    *_, total = so_far = list(accumulate(map(Fraction, weights)))
    for number, reached in enumerate(so_far, 1):
        end = math.floor(reached / total * layers + Fraction(1, 2))
        end = min(max(end, begin + 1), layers - (count - number))
        ranges.append(range(begin, end))
        begin = end
    return tuple(ranges)

"""Keys and values of some layers, for every slot: one tensor, and all that rows are asked for, by name or place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adapters.layout import RowSpec, dtype_name
from adapters.models.shard import NamedTensors


class KvCache:
    """`[layers, 2, slots, KV, rows, hd]`, zeroed, so that what is masked is always finite.

    names: of the layers, as in `layers.12`. rows: of a slot, in whole tiles of the kernels. capacity: of these, the
    ones that can be asked for; all by default.
    """

    def __init__(
        self,
        names: Sequence[str],
        shape: tuple[int, int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        capacity: int | None = None,
    ) -> None:
        """shape: slots, KV, rows, hd."""
        self.slots, heads, rows, width = shape
        self.capacity = rows if capacity is None else capacity
        keys = tuple(f"{name}.{part}" for name in names for part in "kv")
        self.spec = RowSpec(keys, heads, width, dtype_name(dtype))
        self._all = torch.zeros(len(names), 2, *shape, dtype=dtype, device=device)
        # Keys and values of each layer, `[slots, KV, rows, hd]`.
        self.layers: list[tuple[Tensor, Tensor]] = [(keys, values) for keys, values in self._all]

    @property
    def nbytes(self) -> int:
        return self._all.nbytes

    def check_span(self, slot: int, start: int, stop: int) -> None:
        """Raises ValueError for rows that no slot has."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is not in 0..{self.slots - 1}")
        if not 0 <= start < stop <= self.capacity:
            raise ValueError(f"rows {start}..{stop} are not a span within a slot's {self.capacity} rows")

    def rows(self, slot: int, start: int, stop: int) -> Tensor:
        """Where they are: a view `[layers, 2, KV, stop - start, hd]`."""
        self.check_span(slot, start, stop)
        return self._all[:, :, slot, :, start:stop]

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        self.rows(target, start, stop).copy_(self.rows(source, start, stop))

    def export(self, slot: int, start: int, stop: int) -> NamedTensors:
        """By name, each `[KV, stop - start, hd]`, on the host."""
        rows = self.rows(slot, start, stop).flatten(0, 1)
        host = torch.empty(rows.shape, dtype=rows.dtype).copy_(rows)
        return dict(zip(self.spec.names, host, strict=True))

    def import_(self, slot: int, start: int, rows: NamedTensors) -> None:
        """What `export` gave, at `start`; ValueError for a name, shape or dtype that is not ours."""
        odd = sorted(set(self.spec.names).symmetric_difference(rows))
        if odd:
            raise ValueError(f"rows of {len(self.spec.names) // 2} layers: {odd[0]} is odd")
        first = rows[self.spec.names[0]]
        count, dtype = first.shape[1] if first.dim() == 3 else 0, self._all.dtype
        self.check_span(slot, start, start + count)
        shape = (self.spec.heads, count, self.spec.width)
        for name, tensor in rows.items():
            if tensor.shape != shape or tensor.dtype != dtype:
                raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
        for name, place in zip(self.spec.names, self.rows(slot, start, start + count).flatten(0, 1), strict=True):
            place.copy_(rows[name])

    def close(self) -> None:
        """Give the memory back."""
        self.layers.clear()
        self._all = self._all.new_empty(0)

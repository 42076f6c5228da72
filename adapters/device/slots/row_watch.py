"""The check of `--paranoid`: rows of a slot are still the rows that were written.

Theory of operation
-------------------

A row may only change if its slot is given other tokens. The watch holds a checksum of each valid row, made when the row
became valid, and compares it with the row as it is now:

* when a slot is opened with rows of a source: all of these rows, at the source and after they were copied;
* before each launch: a window of WINDOW rows for each of its slots. The next launch checks the next window, so that a
  long prompt costs no more than a short one.

Rows that have changed are lost: `RowsLost` names their slots, the log says so, and the rows are computed again.

Example: a slot with 1,200 valid rows is in every launch. The launches check rows 0..511, 512..1023, 1024..1199, and
then begin again at row 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import torch
from attrs import define, field
from torch import Tensor

from adapters.device.slots.slot_table import SlotTable
from adapters.device.slots.slots import SlotState
from adapters.models.decoder.shard import NamedTensors, Shard
from effects.all import EffectRequest
from effects.decode import RunDecode
from effects.ids import SlotId
from effects.ports import RowsLost
from effects.prefill import OpenSlot, RunPrefill

WINDOW = 512  # rows of a slot that are compared before a launch
PIECE = 512  # rows that are looked at in one go, which bounds the memory that it takes
log = logging.getLogger("rekindle.device")


@define(eq=False)
class RowWatch:
    """Checksums of the rows of slots. Used on a lane. Until it is switched on, its other calls do nothing."""

    shard: Shard
    _on: bool = False
    _sums: dict[int, Tensor] = field(factory=dict[int, Tensor])  # by slot, one for each row from the first on
    _next: dict[int, int] = field(factory=dict[int, int])  # by slot, the first row of its next window

    def switch(self, *, on: bool) -> None:
        """Begin or stop to watch rows. Called before the first launch."""
        self._on = on
        self._sums.clear()

    def check_source_rows(self, effect: OpenSlot, origin: SlotState | None) -> None:
        """Compare the rows that a slot is about to be opened with, in their source. Raises RowsLost."""
        if self._on and effect.keep and origin is not None:
            self._learn_rows(effect.source, origin.valid)
            self._compare_rows(
                effect.source, 0, min(effect.keep, len(self._sums[effect.source])), (effect.source, effect.slot)
            )

    def check_opened_rows(self, effect: OpenSlot) -> None:
        """Compare the rows of a slot that was opened with the rows of its source. Raises RowsLost."""
        if self._on:
            known = self._sums.get(effect.source, _no_sums())
            # Rows behind a model's positional state are computed again, perhaps of other tokens.
            self._sums[effect.slot] = known[: effect.keep].clone()
            self._compare_rows(effect.slot, 0, len(self._sums[effect.slot]), (effect.slot,))

    def check_launch(self, slots: SlotTable, effect_requests: Iterable[EffectRequest]) -> None:
        """Compare a window of rows of each slot of a launch. Raises RowsLost for all of these slots."""
        if not self._on:
            return
        found = dict(self._list_watched(slots, effect_requests))
        for slot, state in found.items():
            self._sums[slot] = self._sums.get(slot, _no_sums())[: state.valid]
            start = self._next.get(slot, 0)
            stop = min(start + WINDOW, len(self._sums[slot]))
            self._compare_rows(slot, start, stop, found)
            self._next[slot] = stop if stop < len(self._sums[slot]) else 0

    def learn_new_rows(self, slots: SlotTable, effect_requests: Iterable[EffectRequest]) -> None:
        """Add checksums of the rows that a launch has made valid."""
        if not self._on:
            return
        for slot, state in self._list_watched(slots, effect_requests):
            self._learn_rows(slot, state.valid)

    def _list_watched(
        self, slots: SlotTable, effect_requests: Iterable[EffectRequest]
    ) -> Iterator[tuple[int, SlotState]]:
        """Yield the slots of a launch that still serve its requests, with their states."""
        for effect_request in effect_requests:
            effect = effect_request.effect
            if not isinstance(effect, RunPrefill | RunDecode):
                continue
            state = slots.find_state(effect.slot)
            if state is not None and state.request == effect_request.request:
                yield effect.slot, state

    def _learn_rows(self, slot: int, valid: int) -> None:
        known = self._sums.get(slot, _no_sums())[:valid]
        self._sums[slot] = torch.cat((known, *self._checksum_rows(slot, len(known), valid)))

    def _compare_rows(self, slot: int, start: int, stop: int, slots: Iterable[int]) -> None:
        if start >= stop:
            return
        now = torch.cat(tuple(self._checksum_rows(slot, start, stop)))
        known = self._sums[slot][start:stop]
        changed = (now != known).nonzero().flatten().tolist()
        if changed:
            first = start + changed[0]
            last = start + changed[-1]
            why = f"slot {slot}: {len(changed)} of rows {first}..{last} are not what they were when they were written"
            log.error("paranoid: %s", why)
            for one in slots:
                self._sums.pop(one, None)
            raise RowsLost(tuple(map(SlotId, slots)), why)

    def _checksum_rows(self, slot: int, start: int, stop: int) -> Iterator[Tensor]:
        for first in range(start, stop, PIECE):
            yield checksums(self.shard.rows.export(slot, first, min(first + PIECE, stop)))


def _no_sums() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


def checksums(rows: NamedTensors) -> Tensor:
    """Return an int64 for each row, over all its bytes in all layers.

    Values are weighted by odd numbers, so that a moved value and a single changed bit change the sum.
    """
    total = _no_sums()
    for number, tensor in enumerate(rows.values()):
        raw = tensor.contiguous().view(torch.uint8)
        words = raw.view(torch.int64) if raw.shape[-1] % 8 == 0 else raw.long()
        sums = (words * _odd(words.shape[-1])).sum(-1)
        of_rows = (sums * _odd(len(sums)).unsqueeze(1)).sum(0) * (2 * number + 1)
        total = total + of_rows if number else of_rows
    return total


def _odd(count: int) -> Tensor:
    return 2 * torch.arange(count) + 0x9E3779B1

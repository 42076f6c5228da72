"""What `--paranoid` checks of a slot's rows: that those which were acknowledged are still what they were.

A checksum of each valid row is kept, and compared when the row is gone on from: all of the rows that a slot is opened
with, and before every launch a window of each of its slots, one after the other, so that long prompts cost no more than
short ones. Rows that have changed or vanished are gone: whoever counts on them computes them again, and the log says
so.
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
    """Every call is on a lane, and none but `switch` does anything while it is off."""

    shard: Shard
    _on: bool = False
    _sums: dict[int, Tensor] = field(factory=dict[int, Tensor])  # of a slot's rows, from the first on
    _next: dict[int, int] = field(factory=dict[int, int])  # the row that a slot's next window begins with

    def switch(self, *, on: bool) -> None:
        """Watch rows from now on, or stop that; before the first launch."""
        self._on = on
        self._sums.clear()

    def opening(self, effect: OpenSlot, origin: SlotState | None) -> None:
        """Compare what a slot is about to be opened with, where it is now. Raises RowsLost."""
        if self._on and effect.keep and origin is not None:
            self._learn(effect.source, origin.valid)
            self._compare(
                effect.source, 0, min(effect.keep, len(self._sums[effect.source])), (effect.source, effect.slot)
            )

    def opened(self, effect: OpenSlot) -> None:
        """The slot has its rows: compare them with their source's, which may be another slot. Raises RowsLost."""
        if self._on:
            known = self._sums.get(effect.source, _none())
            # Rows behind a model's positional state are computed again, perhaps of other tokens.
            self._sums[effect.slot] = known[: effect.keep].clone()
            self._compare(effect.slot, 0, len(self._sums[effect.slot]), (effect.slot,))

    def before(self, slots: SlotTable, asks: Iterable[EffectRequest]) -> None:
        """Compare a window of the rows of all that are launched together. Raises RowsLost, of all of them."""
        found = dict(self._watched(slots, asks))
        for slot, state in found.items():
            self._sums[slot] = self._sums.get(slot, _none())[: state.valid]
            start = self._next.get(slot, 0)
            stop = min(start + WINDOW, len(self._sums[slot]))
            self._compare(slot, start, stop, found)
            self._next[slot] = stop if stop < len(self._sums[slot]) else 0

    def behind(self, slots: SlotTable, asks: Iterable[EffectRequest]) -> None:
        """Take in the rows that have become valid."""
        for slot, state in self._watched(slots, asks):
            self._learn(slot, state.valid)

    def _watched(self, slots: SlotTable, asks: Iterable[EffectRequest]) -> Iterator[tuple[int, SlotState]]:
        for ask in asks if self._on else ():
            effect = ask.effect
            if not isinstance(effect, RunPrefill | RunDecode):
                continue
            state = slots.find_state(effect.slot)
            if state is not None and state.request == ask.request:
                yield effect.slot, state

    def _learn(self, slot: int, valid: int) -> None:
        known = self._sums.get(slot, _none())[:valid]
        self._sums[slot] = torch.cat((known, *self._look(slot, len(known), valid)))

    def _compare(self, slot: int, start: int, stop: int, slots: Iterable[int]) -> None:
        if start >= stop:
            return
        now = torch.cat(tuple(self._look(slot, start, stop)))
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

    def _look(self, slot: int, start: int, stop: int) -> Iterator[Tensor]:
        for first in range(start, stop, PIECE):
            yield checksums(self.shard.rows.export(slot, first, min(first + PIECE, stop)))


def _none() -> Tensor:
    return torch.zeros(0, dtype=torch.int64)


def checksums(rows: NamedTensors) -> Tensor:
    """Return an int64 for each row, of all its bytes in all layers; they are weighted by odd numbers, so that moved
    values and a single changed bit show.
    """
    total = _none()
    for number, tensor in enumerate(rows.values()):
        raw = tensor.contiguous().view(torch.uint8)
        words = raw.view(torch.int64) if raw.shape[-1] % 8 == 0 else raw.long()
        sums = (words * _odd(words.shape[-1])).sum(-1)
        of_rows = (sums * _odd(len(sums)).unsqueeze(1)).sum(0) * (2 * number + 1)
        total = total + of_rows if number else of_rows
    return total


def _odd(count: int) -> Tensor:
    return 2 * torch.arange(count) + 0x9E3779B1

"""Takes rows and positional state of a slot out into the store, on the lane; writing them is the store's part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from attrs import define

from adapters.device.memory import ran_out_of_memory
from adapters.store.disk import Disk
from adapters.store.format import Run
from adapters.store.store import Store
from adapters.transfer.copy import Mover, StateMover
from adapters.transfer.fence import Serving
from effects.ids import DeviceFailed, RequestId, SlotId
from effects.snapshot import SaveSnapshot, SnapshotSaved

log = logging.getLogger("rekindle.store")


@define(eq=False)
class Saver:
    """catch_up: lets a draft follow the rows of a slot that it was spared so far, before they are kept."""

    store: Store[Disk]
    serving: Serving
    target: Sequence[Mover]
    draft: Sequence[Mover]
    state: StateMover
    catch_up: Callable[[int], object] = lambda _: None

    def save(self, request: RequestId, effect: SaveSnapshot) -> SnapshotSaved | DeviceFailed:
        """Copy out what no tier has, and leave the rest to the background."""
        self.catch_up(effect.slot)
        state = self.serving(effect.slot, request)
        if isinstance(state, DeviceFailed):
            return state
        if not state.holds(effect.tokens):
            return DeviceFailed("broken", f"slot {effect.slot} does not hold the rows that are to be kept")
        saved = self._save(effect.slot, self.store.gaps(effect.tokens, salt=state.salt), self.target)
        if self.draft:
            start, stop = state.drafted
            gaps = self.store.gaps(effect.tokens[:stop], "draft", start, state.salt)
            saved += self._save(effect.slot, gaps, self.draft)
        if effect.checkpoint:
            self.checkpoint(request, effect.slot, len(effect.tokens))
        kept, about = len(effect.tokens), {"request": request}
        log.info("request %d: %d tokens kept, %d bytes of them new", request, kept, saved, extra=about)
        return SnapshotSaved(len(effect.tokens), saved)

    def _save(self, slot: SlotId, gaps: Sequence[Run], movers: Sequence[Mover]) -> int:
        """The bytes that are new."""
        saved = 0
        for run in gaps:
            buffer = self.store.memory.take(self.store.layout.size(run.kind, run.length))
            for mover in movers:
                mover.take(slot, (run.start, run.stop), buffer.data)
            if not self.store.keep(run, buffer):
                break
            saved += buffer.data.nbytes
        return saved

    def checkpoint(self, request: RequestId, slot: SlotId, at: int) -> bool:
        """Where the slot's state stands behind rows `[0, at)`: keep it. False if that was not possible."""
        state, layout = self.serving(slot, request), self.store.layout
        if isinstance(state, DeviceFailed) or not layout.state:
            return False
        if self.state.standing(state.valid) != at or at % layout.block_size or not at:
            where = request, slot, state.valid, at
            log.warning("request %d: slot %d has %d rows, no checkpoint at %d", *where, extra={"request": request})
            return False
        tokens = tuple(state.tokens[:at])
        if not self.store.lacks_checkpoint(tokens, state.salt):
            return True
        try:
            buffer = self.store.memory.take(layout.size("state", 0))
            self.state.take(slot, buffer.data)
        except Exception as error:
            if not ran_out_of_memory(error):
                raise
            about = {"request": request}
            log.warning("request %d: no memory for the checkpoint at %d: %s", request, at, error, extra=about)
            return False
        return self.store.keep_checkpoint(tokens, buffer, state.salt)

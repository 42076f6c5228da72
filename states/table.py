"""The whole machine: every row, in the order of a request's life."""

from __future__ import annotations

from effects.decode import Decoded
from effects.ids import DeviceFailed, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed
from effects.pflash import PromptCompressed, PromptScored
from effects.prefill import PrefillAdvanced
from effects.residency import ModelLoaded, ModelUnloaded
from effects.restore import BlocksRestored
from effects.snapshot import SnapshotSaved
from states import ending, generate, lookup, recover, restore
from states.events import Admitted, Cancelled, Rejected, SlotEmptied, Submitted
from states.life import (
    Compressing,
    Draining,
    LookingUp,
    New,
    Parking,
    Prefilling,
    Recovering,
    Restoring,
    Snapshotting,
    Speculating,
    Unparking,
    Waiting,
    Yielding,
)
from states.machine import ignored, on, table

TABLE = table(
    on(New, Submitted, lookup.submit),
    on(New, Rejected, lookup.refuse),
    on(Waiting, Admitted, lookup.admit),
    on(Waiting, Cancelled, lookup.leave_queue),
    on(LookingUp, PrefixFound, lookup.found),
    on(LookingUp, PrefixMissed, lookup.missed),
    on(LookingUp, StoreFailed, lookup.unanswered),
    on(LookingUp, Cancelled, ending.drain),
    on(LookingUp, SlotEmptied, recover.lost),
    on(Restoring, BlocksRestored, restore.loaded),
    on(Restoring, StoreFailed, restore.lost),
    on(Restoring, PrefillAdvanced, restore.advanced),
    on(Restoring, DeviceFailed, restore.broken),
    on(Restoring, Cancelled, ending.drain_both),
    on(Restoring, SlotEmptied, recover.lost),
    on(Compressing, PromptScored, lookup.scored),
    on(Compressing, PromptCompressed, lookup.compressed),
    on(Compressing, DeviceFailed, lookup.verbatim),
    on(Compressing, Cancelled, ending.drain),
    on(Compressing, SlotEmptied, recover.lost),
    on(Unparking, ModelLoaded, generate.unparked),
    on(Unparking, DeviceFailed, generate.plain),
    on(Unparking, Cancelled, ending.drain),
    on(Unparking, SlotEmptied, recover.lost),
    on(Prefilling, PrefillAdvanced, generate.prefilled),
    on(Prefilling, DeviceFailed, generate.broken),
    on(Prefilling, Cancelled, ending.drain),
    on(Prefilling, SlotEmptied, recover.lost),
    on(Speculating, Decoded, generate.accept),
    on(Speculating, DeviceFailed, generate.broken),
    on(Speculating, Cancelled, ending.drain),
    on(Speculating, SlotEmptied, recover.lost),
    on(Draining, PrefixFound, ending.settle_found),
    on(Draining, PrefixMissed, ending.settle),
    on(Draining, StoreFailed, ending.settle_loss),
    on(Draining, BlocksRestored, ending.settle_restored),
    on(Draining, PromptScored, ending.settle),
    on(Draining, PromptCompressed, ending.settle),
    on(Draining, ModelLoaded, ending.settle_draft),
    on(Draining, PrefillAdvanced, ending.settle_rows),
    on(Draining, Decoded, ending.settle_decode),
    on(Draining, DeviceFailed, ending.settle_failure),
    ignored(Draining, Cancelled),
    on(Draining, SlotEmptied, recover.lost_behind),
    on(Snapshotting, SnapshotSaved, ending.snapshotted),
    on(Snapshotting, DeviceFailed, ending.unsaved),
    ignored(Snapshotting, Cancelled),
    on(Snapshotting, SlotEmptied, recover.lost_saving),
    on(Parking, ModelUnloaded, ending.parked),
    on(Parking, DeviceFailed, ending.parked),
    ignored(Parking, Cancelled),
    on(Parking, SlotEmptied, recover.lost_parking),
    on(Recovering, PrefixFound, recover.found),
    on(Recovering, PrefixMissed, recover.missed),
    on(Recovering, StoreFailed, recover.loaded),
    on(Recovering, BlocksRestored, recover.loaded),
    on(Recovering, PromptScored, recover.compressed),
    on(Recovering, PromptCompressed, recover.compressed),
    on(Recovering, ModelLoaded, recover.unparked),
    on(Recovering, PrefillAdvanced, recover.computed),
    on(Recovering, Decoded, recover.decoded),
    on(Recovering, DeviceFailed, recover.computed),
    on(Recovering, Cancelled, recover.drain),
    ignored(Recovering, SlotEmptied),
    on(Yielding, ModelUnloaded, recover.yielded),
    on(Yielding, DeviceFailed, recover.yielded),
    on(Yielding, Cancelled, recover.park_on),
    ignored(Yielding, SlotEmptied),
)

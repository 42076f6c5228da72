"""The whole machine: every row, in the order of a request's life."""

from __future__ import annotations

from effects.decode import Decoded
from effects.draft import DraftParked, DraftUnparked
from effects.ids import DeviceFailed, StoreFailed
from effects.lookup import PrefixFound, PrefixMissed
from effects.pflash import PromptCompressed
from effects.prefill import PrefillAdvanced
from effects.restore import BlocksRestored
from effects.snapshot import SnapshotSaved
from states import ending, generate, lookup, restore
from states.events import Admitted, Cancelled, Rejected, Submitted
from states.life import (
    Compressing,
    Draining,
    LookingUp,
    New,
    Parking,
    Prefilling,
    Restoring,
    Snapshotting,
    Speculating,
    Unparking,
    Waiting,
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
    on(Restoring, BlocksRestored, restore.loaded),
    on(Restoring, StoreFailed, restore.lost),
    on(Restoring, PrefillAdvanced, restore.advanced),
    on(Restoring, DeviceFailed, restore.broken),
    on(Restoring, Cancelled, ending.drain_both),
    on(Compressing, PromptCompressed, lookup.compressed),
    on(Compressing, DeviceFailed, lookup.verbatim),
    on(Compressing, Cancelled, ending.drain),
    on(Unparking, DraftUnparked, generate.unparked),
    on(Unparking, DeviceFailed, generate.plain),
    on(Unparking, Cancelled, ending.drain),
    on(Prefilling, PrefillAdvanced, generate.prefilled),
    on(Prefilling, DeviceFailed, generate.broken),
    on(Prefilling, Cancelled, ending.drain),
    on(Speculating, Decoded, generate.accept),
    on(Speculating, DeviceFailed, generate.broken),
    on(Speculating, Cancelled, ending.drain),
    on(Draining, PrefixFound, ending.settle_found),
    on(Draining, PrefixMissed, ending.settle),
    on(Draining, StoreFailed, ending.settle_loss),
    on(Draining, BlocksRestored, ending.settle_restored),
    on(Draining, PromptCompressed, ending.settle),
    on(Draining, DraftUnparked, ending.settle_draft),
    on(Draining, PrefillAdvanced, ending.settle_rows),
    on(Draining, Decoded, ending.settle_decode),
    on(Draining, DeviceFailed, ending.settle_failure),
    ignored(Draining, Cancelled),
    on(Snapshotting, SnapshotSaved, ending.snapshotted),
    on(Snapshotting, DeviceFailed, ending.unsaved),
    ignored(Snapshotting, Cancelled),
    on(Parking, DraftParked, ending.parked),
    on(Parking, DeviceFailed, ending.parked),
    ignored(Parking, Cancelled),
)

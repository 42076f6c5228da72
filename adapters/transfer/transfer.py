"""Puts together what moves rows between slots and the store, for one target and its draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from adapters.device.lane.lane import DeviceLane
from adapters.models.decoder.shard import ReadableRows
from adapters.store.lookup import Lookup
from adapters.store.store import Store
from adapters.store.tier import ReadableTier
from adapters.transfer.copy_rows import StateMover, TargetPart, create_movers
from adapters.transfer.fence import Fences, SlotFinder
from adapters.transfer.restorer import Restorer
from adapters.transfer.saver import Saver


@frozen(eq=False)
class Transfer:
    """The parts that carry out the engine's effects on the store."""

    store: Store[ReadableTier]
    lookup: Lookup
    restorer: Restorer
    saver: Saver

    def close(self) -> None:
        """Write what was kept. Called when no restore is in flight any more."""
        self.saver.close()
        self.restorer.workers.shutdown()
        self.store.memory_ready.wait()  # memory must not be registered while it is closed
        self.store.memory.close()
        self.store.close()


def create_transfer(
    store: Store[ReadableTier],
    target: Sequence[TargetPart],
    lane: DeviceLane,
    serving: SlotFinder,
    *,
    draft: ReadableRows | None = None,
    catch_up: Callable[[int], object] = lambda _: None,
) -> Transfer:
    """Create all parts. target: the shards, in the order of their layers. catch_up: as in `Saver`."""
    layout = store.layout
    rows = create_movers([part.rows for part in target], layout.rows)
    drafts = () if draft is None or layout.draft is None else create_movers((draft,), layout.draft.rows)
    state = StateMover(target, layout.state)
    restorer = Restorer(store, lane, Fences(lane, serving), rows, drafts, state)
    return Transfer(store, Lookup(store), restorer, Saver(store, lane, serving, rows, drafts, state, catch_up))

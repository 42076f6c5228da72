"""Everything between slots and the store, for one target and its draft."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from adapters.device.lane.lane import DeviceLane
from adapters.store.disk_tier import Disk
from adapters.store.lookup import Lookup
from adapters.store.store import Store
from adapters.transfer.copy_rows import RowHolder, StateMover, TargetPart, movers
from adapters.transfer.fence import Fences, Serving
from adapters.transfer.restorer import Restorer
from adapters.transfer.saver import Saver


@frozen(eq=False)
class Transfer:
    """What the engine hands effects to, each to the part that carries it out."""

    store: Store[Disk]
    lookup: Lookup
    restorer: Restorer
    saver: Saver

    def close(self) -> None:
        """When nothing is restored any more: what was kept is written."""
        self.saver.close()
        self.restorer.workers.shutdown()
        self.store.ready.wait()  # or its memory would still be registered
        self.store.memory.close()
        self.store.close()


def transfer(
    store: Store[Disk],
    target: Sequence[TargetPart],
    lane: DeviceLane,
    serving: Serving,
    *,
    draft: RowHolder | None = None,
    catch_up: Callable[[int], object] = lambda _: None,
) -> Transfer:
    """target: its parts, in the order of their layers. catch_up: as in `Saver`."""
    layout = store.layout
    rows = movers(target, layout.rows)
    drafts = () if draft is None or layout.draft is None else movers((draft,), layout.draft.rows)
    state = StateMover(target, layout.state)
    restorer = Restorer(store, lane, Fences(lane, serving), rows, drafts, state)
    return Transfer(store, Lookup(store), restorer, Saver(store, lane, serving, rows, drafts, state, catch_up))

"""Says when a slot may be written beside the lane: behind everything that was asked of it before."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import anyio
from attrs import define, field

from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slots import SlotState
from adapters.transfer.copy_rows import UNMARKED, Marks, marks
from effects.ids import DeviceFailed, RequestId, SlotId, StoreFailed
from effects.prefill import OpenSlot

# The state of a slot, if it was opened for this request; asked on the lane.
Serving: TypeAlias = Callable[[int, RequestId], SlotState | DeviceFailed]


@define(eq=False)
class Fence:
    """Behind everything that was asked of a slot before it was opened for this request.

    passed: and nothing failed; any thread may ask. The lane knows it first: what is behind it there need not wait.
    after: what copies into the slot have to come behind on its device, once it is passed.
    """

    request: RequestId
    failure: StoreFailed | None = None
    passed: bool = False
    after: Marks = UNMARKED
    _decided: anyio.Event = field(factory=anyio.Event)

    async def wait(self) -> StoreFailed | None:
        """On the event loop, as `decided`."""
        await self._decided.wait()
        return self.failure

    def reached(self, state: SlotState | DeviceFailed, after: Marks) -> None:
        """On the lane."""
        if isinstance(state, DeviceFailed):
            self.failure = StoreFailed(state.kind, state.detail)
        else:
            self.after, self.passed = after, True

    def decided(self, _: None, error: BaseException | None) -> None:
        if error is not None:
            self.failure = StoreFailed("broken", str(error))
        self._decided.set()


@define(eq=False)
class Fences:
    """The last one of each slot."""

    lane: DeviceLane
    serving: Serving
    _fences: dict[SlotId, Fence] = field(factory=dict[SlotId, Fence])

    def opened(self, request: RequestId, effect: OpenSlot) -> None:
        """Right behind the opening itself: what is asked of the lane next must not keep a restore waiting."""
        self._fences[effect.slot] = self._raised(request, effect.slot)

    def of(self, request: RequestId, slot: SlotId) -> Fence:
        fence = self._fences.get(slot)
        return fence if fence is not None and fence.request == request else self._raised(request, slot)

    def _raised(self, request: RequestId, slot: SlotId) -> Fence:
        fence = Fence(request)
        self.lane.submit(partial(self._reached, fence, slot), fence.decided)
        return fence

    def _reached(self, fence: Fence, slot: SlotId) -> None:
        """On the lane: its device has been told everything that was asked of it, and is not waited for."""
        after = marks(self.lane.devices)
        fence.reached(self.serving(slot, fence.request), after)

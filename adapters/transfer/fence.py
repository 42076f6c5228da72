"""Says when a slot may be written by other threads: when the lane has passed all work for its earlier request.

The restorer places a fence when a slot is opened. A fence is a job on the lane, and jobs run in order. So once it runs,
all work for the slot's earlier request has been launched. It records a CUDA event behind that work on each GPU, and
copies on a GPU wait for its event.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import anyio
from attrs import define, field

from adapters.device.lane.lane import DeviceLane
from adapters.device.slots.slots import SlotState
from adapters.transfer.copy_rows import NO_CUDA_EVENTS, CudaEvents, record_cuda_events
from effects.ids import DeviceFailed, RequestId, SlotId, StoreFailed
from effects.prefill import OpenSlot

# Returns the state of a slot, if it was opened for this request; called on the lane.
SlotFinder: TypeAlias = Callable[[int, RequestId], SlotState | DeviceFailed]


@define(eq=False)
class Fence:
    """A point on the lane after everything that was launched for the slot before it was opened for this request.

    is_open: the lane has reached it and the slot serves this request; read by any thread. cuda_events: copies into the
    slot wait for them, once the fence is open.
    """

    request: RequestId
    failure: StoreFailed | None = None
    is_open: bool = False
    cuda_events: CudaEvents = NO_CUDA_EVENTS
    _is_finished: anyio.Event = field(factory=anyio.Event)

    async def wait(self) -> StoreFailed | None:
        """Wait until it is open or has failed. Called on the event loop, as `finish` is."""
        await self._is_finished.wait()
        return self.failure

    def record_outcome(self, state: SlotState | DeviceFailed, after: CudaEvents) -> None:
        """Record what the lane has found. Called on the lane."""
        if isinstance(state, DeviceFailed):
            self.failure = StoreFailed(state.kind, state.detail)
        else:
            self.cuda_events = after
            self.is_open = True  # last, since other threads read it

    def finish(self, _: None, error: BaseException | None) -> None:
        """Wake the tasks that wait for the fence. error: the exception of the lane, which has not reached it then."""
        if error is not None:
            self.failure = StoreFailed("broken", str(error))
        self._is_finished.set()


@define(eq=False)
class Fences:
    """The last fence of each slot."""

    lane: DeviceLane
    find_slot: SlotFinder
    _fences: dict[SlotId, Fence] = field(factory=dict[SlotId, Fence])

    def place_fence(self, request: RequestId, effect: OpenSlot) -> None:
        """Place a fence right after the opening, before other work that a restore would have to wait for."""
        self._fences[effect.slot] = self._submit_fence(request, effect.slot)

    def get_or_place_fence(self, request: RequestId, slot: SlotId) -> Fence:
        """Return the fence of the slot for this request; place one if there is none."""
        fence = self._fences.get(slot)
        return fence if fence is not None and fence.request == request else self._submit_fence(request, slot)

    def _submit_fence(self, request: RequestId, slot: SlotId) -> Fence:
        fence = Fence(request)
        self.lane.submit(partial(self._pass_fence, fence, slot), fence.finish)
        return fence

    def _pass_fence(self, fence: Fence, slot: SlotId) -> None:
        """Pass the fence. Called on the lane, which has launched all earlier work and does not wait for it."""
        after = record_cuda_events(self.lane.devices)
        fence.record_outcome(self.find_slot(slot, fence.request), after)

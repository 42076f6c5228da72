"""The lanes of an executor: one for all of its work, and possibly a second one for wide forwards of prompts.

Only the second lane works on the slot of a prompt launch while that is carried out. But the first lane opens the slot,
and it may still be busy with earlier work. So a launch waits until its slot is open. On a GPU it also waits for an
event that the first lane recorded behind the copies of that opening.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

import torch
from attrs import define, field

from adapters.device.lane.lane import DeviceLane
from adapters.watched_thread import WatchedThread
from effects.all import Launch
from effects.ids import PROMPTS, SlotId
from effects.prefill import RunPrefill

log = logging.getLogger("rekindle.device")

# Set when a slot is open: the event behind which the device is done with it. None: there is no need to wait, or the
# opening failed, which the next effect on the slot finds out.
Opening: TypeAlias = "Future[torch.cuda.Event | None]"
OpeningDone: TypeAlias = Callable[[object, BaseException | None], object]


@define(eq=False)
class ExecutorLanes:
    """The lanes of an executor, used on the event loop. prompts: None if the first lane carries out everything."""

    main: DeviceLane
    prompts: DeviceLane | None = None
    _openings: dict[SlotId, Opening] = field(init=False, factory=dict[SlotId, Opening])
    # An event behind the last opening that needed one.
    _last_opening_event: torch.cuda.Event | None = field(init=False, default=None)

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        return tuple(lane.thread for lane in (self.main, self.prompts) if lane is not None)

    def lane_of(self, launch: Launch) -> DeviceLane:
        return self.main if launch.lane != PROMPTS or self.prompts is None else self.prompts

    def is_prefill_lane_wanted(self, launches_ahead: bool) -> bool:
        """Should a launch of several chunks end, because other work waits for its lane? Asked by any thread.

        launches_ahead: of the shard. Otherwise several chunks without a prompt lane are for shards that work side by
        side, and they go on.
        """
        lane = self.prompts if self.prompts is not None else self.main if launches_ahead else None
        return lane is not None and lane.has_waiting_work

    def open(self, slot: SlotId, opening: Callable[[], bool], done: OpeningDone) -> None:
        """Open a slot on the first lane; `done` is called on the event loop.

        opening: opens the slot, and returns whether a prompt launch has to wait for all that the device was given until
        then. Otherwise it waits for earlier openings only, and not for the step that the first lane is running.
        """
        if self.prompts is None:
            self.main.submit(opening, done)
            return
        opened: Opening = Future()

        def open_and_announce() -> None:
            if opening():
                self._last_opening_event = record_event(self.main.device)
            opened.set_result(self._last_opening_event)

        def on_opened(_: object, error: BaseException | None) -> None:
            done(None, error)
            if not opened.done():  # it failed, and `done` knows
                opened.set_result(None)

        self.main.submit(open_and_announce, on_opened)
        self._openings[slot] = opened

    def launch(self, launch: Launch, work: Callable[[], object], failed: Callable[[BaseException], object]) -> None:
        """Post the work of a launch to its lane. `failed` is called on that lane with what it raised."""
        if (lane := self.lane_of(launch)) is self.main:
            lane.post(work, failed, between_steps=launch.joins)
            return
        slots = [
            effect_request.effect.slot
            for effect_request in launch.effect_requests
            if isinstance(effect_request.effect, RunPrefill)
        ]
        openings = [self._openings[slot] for slot in slots if slot in self._openings]
        device = lane.device

        def work_behind_openings() -> None:
            for opened in openings:
                if (event := opened.result()) is not None:
                    torch.cuda.current_stream(device).wait_event(event)
            work()

        lane.post(work_behind_openings, failed, between_steps=False)

    def close(self, closing: Callable[[], object], timeout_s: float) -> bool:
        """End the lanes; `closing` is the last work. Return False if a lane was still busy after `timeout_s`."""
        ended = self.prompts is None or self.prompts.close(timeout_s)
        if ended and not self.main.is_closed:
            self.main.post(closing, lambda error: log.error("closing the shard failed", exc_info=error))
        return self.main.close(timeout_s) and ended


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind everything that this lane has given its device so far; None on the CPU."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

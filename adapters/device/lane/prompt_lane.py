"""An executor's lanes: one for all that it does, and perhaps one more for wide forwards of prompts.

While a launch of the second one is carried out, nobody else is at the slot that it is about; but the first one has to
open that, and may still be at what was asked of it before. So a launch waits for the opening of its slot, and on a GPU
comes behind what that was told for it.
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

# Behind which event of the device it is done; None: there is none, or whoever comes next finds what went wrong.
Opening: TypeAlias = "Future[torch.cuda.Event | None]"
Heard: TypeAlias = Callable[[object, BaseException | None], object]


@define(eq=False)
class Lanes:
    """Called on the event loop. prompts: None where the first lane carries out all there is."""

    main: DeviceLane
    prompts: DeviceLane | None = None
    _openings: dict[SlotId, Opening] = field(init=False, factory=dict[SlotId, Opening])
    _told: torch.cuda.Event | None = field(init=False, default=None)  # behind the last opening that had to be marked

    @property
    def threads(self) -> tuple[WatchedThread, ...]:
        return tuple(lane.thread for lane in (self.main, self.prompts) if lane is not None)

    def of(self, launch: Launch) -> DeviceLane:
        return self.main if launch.lane != PROMPTS or self.prompts is None else self.prompts

    @property
    def given_up(self) -> bool:
        """By any thread: is the launch beside to go on no further?"""
        return self.prompts is not None and self.prompts.wanted

    def open(self, slot: SlotId, opening: Callable[[], bool], done: Heard) -> None:
        """opening: is a launch beside to wait for all that the device was told until then? Otherwise it waits for what
        other openings were, and not for the step that the first lane is at.
        """
        if self.prompts is None:
            self.main.submit(opening, done)
            return
        opened: Opening = Future()

        def announced() -> None:
            if opening():
                self._told = mark(self.main.device)
            opened.set_result(self._told)

        def heard(_: object, error: BaseException | None) -> None:
            done(None, error)
            if not opened.done():  # it failed, and who is told of that has been
                opened.set_result(None)

        self.main.submit(announced, heard)
        self._openings[slot] = opened

    def launch(self, launch: Launch, work: Callable[[], object], failed: Callable[[BaseException], object]) -> None:
        """failed: hears what it raised, on the lane."""
        if (lane := self.of(launch)) is self.main:
            lane.post(work, failed, between=launch.joins)
            return
        slots = [ask.effect.slot for ask in launch.asks if isinstance(ask.effect, RunPrefill)]
        openings, device = [self._openings[slot] for slot in slots if slot in self._openings], lane.device

        def behind() -> None:
            for opened in openings:
                if (event := opened.result()) is not None:
                    torch.cuda.current_stream(device).wait_event(event)
            work()

        lane.post(behind, failed, between=False)

    def close(self, closing: Callable[[], object], timeout_s: float) -> bool:
        """`closing` is the last that is done, if no lane is busy any more. False if one was after `timeout_s`."""
        ended = self.prompts is None or self.prompts.close(timeout_s)
        if ended and not self.main.closed:
            self.main.post(closing, lambda error: log.error("closing the shard failed", exc_info=error))
        return self.main.close(timeout_s) and ended


def mark(device: torch.device) -> torch.cuda.Event | None:
    """On a lane: behind all that it has told its device."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

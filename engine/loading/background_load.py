"""Loads a model on its device thread while the start does other things. Measurements wait until those are done."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import anyio.to_thread
import torch
from attrs import field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.device.lane.lane import DeviceLane
from engine.loading.drafts.load_draft import choose_draft_device
from engine.loading.load_target import LoadedModel, load_on_lane
from engine.loading.memory.device_survey import choose_devices
from engine.settings.options import Options
from engine.settings.output import start_progress
from engine.settings.user_error import UserError, build_memory_error


@frozen(eq=False)
class BackgroundLoad:
    """A target that is being loaded on its lane.

    result: the target, or the error that kept it from being loaded.
    measuring_allowed: set when the rest of the start is done, so that nothing disturbs measurements.
    cancelled: set when the target is no longer needed.
    """

    lane: DeviceLane
    result: Future[LoadedModel] = field(factory=Future[LoadedModel])
    measuring_allowed: threading.Event = field(factory=threading.Event)
    cancelled: threading.Event = field(factory=threading.Event)

    async def wait_for_target(self) -> LoadedModel:
        """Return the target when it is loaded. From this call on, its measurements may run.

        If the load fails, the lane is closed. Raises UserError with one line if the model cannot be served.
        """
        self.measuring_allowed.set()
        try:
            return await anyio.to_thread.run_sync(self.result.result)
        except CheckpointError as error:
            self.lane.close()
            raise UserError(str(error)) from error
        except torch.OutOfMemoryError as error:
            self.lane.close()
            devices = ", ".join(map(str, self.lane.devices))
            raise build_memory_error("the model", devices, "fewer --slots or a smaller --max-ctx", error) from error
        except BaseException:
            self.lane.close()
            raise

    def cancel(self) -> bool:
        """End the load with its current step. Returns False if that step takes longer than 10 s."""
        self.cancelled.set()
        self.measuring_allowed.set()
        return self.lane.close()


class LoadCancelled(Exception):
    """The load was cancelled: the target is no longer needed."""


def begin_load(
    options: Options, on_step: start_progress.StepListener = start_progress.ignore_step, only: str | None = None
) -> BackgroundLoad:
    """Begin to load a target on its lane.

    only: the identity that is wanted. Another one raises IdentityMismatch before shards are built.
    """
    *others, last = choose_devices(options.placement)
    beginning = BackgroundLoad(DeviceLane(last, (*others, choose_draft_device(options.speculation, last))))

    def next_step(step: str, done: int = 0, total: int = 0) -> None:
        if step in start_progress.TIMED and not total:
            beginning.measuring_allowed.wait()
        if beginning.cancelled.is_set():
            raise LoadCancelled
        on_step(step, done, total)

    def load() -> None:
        beginning.result.set_result(load_on_lane(options, beginning.lane, next_step, only))

    beginning.lane.post(load, beginning.result.set_exception)
    return beginning


async def load_target(
    options: Options, on_step: start_progress.StepListener = start_progress.ignore_step, only: str | None = None
) -> LoadedModel:
    """Load a target and wait for it, for callers that have nothing else to do meanwhile."""
    return await begin_load(options, on_step, only).wait_for_target()

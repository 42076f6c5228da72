"""A model is read on its lane, beside all else that a start has to do; what is timed waits until that is done."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import anyio.to_thread
import torch
from attrs import field, frozen

from adapters.checkpoint.checkpoint_error import CheckpointError
from adapters.device.lane.lane import DeviceLane
from engine.loading.device_survey import choose_devices
from engine.loading.load_draft import draft_device
from engine.loading.load_target import Target, load_on_lane
from engine.settings import start_progress
from engine.settings.options import Options
from engine.settings.user_error import UserError, no_room


@frozen(eq=False)
class BackgroundLoad:
    """A target that its lane is loading, while whoever began that does something else.

    alone: set when that is done. What is timed waits for it.
    """

    lane: DeviceLane
    done: Future[Target] = field(factory=Future[Target])
    alone: threading.Event = field(factory=threading.Event)
    given_up: threading.Event = field(factory=threading.Event)

    async def target(self) -> Target:
        """When it is there. Raises Refusal with one line for whatever keeps the model from being served."""
        self.alone.set()
        try:
            return await anyio.to_thread.run_sync(self.done.result)
        except CheckpointError as error:
            self.lane.close()
            raise UserError(str(error)) from error
        except torch.OutOfMemoryError as error:
            self.lane.close()
            devices = ", ".join(map(str, self.lane.devices))
            raise no_room("the model", devices, "fewer --slots or a smaller --max-ctx", error) from error
        except BaseException:
            self.lane.close()
            raise

    def give_up(self) -> bool:
        """Nobody waits for it any more: it ends with the step that it is at. False if that takes longer than 10 s."""
        self.given_up.set()
        self.alone.set()
        return self.lane.close()


class GivenUp(Exception):
    """Nobody waits for the target any more."""


def begin(
    options: Options, step: start_progress.StepHeard = start_progress.silent, only: str | None = None
) -> BackgroundLoad:
    """Load it, on its lane. only: Mismatched is raised before shards are made where the identity is another one."""
    *others, last = choose_devices(options)
    beginning = BackgroundLoad(DeviceLane(last, (*others, draft_device(options, last))))

    def next_step(step_: str, done: int = 0, total: int = 0) -> None:
        if step_ in start_progress.TIMED and not total:
            beginning.alone.wait()
        if beginning.given_up.is_set():
            raise GivenUp
        step(step_, done, total)

    def load() -> None:
        beginning.done.set_result(load_on_lane(options, beginning.lane, next_step, only))

    beginning.lane.post(load, beginning.done.set_exception)
    return beginning


async def load_target(
    options: Options, step: start_progress.StepHeard = start_progress.silent, only: str | None = None
) -> Target:
    """As `begin`, by somebody who has nothing else to do."""
    return await begin(options, step, only).target()

"""Tests of a model that loads while the rest of a start goes on. Its timed parts run only while nothing else does, and
the rest of the start does not wait long for them.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from engine.loading.background_load import LoadCancelled, begin_load
from engine.settings.options import Options, build_options
from engine.settings.output.start_progress import MEASURE, PROBE, WARM_UP, WEIGHTS
from engine.settings.user_error import UserError
from tests.models.checkpoints import save_qwen3


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Options:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    save_qwen3(tmp_path / "model")
    limits = {"max_ctx": 256, "slots": 1, "chunk": 64, "host_cache_budget": 0}
    return build_options(model=str(tmp_path / "model"), device="cpu", disk_prefix_cache="off", **limits)


class Told:
    """The steps so far; `until` waits for one."""

    def __init__(self) -> None:
        self.steps, self.changed = list[str](), threading.Condition()

    def __call__(self, step: str, done: int = 0, total: int = 0) -> None:
        with self.changed:
            self.steps.append(step)
            self.changed.notify_all()

    def until(self, step: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: step in self.steps, 60), self.steps


async def test_what_is_timed_waits_for_whoever_began(options: Options) -> None:
    first, second = Told(), Told()
    beginning = begin_load(options, first)
    assert not first.steps, "the first thing to do is to probe, which is timed"
    await (await beginning.wait_for_target()).close()
    assert first.steps[:2] == [PROBE, WEIGHTS]
    beginning = begin_load(options, second)
    second.until(WARM_UP)
    assert MEASURE not in second.steps
    await (await beginning.wait_for_target()).close()
    assert PROBE not in second.steps, "it was kept"
    assert MEASURE in second.steps


@pytest.mark.parametrize("at", [None, WEIGHTS], ids=["before its first step", "at a later one"])
async def test_a_target_that_nobody_waits_for_ends_with_its_step(options: Options, at: str | None) -> None:
    if at is not None:
        await (await begin_load(options).wait_for_target()).close()
    steps_seen = Told()
    beginning = begin_load(options, steps_seen)
    if at is not None:
        steps_seen.until(at)
    assert beginning.cancel()
    assert isinstance(beginning.result.exception(0), LoadCancelled)
    assert MEASURE not in steps_seen.steps
    assert beginning.lane.is_closed


async def test_what_keeps_a_model_from_being_served_is_told_when_it_is_waited_for(options: Options) -> None:
    (Path(options.model.model) / "config.json").write_text("{}")
    beginning = begin_load(options)
    with pytest.raises(UserError, match="model_type"):
        await beginning.wait_for_target()
    assert beginning.lane.is_closed


async def test_who_finds_no_room_is_told_what_was_wanted(options: Options) -> None:
    def full(step: str, *_: int) -> None:
        if step == WEIGHTS:
            raise torch.OutOfMemoryError(
                "Tried to allocate 3.00 GiB, 1.00 GiB is free. If reserved memory is large try"
            )

    with pytest.raises(UserError, match=r"does not fit cpu: fewer --slots .* help \(Tried .* 1\.00 GiB is free\.\)$"):
        await begin_load(options, full).wait_for_target()

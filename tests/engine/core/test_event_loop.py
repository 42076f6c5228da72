"""The event loop and the door: streams, batches, failures, cancellations and the end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.lowlevel import checkpoint
from attrs import evolve

from effects.all import EffectRequest, Launch
from effects.decode import Decoded, RunDecode
from effects.ids import RequestId, SlotId
from effects.job import Job
from effects.lookup import FindPrefix, PrefixMissed
from effects.ports import MAX_RECENT_SHOWN, PerformEffect, RowsLost
from effects.prefill import RunPrefill
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import EmitTokens, ReportProgress
from engine.core.event_loop import Envelope
from engine.settings.output.live_figures import LiveFigures, MemoryLedger, ModelBytes
from states.events import ForEngine, ForRequest, TimerElapsed
from states.machine import IllegalEvent
from states.pacing import DELAYS_NS, MS
from states.request_states import LookingUp, Prefilling
from states.residency import Resolved
from states.settings import Settings
from tests.engine.play import SETTINGS, ScriptedDevice, collect, engine, expected

SHORT = Job(prompt=(1, 2, 3), max_tokens=8)
LONG = Job(prompt=tuple(range(500)), max_tokens=6)


async def test_a_stream_has_the_models_tokens_and_one_end() -> None:
    async with engine() as running:
        tokens, closed = await collect(running.door.submit(LONG))
    assert tokens == expected(LONG)
    assert (closed.finish, closed.report.completion_tokens, closed.report.decode_steps) == ("length", 6, 6)
    assert running.closed == [closed]


async def test_progress_comes_before_tokens_and_never_goes_back() -> None:
    async with engine() as running:
        messages = [message async for message in running.door.submit(LONG)]
    done = [message.done for message in messages if isinstance(message, ReportProgress)]
    assert done == [0, 64, 128, 192, 256, 320, 384, 448, 499]
    first_token = next(at for at, message in enumerate(messages) if isinstance(message, EmitTokens))
    assert all(not isinstance(message, ReportProgress) for message in messages[first_token:])


async def test_a_stop_token_ends_the_answer_and_is_counted() -> None:
    stop = expected(SHORT)[3]
    job = Job(prompt=SHORT.prompt, max_tokens=8, stop_tokens=(stop,))
    async with engine() as running:
        tokens, closed = await collect(running.door.submit(job))
    assert tokens == expected(job)
    assert closed.finish == "stop"
    assert closed.report.completion_tokens == len(tokens)


async def test_many_at_once_give_what_each_gives_alone() -> None:
    jobs = [Job(prompt=tuple(range(n, n + 30 * n + 1)), max_tokens=5 + n) for n in range(1, 9)]
    answers = dict[int, tuple[int, ...]]()

    async def one(number: int) -> None:
        answers[number] = (await collect(running.door.submit(jobs[number])))[0]

    async with (
        engine(Settings(slots=4, chunk=64, block_size=16, max_queue=16)) as running,
        anyio.create_task_group() as tasks,
    ):
        for number in range(len(jobs)):
            tasks.start_soon(one, number)
    assert answers == {number: expected(job) for number, job in enumerate(jobs)}
    batches = [launch for launch in running.device.launches if len(launch.effect_requests) > 1]
    assert batches, "nothing was ever batched"
    assert all(
        isinstance(effect_request.effect, RunDecode) for launch in batches for effect_request in launch.effect_requests
    )


async def test_a_long_prefill_and_a_decoding_neighbour_take_turns() -> None:
    async with engine() as running:
        decoding = running.door.submit(Job(prompt=(1, 2), max_tokens=400))
        prefilling = running.door.submit(Job(prompt=tuple(range(900)), max_tokens=1))
        await collect(prefilling)
        decoding.cancel("client_gone")
        await collect(decoding)
    kinds = [type(launch.effect_requests[0].effect) for launch in running.device.launches]
    chunks = [at for at, kind in enumerate(kinds) if kind is RunPrefill and at > 1]
    assert [late - early for early, late in pairwise(chunks)] == [2] * 14


class Dying(ScriptedDevice):
    """Loses all its rows in the middle of some launches."""

    def __init__(self, *dying: int) -> None:
        super().__init__(fails=self.die)
        self.dying = dying

    def die(self, _: EffectRequest) -> Exception | None:
        if len(self.launches) not in self.dying:
            return None
        self.rows.clear()
        return RowsLost((SlotId(0), SlotId(1)), "the device died")


@pytest.mark.parametrize("dying", range(1, 14))
async def test_lost_rows_are_computed_again_and_the_client_never_notices(dying: int) -> None:
    """The device dies once, in any launch of the first prompt's eight chunks and six decode steps. Another request is
    served at the same time.
    """
    async with engine(device=Dying(dying)) as running:
        tickets = [running.door.submit(LONG), running.door.submit(SHORT)]
        messages = [message async for message in tickets[0]]
        tokens, closed = await collect(tickets[1])
    assert sum((message.tokens for message in messages if isinstance(message, EmitTokens)), ()) == expected(LONG)
    assert tokens == expected(SHORT)
    assert closed.finish == messages[-1].finish == "length"  # type: ignore[union-attr]
    progress = [message.done for message in messages if isinstance(message, ReportProgress)]
    assert progress == sorted(progress)
    spoke = next(at for at, message in enumerate(messages) if isinstance(message, EmitTokens))
    assert not any(isinstance(message, ReportProgress) for message in messages[spoke:])


async def test_rows_that_are_lost_twice_fail_their_requests_and_nobody_believes_the_slots() -> None:
    async with engine(device=Dying(3, 6)) as running:
        _, closed = await collect(running.door.submit(LONG))
        assert (closed.finish, closed.detail) == ("lost", "the rows of its slot were lost a second time")
        tokens, closed = await collect(running.door.submit(LONG))
    assert tokens == expected(LONG)
    assert closed.report.restored_tokens == 0


async def test_a_shard_that_cannot_be_had_fails_requests_as_lost_and_says_which(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone = RowsLost((), "shard tcp://10.0.0.2:7461: Connection refused")
    device = ScriptedDevice(
        fails=lambda effect_request: gone if isinstance(effect_request.effect, RunPrefill) else None
    )
    async with engine(device=device) as running:
        _, closed = await collect(running.door.submit(LONG))
    assert (closed.finish, closed.detail) == ("lost", f"RowsLost: {gone}")
    assert [record.exc_info for record in caplog.records if "Connection refused" in record.getMessage()] == [None]


async def test_rows_that_are_lost_while_they_are_kept_are_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The request has not failed: its answer is complete. The log says what follows from the loss."""

    async def dying(*_: object) -> SnapshotSaved:
        await checkpoint()
        raise RowsLost((SlotId(0),), "shard ipc+cpu:0: its process was ended by SIGKILL")

    keeping = evolve(SETTINGS, store=True, min_tokens=16, keep_decoded=True)
    perform = {FindPrefix: lambda *_: PrefixMissed("empty_store"), SaveSnapshot: dying}
    async with engine(keeping, perform=perform) as running:
        tokens, closed = await collect(running.door.submit(LONG))
    assert (tokens, closed.finish) == (expected(LONG), "length")
    (said,) = [record for record in caplog.records if "SIGKILL" in record.getMessage()]
    assert said.exc_info is None
    assert "Traceback" not in caplog.text


async def test_a_full_queue_refuses_and_the_others_finish() -> None:
    async with engine() as running:
        tickets = [running.door.submit(SHORT) for _ in range(7)]
        ends = [await collect(ticket) for ticket in tickets]
    assert [closed.finish for _, closed in ends] == ["length"] * 4 + ["queue_full"] * 3
    assert all(tokens == expected(SHORT) for tokens, closed in ends if closed.finish == "length")


async def test_an_exception_in_an_executor_fails_its_request_only() -> None:
    device = ScriptedDevice(
        fails=lambda effect_request: RuntimeError("boom") if isinstance(effect_request.effect, RunPrefill) else None
    )
    async with engine(device=device) as running:
        _, closed = await collect(running.door.submit(LONG))
        tokens, _ = await collect(running.door.submit(Job(prompt=(5,), max_tokens=3)))
    assert (closed.finish, closed.detail) == ("failed", "RuntimeError: boom")
    assert tokens == expected(Job(prompt=(5,), max_tokens=3))


@pytest.mark.parametrize(("error", "kind"), [(MemoryError(), "out_of_memory"), (OSError("gone"), "io")])
async def test_failures_are_named(error: Exception, kind: str) -> None:
    names = list[str]()
    device = ScriptedDevice(fails=lambda _: error)
    async with engine(device=device) as running:
        observe = running.event_loop.observe
        assert observe is not None

        def noted(envelope: Envelope, *more: Any) -> None:
            names.append(getattr(envelope.happened.event, "kind", ""))
            observe(envelope, *more)

        running.event_loop.observe = noted
        await collect(running.door.submit(SHORT))
    assert kind in names


async def test_a_cancelled_request_stops_within_a_chunk_and_its_slot_stays_warm() -> None:
    stuck, release = anyio.Event(), anyio.Event()

    async def third_chunk(launch: Launch) -> None:
        if launch.effect_requests[0].effect == RunPrefill(launch.effect_requests[0].effect.slot, 128, 192):  # type: ignore[union-attr]
            stuck.set()
            await release.wait()

    device = ScriptedDevice(before=third_chunk)
    async with engine(device=device) as running:
        ticket = running.door.submit(LONG)
        await stuck.wait()
        ticket.cancel("client_gone")
        ticket.cancel("client_gone")
        _, closed = await collect(ticket)
        assert closed.finish == "cancelled"
        assert running.event_loop.world.requests, "the running chunk still has to answer"
        device.before = None
        release.set()
        again, warm = await collect(running.door.submit(LONG))
    assert again == expected(LONG)
    assert warm.report.restored_tokens == 128
    assert not any(
        isinstance(effect_request.effect, RunPrefill) and effect_request.effect.start == 192
        for effect_request in asks_of(device, closed=1)
    )


def asks_of(device: ScriptedDevice, *, closed: int) -> list[EffectRequest]:
    return [
        effect_request
        for launch in device.launches
        for effect_request in launch.effect_requests
        if effect_request.request == closed
    ]


async def test_what_is_posted_while_an_event_is_folded_comes_behind_it() -> None:
    async with engine() as running:
        ticket, observe, seen = running.door.submit(LONG), running.event_loop.observe, list[str]()
        assert observe is not None

        def noted(envelope: Envelope, *more: Any) -> None:
            seen.append(type(envelope.happened.event).__name__)
            observe(envelope, *more)

        running.event_loop.observe = noted
        ticket.set_listener(lambda: ticket.cancel("client_gone"))
        await anyio.sleep(0.01)
        _, closed = await collect(ticket)
    assert closed.finish == "cancelled"
    assert seen[:2] == ["Submitted", "Cancelled"]


async def test_a_bug_ends_the_engine_whoever_has_brought_the_event() -> None:
    async def serve() -> None:
        async with engine() as running:
            await anyio.lowlevel.checkpoint()
            with pytest.raises(IllegalEvent):
                running.event_loop.post(ForRequest(RequestId(99), Decoded((1,))))
            with pytest.raises(anyio.ClosedResourceError):
                running.door.submit(SHORT)
            await anyio.sleep_forever()

    with pytest.raises(ExceptionGroup) as raised:
        await serve()
    assert raised.group_contains(IllegalEvent)


async def test_cancelling_after_the_end_changes_nothing() -> None:
    async with engine() as running:
        ticket = running.door.submit(SHORT)
        await collect(ticket)
        ticket.cancel("client_gone")
        seq = running.event_loop.seq
        await anyio.sleep(0.01)
        assert running.event_loop.seq == seq


async def test_a_continuation_keeps_its_rows_and_says_so() -> None:
    async with engine() as running:
        tokens, first = await collect(running.door.submit(LONG))
        turn = Job(prompt=LONG.prompt + tokens + (7, 8, 9), max_tokens=4)
        again, second = await collect(running.door.submit(turn))
    assert again == expected(turn)
    assert (first.report.restored_tokens, second.report.restored_tokens, second.report.tier) == (0, 496, "device")


async def test_a_shared_prefix_is_copied_from_a_busy_slot() -> None:
    one, other = (Job(prompt=(*range(200), 1000 + n), max_tokens=12) for n in range(2))
    decoding = anyio.Event()

    async def watch(launch: Launch) -> None:
        if isinstance(launch.effect_requests[0].effect, RunDecode):
            decoding.set()

    async with engine(device=ScriptedDevice(before=watch)) as running, anyio.create_task_group() as tasks:
        tasks.start_soon(collect, running.door.submit(one))
        await decoding.wait()
        tokens, closed = await collect(running.door.submit(other))
    assert tokens == expected(other)
    assert closed.report.restored_tokens == 192


async def test_draining_lets_the_running_finish_and_refuses_newcomers() -> None:
    async with engine() as running:
        ticket = running.door.submit(SHORT)
        await anyio.lowlevel.checkpoint()
        assert await running.door.drain(5)
        _, refused = await collect(running.door.submit(SHORT))
        tokens, closed = await collect(ticket)
    assert (closed.finish, refused.finish) == ("length", "shutdown")
    assert tokens == expected(SHORT)


async def test_draining_cuts_short_what_takes_too_long() -> None:
    async with engine() as running:
        ticket = running.door.submit(Job(prompt=(1,), max_tokens=1_000_000))
        await anyio.sleep(0.01)
        assert not await running.door.drain(0.02)
        _, closed = await collect(ticket)
    assert closed.finish == "shutdown"


def missed(*_: Any) -> PrefixMissed:
    return PrefixMissed("no_match")


def failing(*_: Any) -> PrefixMissed:
    raise OSError("the disk is gone")


async def missed_later(*_: Any) -> PrefixMissed:
    await anyio.lowlevel.checkpoint()
    return missed()


async def failing_later(*_: Any) -> PrefixMissed:
    await anyio.lowlevel.checkpoint()
    return failing()


@pytest.mark.parametrize(
    ("find", "stage"),
    [(missed, Prefilling), (failing, Prefilling), (missed_later, LookingUp), (failing_later, LookingUp)],
)
async def test_what_the_store_knows_is_answered_before_anybody_else_has_a_turn(
    find: PerformEffect, stage: type
) -> None:
    """A lookup that fails counts as a miss, whether it answers at once or later."""
    async with engine(evolve(SETTINGS, store=True), perform={FindPrefix: find}) as running:
        await anyio.wait_all_tasks_blocked()  # it has begun
        ticket = running.door.submit(LONG)
        (state,) = running.event_loop.world.requests.values()
        assert isinstance(state, stage)
        tokens, closed = await collect(ticket)
    assert tokens == expected(LONG)
    assert closed.finish == "length"


async def test_a_timer_is_an_effect_that_an_event_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DELAYS_NS, "trim_interval", 10 * MS)
    elapsed = anyio.Event()
    async with engine() as running:
        watch, events = running.event_loop.observe, list[object]()

        def noted(envelope: Envelope, *others: Any) -> None:
            assert watch is not None
            watch(envelope, *others)
            if isinstance(envelope.happened, ForEngine):
                events.append(envelope.happened.event)
                elapsed.set()

        running.event_loop.observe = noted
        await collect(running.door.submit(SHORT))
        with anyio.fail_after(20):
            await elapsed.wait()
        assert events == [TimerElapsed("trim_interval", 1)]
        assert running.event_loop.world.pacing.trimming.phase == "rested"


async def test_an_engine_that_closes_waits_for_no_timer() -> None:
    """The timer of a minute runs since the first request."""
    with anyio.fail_after(20):
        async with engine() as running:
            await collect(running.door.submit(SHORT))
            assert running.event_loop.world.pacing.trimming.phase == "counting"


async def test_a_drain_ends_with_the_event_of_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for that at no interval of its own."""

    async def refuse(_: float) -> None:
        raise AssertionError("it polls")

    go = anyio.Event()
    async with engine(device=ScriptedDevice(before=lambda _: go.wait())) as running, anyio.create_task_group() as tasks:
        monkeypatch.setattr(anyio, "sleep", refuse)
        ticket, drained = running.door.submit(SHORT), list[bool]()

        async def drain() -> None:
            drained.append(await running.door.drain(60))

        tasks.start_soon(drain)
        for _ in range(20):
            await checkpoint()
        assert not drained
        go.set()
        assert (await collect(ticket))[0] == expected(SHORT)
    assert drained == [True]


async def test_stages_add_up_to_the_time_the_request_took() -> None:
    async with engine() as running:
        start = running.clock[0]
        _, closed = await collect(running.door.submit(LONG))
        took = running.clock[0] - start
    assert set(closed.stages_ms) == {"Prefilling", "Speculating"}
    assert sum(closed.stages_ms.values()) <= took / 1e6
    assert closed.stages_ms["Prefilling"] == 8.0


async def test_the_pace_of_decode_steps_can_be_seen() -> None:
    settings = evolve(SETTINGS, latency_target_ns=40_000_000)
    async with engine(settings) as running:
        shown = running.door.status().props.build_json()["decode_pace"]
    assert shown == {"latency_target_ms": 40, "is_even": False, "interval_ms": 0}


async def test_where_the_draft_is_can_be_seen() -> None:
    async with engine() as plain:
        assert plain.door.status().props.build_json()["runtime"] == {
            "draft_residency": {"policy": "auto", "draft": None, "drafter": None}
        }
    async with engine(evolve(SETTINGS, max_proposals=3, residency=Resolved("request-scoped", "park"))) as running:
        running.door.live = lambda: LiveFigures(
            MemoryLedger({"draft": ModelBytes(0, 7)}, None, (), None, None, {}, {}, {}, {})
        )
        shown = running.door.status().props.build_json()["runtime"]["draft_residency"]
        assert shown["policy"] == "request-scoped"
        draft = shown["draft"]
        assert (draft["state"], draft["device_bytes"], draft["host_bytes"]) == ("parked", 0, 7)


async def test_nothing_is_left_behind() -> None:
    async with engine() as running:
        for n in range(50):
            await collect(running.door.submit(Job(prompt=(n, n + 1), max_tokens=2)))
        await anyio.sleep(0.01)
        assert not running.event_loop.world.requests
        assert not running.door._tickets  # noqa: SLF001
        assert len(running.door.meter._spent) == MAX_RECENT_SHOWN  # noqa: SLF001 - the last ones are shown
        assert not running.door.meter._current_stage  # noqa: SLF001


def test_the_settings_of_these_tests_are_small() -> None:
    assert SETTINGS.chunk % SETTINGS.block_size == 0

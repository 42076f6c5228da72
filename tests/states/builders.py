"""Values for tests: small, complete, and named for what they are. A block is 4 tokens, a chunk 8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import evolve, frozen

from effects.all import Effect, EffectRequest
from effects.compression import Compressed, Compression
from effects.ids import RequestId, SlotId, Tier, Tokens
from effects.job import Job, Report
from effects.pacing import PaceMemory, PaceSnapshot, PaceSteps, TrimMemory
from effects.timer import StartTimer
from states import speculation_control as control
from states import world as the_world
from states.events import Happened
from states.phases import make_report
from states.rates import Rates
from states.request_states import (
    Done,
    Draining,
    Generated,
    MayPropose,
    Parking,
    Prefilling,
    Prompt,
    ProposesNothing,
    RequestRemainder,
    Restoring,
    SlotLease,
    Snapshotting,
    Speculating,
    Speculation,
    State,
    Waiting,
)
from states.residency import Resolved
from states.settings import DecisionContext, Settings
from states.slots import Slot, Slots
from states.world import Output, World

HERE = SlotId(0)
ONE, TWO, THREE = RequestId(1), RequestId(2), RequestId(3)
PROMPT = tuple(range(100, 121))  # 21 tokens: five blocks, and one that is always computed
SHORT = (100, 101, 102, 103, 900, 901)  # what a compression made of PROMPT: one block of it survives
PLAIN = Settings(slots=2, max_context=64, max_queue=3, chunk=8, block_size=4, batch_rows=8)
STORE = evolve(PLAIN, store=True)
DRAFT = evolve(PLAIN, max_proposals=3)
SCOPED = evolve(DRAFT, residency=Resolved("request-scoped", "park"))
STATEFUL = evolve(STORE, stateful=True, state_checkpoints=3)
PFLASH = evolve(PLAIN, scorer_max_tokens=1000)  # and jobs say from when on
EVERYTHING = evolve(STORE, max_proposals=3, scorer_max_tokens=1000)


LONG_ENOUGH = Compression("auto", threshold=12, keep=250)


OF_PACE = (PaceMemory, PaceSnapshot, PaceSteps, TrimMemory, StartTimer)


def is_of_pace(out: Output) -> bool:
    """Is it about background work, and not about what a request is served with?"""
    return isinstance(out, EffectRequest) and isinstance(out.effect, OF_PACE)


def advance(world: World, happened: Happened) -> tuple[World, tuple[Output, ...]]:
    """Fold an event as the engine does, but leave out the effects about the pace of background work, which
    test_pacing.py tests.
    """
    world, outs = the_world.advance(world, happened)
    return world, tuple(out for out in outs if not is_of_pace(out))


def a_job(**changes: Any) -> Job:
    return evolve(Job(PROMPT, max_tokens=6, stop_tokens=(0,), compression=LONG_ENOUGH), **changes)


@frozen
class Flat:
    """All that any state may be made of, side by side, so that a test names what matters to it."""

    job: Job
    prompt: Tokens
    slot: SlotId = HERE
    valid: int = 0
    reused: int = 0
    tier: Tier = "none"
    ahead: int = 0
    miss: str = "nothing_shared_on_device"
    compressed: bool = False
    compression: Compressed | None = None
    shared: int = 0
    stored: int = 0
    speculation: str = ""
    control: control.SpeculationControl | None = None  # of a draft that is leased
    answer: Tokens = ()
    decode_steps: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def early(self) -> tuple[SlotLease, Prompt]:
        slot_lease = SlotLease(self.slot, self.valid, self.reused, self.tier, self.ahead)
        return slot_lease, Prompt(
            self.job, self.prompt, self.compressed, self.compression, self.shared, self.stored, self.miss
        )

    @property
    def drafted(self) -> Speculation:
        return ProposesNothing(self.speculation) if self.control is None else MayPropose(self.control, self.speculation)

    @property
    def generated(self) -> Generated:
        return Generated(self.answer, self.decode_steps, self.proposed, self.accepted)

    @property
    def remainder(self) -> RequestRemainder:
        return RequestRemainder(*self.early, self.answer, None if self.control is None else "draft")


def a(state: type, flat: Flat, *more: Any, **named: Any) -> Any:
    """A state that is made of this."""
    parts: Iterator[Any] = iter(flat.early)
    if issubclass(state, Prefilling):
        parts = iter((*flat.early, flat.drafted))
    elif issubclass(state, Speculating):
        parts = iter((*flat.early, flat.drafted, flat.generated))
    elif issubclass(state, Snapshotting | Parking | Draining | Done):
        parts = iter((flat.remainder,))
    return state(*parts, *more, **named)


def knowing(settings: Settings = PLAIN, **rates: Any) -> DecisionContext:
    return DecisionContext(settings, Rates(**rates))


def leased(settings: Settings = DRAFT, **changes: Any) -> control.SpeculationControl:
    """Return what is known of a draft that has proposed nothing yet."""
    return evolve(control.make_control(settings, Rates()), **changes)


def some(settings: Settings = PLAIN, **changes: Any) -> Flat:
    """Just admitted, with nothing on the device."""
    speculation = "" if settings.max_proposals else "no_draft"
    return evolve(Flat(a_job(), PROMPT, speculation=speculation), **changes)


def prefilled(settings: Settings = PLAIN, **changes: Any) -> Flat:
    """All rows but the last prompt token's."""
    return some(settings, **{"valid": 20, **changes})


def answering(settings: Settings = PLAIN, **changes: Any) -> Flat:
    """Two decode steps in: two tokens out."""
    return prefilled(settings, **{"valid": 22, "answer": (7, 8), "decode_steps": 2, **changes})


def a_report(flat: Flat, settings: Settings = PLAIN) -> Report:
    """Return the report of a request that has decoded."""
    return make_report(knowing(settings), a(Speculating, flat))


def a_restoring(flat: Flat | None = None, **changes: Any) -> Restoring:
    """Rows [8, 20) are loaded while [0, 8) is computed."""
    loading: Restoring = a(Restoring, flat or some(STORE), 8, 20, "disk", loading=True, computing=True)
    return evolve(loading, **changes)


def a_house(*slots: Slot, waiting: tuple[RequestId, ...] = (), release_count: int = 9) -> Slots:
    return Slots(slots, waiting, release_count)


def waiting_for(job: Job, request: RequestId = ONE) -> dict[RequestId, State]:
    return {request: a_waiting(job)}


def a_waiting(job: Job | None = None, **changes: Any) -> Waiting:
    job = job or a_job()
    return Waiting(Prompt(job, job.prompt, **changes))


def make_effect_requests(request: RequestId, *effects: Effect) -> tuple[EffectRequest, ...]:
    return tuple(EffectRequest(request, effect) for effect in effects)

"""Values for tests: small, complete, and named for what they are. A block is 4 tokens, a chunk 8."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from effects.all import Ask, Effect
from effects.ids import RequestId, SlotId
from effects.job import Job
from states.life import Draining, Hold, Restoring, State, Waiting
from states.residency import Resolved
from states.settings import Settings
from states.slots import Slot, Slots

HERE = SlotId(0)
ONE, TWO, THREE = RequestId(1), RequestId(2), RequestId(3)
PROMPT = tuple(range(100, 121))  # 21 tokens: five blocks, and one that is always computed
SHORT = (100, 101, 102, 103, 900, 901)  # what a compression made of PROMPT: one block of it survives
PLAIN = Settings(slots=2, max_context=64, max_queue=3, chunk=8, block_size=4, batch_rows=8)
STORE = evolve(PLAIN, store=True)
DRAFT = evolve(PLAIN, block=3)
SCOPED = evolve(DRAFT, residency=Resolved("request-scoped", "park"))
PFLASH = evolve(PLAIN, compress_threshold=12, keep_permille=250)
EVERYTHING = evolve(STORE, block=3, compress_threshold=12, keep_permille=250)


def a_job(**changes: Any) -> Job:
    return evolve(Job(PROMPT, max_tokens=6, stop_tokens=(0,)), **changes)


def a_hold(settings: Settings = PLAIN, **changes: Any) -> Hold:
    """Just admitted, with nothing on the device."""
    told = {"miss": "nothing_shared_on_device", "speculation": "" if settings.block else "no_draft"}
    return evolve(Hold(a_job(), settings, HERE, PROMPT, valid=0, restored=0, tier="none", **told), **changes)


def a_prefilled(settings: Settings = PLAIN, **changes: Any) -> Hold:
    """All rows but the last prompt token's."""
    return a_hold(settings, **{"valid": 20, **changes})


def an_answering(settings: Settings = PLAIN, **changes: Any) -> Hold:
    """Two decode steps in: two tokens out."""
    return a_prefilled(settings, **{"valid": 22, "answer": (7, 8), "decode_steps": 2, **changes})


def a_restoring(settings: Settings = STORE, **changes: Any) -> Restoring:
    """Rows [8, 20) are loaded while [0, 8) is computed."""
    return evolve(Restoring(a_hold(settings), 8, 20, "disk", loading=True, computing=True), **changes)


def a_draining(hold: Hold, flying: int = 1) -> Draining:
    return Draining(hold, flying)


def a_house(*slots: Slot, waiting: tuple[RequestId, ...] = (), turn: int = 9) -> Slots:
    return Slots(slots, waiting, turn)


def waiting_for(job: Job, request: RequestId = ONE) -> dict[RequestId, State]:
    return {request: Waiting(job)}


def asks(request: RequestId, *effects: Effect) -> tuple[Ask, ...]:
    return tuple(Ask(request, effect) for effect in effects)

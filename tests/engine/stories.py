"""The golden traces, each a short story. `python -m tests.engine.stories` records them anew."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from attrs import define, evolve, field

from effects.all import EffectRequest, Launch
from effects.compression import Compression, PromptPart
from effects.decode import Decoded
from effects.ids import ENGINE, PROMPTS, DeviceFailed, LeaseId, RequestId, SlotId, StoreFailed
from effects.job import Job
from effects.lookup import PrefixFound, PrefixMissed
from effects.pacing import PaceSnapshot, TrimMemory
from effects.prefill import PrefillAdvanced, RunPrefill
from effects.prompt_compression import PromptCompressed, PromptScored
from effects.residency import ModelLoaded, ModelUnloaded
from effects.restore import BlocksRestored
from effects.scope import Scope
from effects.snapshot import SnapshotSaved
from effects.stream import StopLaunch
from engine.core.event_loop import Envelope
from engine.core.trace import DIGEST_EVERY, VERSION, Digest, Header, converter, digest, encode
from states.events import Cancelled, Event, ForEngine, ForRequest, Happened, SlotsLost, Submitted, TimerElapsed
from states.rates import Rates
from states.residency import Resolved
from states.settings import Settings
from states.world import Output, World, advance, make_world

GOLDEN = Path(__file__).parents[1] / "golden"
PLAIN = Settings(slots=2, max_context=256, max_queue=1, chunk=32, block_size=16, batch_rows=8)
RICH = evolve(
    PLAIN,
    store=True,
    max_proposals=4,
    residency=Resolved("request-scoped", "park"),
    scorer_max_tokens=4096,
    rates=Rates(prefill=(100,), loads={"host": 100, "disk": 100}),
)
AGENT = evolve(PLAIN, store=True, stateful=True, min_tokens=40)
HYBRID = evolve(AGENT, state_checkpoints=2, state_tokens=10, slots=1)
A, B, C, D = map(RequestId, range(1, 5))


@define
class Teller:
    """Feeds events, and writes down what they lead to, as the recorder would."""

    settings: Settings
    world: World = field(init=False)
    lines: list[str] = field(factory=list[str])
    seq: int = 0

    def __attrs_post_init__(self) -> None:
        self.world = make_world(self.settings)
        first = Header(VERSION, "golden", self.settings, "scripted", {})
        self.lines.append(json.dumps(converter().unstructure(first), separators=(",", ":")))

    def tell(self, request: RequestId, *events: Event) -> tuple[Output, ...]:
        outs: tuple[Output, ...] = ()
        for event in events:
            outs = self.happen(ForRequest(request, event))
        return outs

    def happen(self, happened: Happened) -> tuple[Output, ...]:
        self.world, outs = advance(self.world, happened)
        self.lines += [encode(Envelope(self.seq, self.seq * 1000, happened)), *map(encode, outs)]
        if self.seq % DIGEST_EVERY == DIGEST_EVERY - 1:
            self.lines.append(encode(Digest(self.seq, digest(self.world))))
        self.seq += 1
        return outs

    def elapse(self, timer: TimerElapsed) -> tuple[Output, ...]:
        return self.happen(ForEngine(timer))

    def end(self) -> str:
        self.lines.append(encode(Digest(self.seq - 1, digest(self.world), last=True)))
        return "\n".join(self.lines) + "\n"


def launched(outs: tuple[Output, ...]) -> list[EffectRequest]:
    return [effect_request for out in outs if isinstance(out, Launch) for effect_request in out.effect_requests]


def a_turn_and_its_continuation() -> str:
    """A prompt of 40 tokens in two chunks, three tokens of answer; the next turn starts at row 32 of the same slot."""
    story, prompt = Teller(PLAIN), tuple(range(40))
    story.tell(A, Submitted(Job(prompt, 3)), PrefillAdvanced(32), PrefillAdvanced(39))
    story.tell(A, *(Decoded((100 + n,)) for n in range(3)))
    story.tell(B, Submitted(Job((*prompt, 100, 101, 102, 7, 8), 1)), PrefillAdvanced(44), Decoded((200,)))
    return story.end()


def a_disconnect_while_a_neighbour_decodes() -> str:
    """B leaves in the middle of its chunk: the chunk ends, the slot keeps its rows, A never notices."""
    story = Teller(PLAIN)
    story.tell(A, Submitted(Job((1, 2), 4)), PrefillAdvanced(1))
    story.tell(B, Submitted(Job(tuple(range(90)), 4)))
    outs = story.tell(A, Decoded((50,)))
    assert launched(outs) == [EffectRequest(B, RunPrefill(launched(outs)[0].effect.slot, 0, 32))]  # type: ignore[union-attr]
    story.tell(B, Cancelled("client_gone"))
    story.tell(B, PrefillAdvanced(32))
    story.tell(A, Decoded((51,)), Decoded((52,)), Decoded((53,)))
    story.tell(B, Cancelled("client_gone"))  # the edge may say so twice; the request has left by then
    return story.end()


def a_prompt_in_pieces_beside_its_neighbours() -> str:
    """A decodes while the rows of B's prompt come with its steps; C's, which is shorter, go first, twice as many."""
    story = Teller(evolve(PLAIN, slots=3, mixed_rows=16))
    story.tell(A, Submitted(Job((1, 2), 6)), PrefillAdvanced(1))
    story.tell(B, Submitted(Job(tuple(range(90)), 2)))
    outs = story.tell(A, Decoded((50,)))
    assert launched(outs)[1] == EffectRequest(B, RunPrefill(SlotId(1), 0, 15))
    story.tell(C, Submitted(Job(tuple(range(100, 139)), 1)))
    story.tell(A, Decoded((51,)))
    outs = story.tell(B, PrefillAdvanced(15))
    assert launched(outs)[1] == EffectRequest(C, RunPrefill(SlotId(2), 0, 31))
    story.tell(A, Decoded((52,)))
    story.tell(C, PrefillAdvanced(31))
    story.tell(A, Decoded((53,)))
    outs = story.tell(C, PrefillAdvanced(38))
    assert launched(outs)[2] == EffectRequest(B, RunPrefill(SlotId(1), 15, 29))
    story.tell(A, Decoded((54,)))
    story.tell(C, Decoded((70,)))
    story.tell(B, PrefillAdvanced(29))
    story.tell(A, Decoded((55,)))
    story.tell(B, PrefillAdvanced(44), PrefillAdvanced(76), PrefillAdvanced(89), Decoded((60,)), Decoded((61,)))
    return story.end()


def a_prompt_beside_its_neighbour() -> str:
    """B's chunks are computed while A decodes; A's steps go on alone until B's last rows, whose turn they wait for."""
    story = Teller(evolve(PLAIN, prompt_lane_min_rows=30))
    story.tell(A, Submitted(Job((1, 2), 9)), PrefillAdvanced(1), Decoded((50,), more=True))
    outs = story.tell(B, Submitted(Job(tuple(range(90)), 2)))
    assert [out.lane for out in outs if isinstance(out, Launch)] == [PROMPTS]
    story.tell(A, Decoded((51,), more=True))
    story.tell(B, PrefillAdvanced(32))
    outs = story.tell(A, Decoded((52,), more=True))
    assert not launched(outs)
    outs = story.tell(B, PrefillAdvanced(64))
    assert EffectRequest(A, StopLaunch()) in outs
    outs = story.tell(A, Decoded((53,)))
    assert launched(outs) == [EffectRequest(B, RunPrefill(SlotId(1), 64, 89))]
    outs = story.tell(B, PrefillAdvanced(89))
    assert [effect_request.request for effect_request in launched(outs)] == [A, B]
    story.tell(A, Decoded((54,)))
    story.tell(B, Decoded((60,)))
    story.tell(A, Decoded((55,)))
    story.tell(B, Decoded((61,)))
    story.tell(A, Decoded((56,)), Decoded((57,)), Decoded((58,)))
    return story.end()


def a_long_prompt_that_gives_way() -> str:
    """A has the lane of prompts to itself, and is stopped for B, which comes first; last rows are on the other lane."""
    story = Teller(evolve(PLAIN, prompt_lane_min_rows=30, chunks_per_prefill=4))
    outs = story.tell(A, Submitted(Job(tuple(range(200)), 1)))
    assert launched(outs) == [EffectRequest(A, RunPrefill(SlotId(0), 0, 128))]
    story.tell(A, PrefillAdvanced(32, more=True))
    outs = story.tell(B, Submitted(Job((*range(9), *range(60)), 1)))
    assert EffectRequest(A, StopLaunch()) in outs
    story.tell(A, PrefillAdvanced(96, more=True))
    outs = story.tell(A, PrefillAdvanced(96))
    assert launched(outs) == [EffectRequest(B, RunPrefill(SlotId(1), 0, 64))]
    story.tell(B, PrefillAdvanced(32, more=True))
    outs = story.tell(B, PrefillAdvanced(64))
    assert launched(outs) == [
        EffectRequest(B, RunPrefill(SlotId(1), 64, 68)),
        EffectRequest(A, RunPrefill(SlotId(0), 96, 192)),
    ]
    story.tell(B, PrefillAdvanced(68), Decoded((60,)))
    story.tell(A, PrefillAdvanced(128, more=True), PrefillAdvanced(192), PrefillAdvanced(199), Decoded((61,)))
    return story.end()


def a_full_house() -> str:
    """Two slots, a queue of one: the fourth is refused, the third is admitted when the first leaves."""
    story = Teller(PLAIN)
    for request in (A, B, C, D):
        story.tell(request, Submitted(Job((1, request), 2)))
    story.tell(A, PrefillAdvanced(1))
    story.tell(A, Decoded((9,)))
    story.tell(B, PrefillAdvanced(1))
    story.tell(A, Decoded((9,)))
    story.tell(B, Decoded((8,)))
    story.tell(C, PrefillAdvanced(1))
    story.tell(B, Decoded((8,)))
    story.tell(C, Decoded((7,)), Cancelled("shutdown"))
    story.tell(C, Decoded((7,)))
    return story.end()


def everything_goes_wrong_and_the_answer_comes() -> str:
    """The lookup hits, the restore fails half-way, the draft will not load, the snapshot fails. The tokens come."""
    story = Teller(RICH)
    story.tell(A, Submitted(Job(tuple(range(90)), 2)))
    story.tell(A, PrefixFound(LeaseId(5), 64, "disk"))
    story.tell(A, StoreFailed("io", "read error"), PrefillAdvanced(32))
    story.tell(A, DeviceFailed("out_of_memory", "no room for the draft"))
    story.tell(A, PrefillAdvanced(64), PrefillAdvanced(89))
    story.tell(A, Decoded((50,)), Decoded((51,)))
    story.tell(A, StoreFailed("io", "disk full"))
    return story.end()


def a_conversation_that_is_frozen() -> str:
    """Two messages have aged: both are shortened in one go. The next turn is served them so, and goes on from there."""
    story, size = Teller(evolve(RICH, max_proposals=0)), (0, 20, 60, 100, 130, 150)
    ends, roles = ((0, 5), (35, 40)), ("system", "user", "assistant", "tool", "assistant")
    parts = [PromptPart(role, *span) for role, span in zip(roles, pairwise(size), strict=True)]
    parts[1:3] = [evolve(part, keep=250, name=part.role) for part in parts[1:3]]
    asked = Compression("always", 80, 250, tuple(parts), continues=True, freeze=True, least=16)
    story.tell(A, Submitted(Job(tuple(range(150)), 2, compression=asked)), PrefixMissed("empty_store"))
    story.tell(A, ModelLoaded(900, 7, "scorer"), PromptScored(32))
    kept = ((20, 25), (55, 60), (60, 65), (95, 100))
    story.tell(A, PromptCompressed((), kept, ns=4000), ModelUnloaded(900), PrefixMissed("empty_store"))
    story.tell(A, PrefillAdvanced(32), PrefillAdvanced(64), PrefillAdvanced(89), Decoded((60,)), Decoded((61,)))
    story.tell(A, SnapshotSaved(80, 5120))
    parts[1:3] = [evolve(part, kept=ends) for part in parts[1:3]]
    later = evolve(asked, parts=(*parts, PromptPart("user", 150, 170)))
    job = Job((*range(150), 60, 61, *range(200, 218)), 1, compression=later)
    story.tell(B, Submitted(job), PrefixMissed("diverged_at:80", length=80))
    story.tell(B, PrefillAdvanced(109), Decoded((7,)), SnapshotSaved(96, 1024))
    return story.end()


def compressed_restored_and_speculated() -> str:
    """A long prompt is compressed, found on disk in its short form, loaded while its front is computed, and drafted."""
    story, short = Teller(RICH), tuple(range(0, 160, 2))
    asked = Compression("auto", 100, 500, (PromptPart("user", 2, 150), PromptPart("assistant", 152, 160)))
    job = Job(tuple(range(160)), 6, stop_tokens=(99,), compression=asked)
    story.tell(A, Submitted(job), PrefixMissed("empty_store"), ModelLoaded(900, 7, "scorer"))
    kept, forced = tuple((at, at + 1) for at in short), ((0, 1), (158, 159))
    story.tell(A, *(PromptScored(stop) for stop in range(32, 160, 32)), PromptCompressed(short, kept, forced, 4000))
    story.tell(A, ModelUnloaded(900))
    story.tell(A, PrefixFound(LeaseId(6), 64, "host"))
    story.tell(A, BlocksRestored(32, 64, 4096), PrefillAdvanced(32))
    story.tell(A, ModelLoaded(), PrefillAdvanced(79))
    story.tell(A, Decoded((60, 61, 62), proposed=4), Decoded((63, 99, 64), proposed=2))
    story.tell(A, SnapshotSaved(80, 5120), ModelUnloaded())
    return story.end()


def sessions_of_one_agent() -> str:
    """`auto`: the second session shares the first one's head, up to where its message opens; the third one loads it.

    What loading took is known from then on. The model has positional state, so prefill stops where it is to be kept.
    """
    story, head = Teller(AGENT), tuple(range(70))
    jobs = [
        Job((*head, *range(1000 * n, 1000 * n + 20)), 1, scope=Scope("auto", 30), boundaries=(1, 68, 86))
        for n in (1, 2, 3)
    ]
    story.tell(A, Submitted(jobs[0]), PrefixMissed("empty_store"))
    story.tell(A, *(PrefillAdvanced(stop, ns=64_000) for stop in (32, 64, 89)), Decoded((7,)))
    story.tell(B, Submitted(jobs[1]), PrefixMissed("empty_store", shared=70))
    story.tell(B, *(PrefillAdvanced(stop, ns=64_000) for stop in (32, 64, 89)), Decoded((8,)), SnapshotSaved(64, 4096))
    hit = PrefixFound(LeaseId(1), 64, "host", shared=70, checkpoints=(64,))
    story.tell(C, Submitted(jobs[2]), hit, BlocksRestored(64, 64, 4096, ns=6_400))
    story.tell(C, PrefillAdvanced(89, ns=64_000), Decoded((9,)))
    return story.end()


def reasoning_that_is_left_out() -> str:
    """A hybrid model answers with reasoning, which the next turn's prompt leaves out: the slot keeps its rows, and goes
    on from the state that a place has kept where the answer opened. A third turn rewrites more: rows are there, and the
    state behind them comes from the disk.
    """
    story, prompt = Teller(HYBRID), tuple(range(60))
    story.tell(A, Submitted(Job(prompt, 9, boundaries=(1, 40, 58))), PrefixMissed("empty_store"))
    story.tell(
        A, PrefillAdvanced(32), PrefillAdvanced(48), PrefillAdvanced(59), *(Decoded((n,)) for n in range(80, 89))
    )
    story.tell(A, SnapshotSaved(64, 4096))
    turn = (*prompt, *range(86, 89), *range(200, 230))
    story.tell(B, Submitted(Job(turn, 1, boundaries=(1, 40, 58, 64, 91))), PrefixMissed("no_checkpoint:48", length=48))
    story.tell(B, PrefillAdvanced(80), PrefillAdvanced(92), Decoded((7,)), SnapshotSaved(80, 4096))
    other = (*turn[:40], *range(300, 330))
    story.tell(C, Submitted(Job(other, 1, boundaries=(1, 40))), PrefixFound(LeaseId(1), 32, "disk", checkpoints=(32,)))
    story.tell(C, BlocksRestored(32, 32, 2048), PrefillAdvanced(64), PrefillAdvanced(69), Decoded((8,)))
    story.tell(C, SnapshotSaved(64, 4096))
    return story.end()


def a_device_that_dies() -> str:
    """All slots are lost while A decodes and B waits for the lane: both start again, A says nothing twice. When A's
    slot is lost once more, it fails; what B's slot holds is found by C.
    """
    story, prompt = Teller(PLAIN), tuple(range(40))
    story.tell(A, Submitted(Job(prompt[:2], 4)), PrefillAdvanced(1), Decoded((50,)))
    story.tell(B, Submitted(Job(prompt, 1)))
    story.happen(ForEngine(SlotsLost((SlotId(0), SlotId(1)))))
    story.tell(A, DeviceFailed("lost", "the device died"))
    story.tell(B, PrefillAdvanced(32))
    story.tell(A, PrefillAdvanced(1), Decoded((50,)))
    story.tell(B, PrefillAdvanced(39))
    story.tell(A, Decoded((51,)))
    story.tell(B, Decoded((60,)))
    story.happen(ForEngine(SlotsLost((SlotId(0),))))
    story.tell(A, DeviceFailed("lost", "the device died again"))
    story.tell(C, Submitted(Job((*prompt, 60, 61), 1)), PrefillAdvanced(41), Decoded((70,)))
    return story.end()


def a_snapshot_that_gives_way() -> str:
    """A is saved. The copies may begin once 10 ms have passed in which no first token was waited for. They stop for B's
    first token, and continue after it. When the server has been idle for a minute, memory is given back.
    """
    story, prompt = Teller(evolve(PLAIN, store=True)), tuple(range(40))
    story.tell(A, Submitted(Job(prompt, 1)), PrefixMissed("empty_store"), PrefillAdvanced(32), PrefillAdvanced(39))
    story.tell(A, Decoded((50,)))
    assert story.elapse(TimerElapsed("snapshot_quiet", 2)) == (EffectRequest(A, PaceSnapshot(may_copy=True)),)
    outs = story.tell(B, Submitted(Job((7, 8), 2)))
    assert EffectRequest(A, PaceSnapshot()) in outs
    story.tell(B, PrefillAdvanced(1), Decoded((60,)))
    assert story.elapse(TimerElapsed("snapshot_quiet", 4)) == (EffectRequest(A, PaceSnapshot(may_copy=True)),)
    story.tell(A, SnapshotSaved(32, 4096))
    story.tell(B, Decoded((61,)))
    assert story.elapse(TimerElapsed("snapshot_patience", 3)) == ()
    assert story.elapse(TimerElapsed("trim_interval", 1)) == (EffectRequest(ENGINE, TrimMemory()),)
    return story.end()


STORIES: dict[str, Callable[[], str]] = {
    story.__name__: story
    for story in (
        a_turn_and_its_continuation,
        a_disconnect_while_a_neighbour_decodes,
        a_prompt_in_pieces_beside_its_neighbours,
        a_prompt_beside_its_neighbour,
        a_long_prompt_that_gives_way,
        a_full_house,
        everything_goes_wrong_and_the_answer_comes,
        a_conversation_that_is_frozen,
        compressed_restored_and_speculated,
        sessions_of_one_agent,
        reasoning_that_is_left_out,
        a_device_that_dies,
        a_snapshot_that_gives_way,
    )
}


def files() -> Iterator[tuple[str, Path]]:
    for name in STORIES:
        yield name, GOLDEN / f"{name}.jsonl"


if __name__ == "__main__":
    for name, path in files():
        path.write_text(STORIES[name](), encoding="utf-8")

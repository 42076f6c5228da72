"""Simulates one life of the server on the virtual clock: the real fold, with executors that only take their time.

Theory of operation. The problem is to learn what a cache policy would cost without a model. Decisions must be the real
ones, but computing must take no real time.

`feed` gives an event to the real fold (`states.world.advance`) and carries out the effects that come back. An effect
computes nothing: `carry_out` reserves time for it on a queue of the virtual clock, and the event with its outcome is
fed at the end of that time. The lane is one queue, and the disk has two more (`simulated_store.py`). The store and its
indexes are real. So hits, evictions and restores are those of a server, and only durations come from `Costs`.

Invariants: the clock never goes back; events are fed in the order of their times; the lane does one thing at a time.

Example: the fold launches a prefill of 512 rows. The lane is free at 3 ms and the chunk costs 95 ms, so
`PrefillAdvanced` is fed at 98 ms, and its rows count as computed from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from attrs import define, field

from effects.all import EffectRequest, Launch, Outcome
from effects.decode import Decoded, RunDecode
from effects.ids import MAIN, RequestId, Tokens
from effects.job import Job
from effects.lookup import FindPrefix, PrefixFound, PrefixMissed, ReleasePrefix
from effects.pacing import PaceMemory, PaceSnapshot, PaceSteps, TrimMemory
from effects.prefill import OpenSlot, PrefillAdvanced, RunPrefill
from effects.prompt_compression import CompressPrompt, KeepFrozen
from effects.residency import LoadModel, ModelLoaded, ModelUnloaded, UnloadModel
from effects.restore import BlocksRestored, RestoreBlocks
from effects.snapshot import SaveSnapshot, SnapshotSaved
from effects.stream import CloseStream, EmitTokens, ReportProgress, StopLaunch
from effects.timer import StartTimer
from engine.tools.simulation.simulated_compression import count_scored, shorten_prompt
from engine.tools.simulation.simulated_costs import Costs
from engine.tools.simulation.simulated_store import SimulatedStore
from engine.tools.simulation.tally import RequestTally
from engine.tools.simulation.virtual_clock import Clock, SerialServer
from states.events import Event, ForEngine, ForRequest, Happened, Submitted, TimerElapsed
from states.request_states import StateWithSlot, get_remainder
from states.sequences import round_down_to_block
from states.settings import Settings
from states.world import Output, World, advance, make_world

# Copies of snapshots take their place on the lane here, and no memory is pinned: there is nothing to be paced.
PACE = (PaceSnapshot, PaceSteps, PaceMemory, TrimMemory)


@define(eq=False)
class LiveRequest:
    """A request in this process: the figures that count it, and the answer that the log has."""

    count: RequestTally
    answer: Tokens
    on_closed: Callable[[], None]
    answered_tokens: int = 0  # tokens of the answer that were decoded
    first_slot: bool = True


@define(eq=False)
class Process:
    """A process that gets requests by `submit`. Everything else happens on the clock.

    An outcome says what really happened in the index and in the slots; only durations come from the costs. Nothing
    fails here, no client cancels, and there is no draft, so settings must not ask for one.

    keep_frozen: keeps the text of frozen messages.
    """

    settings: Settings
    costs: Costs
    clock: Clock
    keeping: SimulatedStore
    keep_frozen: Callable[[RequestId, KeepFrozen], object] = lambda *_: None
    world: World = field(init=False)
    lane: SerialServer = field(init=False)
    live: dict[RequestId, LiveRequest] = field(factory=dict[RequestId, LiveRequest])
    joining: list[EffectRequest] = field(factory=list[EffectRequest])  # requests that join the next launch
    undisturbed: bool = True  # since the first of them joined; see `carry_out`

    def __attrs_post_init__(self) -> None:
        assert not self.settings.max_proposals
        self.world = make_world(self.settings)
        self.lane = SerialServer(self.clock)

    @property
    def is_idle(self) -> bool:
        return not self.world.requests

    def submit(self, request: RequestId, job: Job, live: LiveRequest) -> None:
        self.live[request] = live
        self.feed(request, Submitted(job))

    def feed(self, request: RequestId, event: Event) -> None:
        self.happen(ForRequest(request, event))

    def happen(self, happened: Happened) -> None:
        self.world, outs = advance(self.world, happened)
        quiet = all(isinstance(out, Launch) or isinstance(out.effect, (EmitTokens, StartTimer, *PACE)) for out in outs)
        self.undisturbed = quiet and (self.undisturbed or not self.joining)
        for out in outs:
            effect = None if isinstance(out, Launch) else out.effect
            if isinstance(effect, StartTimer):
                elapsed = ForEngine(TimerElapsed(effect.name, effect.number))
                self.clock.at(self.clock.now + effect.delay_ns, partial(self.happen, elapsed))
            elif not isinstance(effect, PACE):
                self.carry_out(out, quiet=quiet)

    def carry_out(self, out: Output, *, quiet: bool) -> None:
        """Carry out one output of the fold. quiet: the same event led to nothing else that takes time."""
        match out:
            case Launch(effect_requests, joins=True):
                self.join(effect_requests)
            case Launch(effect_requests):
                self.launch(effect_requests, quiet=quiet)
            case EffectRequest(request, EmitTokens()):
                count = self.live[request].count
                count.first = count.first or self.clock.now
            case EffectRequest(_, ReportProgress() | StopLaunch()):
                pass
            case EffectRequest(request, OpenSlot() as opening):
                self.open(request, opening)
            case EffectRequest(request, FindPrefix() as find):
                self.find(request, find)
            case EffectRequest(request, RestoreBlocks() as restore):
                self.restore(request, restore)
            case EffectRequest(request, SaveSnapshot() as saving):
                self.run_after(self.costs.launch, partial(self.save, request, saving))
            case EffectRequest(_, ReleasePrefix(lease)):
                self.keeping.release(lease)
            case EffectRequest(request, KeepFrozen() as kept):
                self.keep_frozen(request, kept)
            case EffectRequest(request, CloseStream() as closing):
                self.close(request, closing)
            case _:
                raise AssertionError(f"a simulation has no such effect: {out}")

    # --- the device ---

    def launch(self, effect_requests: tuple[EffectRequest, ...], *, quiet: bool) -> None:
        """Put a launch on the lane now. Its outcomes are fed when its time has passed."""
        match effect_requests[-1].effect:
            case RunPrefill() if len(effect_requests) > 1 and isinstance(effect_requests[0].effect, RunPrefill):
                for effect_request in effect_requests:  # a simulated device computes them one after the other
                    self.launch((effect_request,), quiet=quiet)
            case RunPrefill() as piece if len(effect_requests) > 1:
                self.launch_mixed(effect_requests[:-1], effect_requests[-1].request, piece)
            case RunPrefill(_, start, stop) as chunk:
                took = self.costs.chunk_ns(start, stop)
                self.run_after(took, partial(self.on_prefilled, effect_requests[0].request, chunk, took))
                self.copy_kept_states(chunk)
            case RunDecode():
                for effect_request in effect_requests:
                    if isinstance(effect_request.effect, RunDecode) and effect_request.effect.checkpoint:
                        self.checkpoint(
                            effect_request.request, round_down_to_block(self.settings, effect_request.effect.position)
                        )
                self.decode(effect_requests, 1 if not quiet else self.count_undisturbed_steps(effect_requests))
            case CompressPrompt() as asked:
                took = self.costs.launch + count_scored(asked) * self.costs.drafter
                self.run_after(took, partial(self.answer, effect_requests[0].request, shorten_prompt(asked, took)))
            case LoadModel(name):
                self.run_after(
                    self.costs.launch, partial(self.answer, effect_requests[0].request, ModelLoaded(name=name))
                )
            case UnloadModel():
                self.run_after(self.costs.launch, partial(self.answer, effect_requests[0].request, ModelUnloaded()))
            case other:
                raise AssertionError(f"a simulation has no such launch: {other}")

    def join(self, effect_requests: tuple[EffectRequest, ...]) -> None:
        """Let requests join the running launch.

        Its outcomes are scheduled already, so they get the step after it, together with others that have joined.
        """
        if not self.joining:
            self.clock.at(max(self.lane.free, self.clock.now), self.launch_joined)
        self.joining += effect_requests

    def launch_joined(self) -> None:
        effect_requests = tuple(self.joining)
        self.joining = []
        self.launch(effect_requests, quiet=self.undisturbed)

    def launch_mixed(self, decode_steps: tuple[EffectRequest, ...], request: RequestId, piece: RunPrefill) -> None:
        positions = [
            effect_request.effect.position
            for effect_request in decode_steps
            if isinstance(effect_request.effect, RunDecode)
        ]
        took = self.costs.mixed_ns(positions, piece.start, piece.stop)

        def answer_all() -> None:
            self.on_decoded([effect_request.request for effect_request in decode_steps], 1, 0)
            self.on_prefilled(request, piece, 0)

        self.run_after(took, answer_all)
        self.copy_kept_states(piece)

    def copy_kept_states(self, chunk: RunPrefill) -> None:
        """Let the lane copy the state that a chunk leaves to where it is kept."""
        self.lane.enter(((chunk.device_checkpoint is not None) + chunk.checkpoint) * self.state_copy_ns)

    def count_undisturbed_steps(self, effect_requests: tuple[EffectRequest, ...]) -> int:
        """Return how many steps these requests can decode as one event: until one of them is complete.

        It is 1 where something else waits for the lane, where the model has positional state, and where a request still
        has to get its first token.
        """
        lives = [self.live[effect_request.request] for effect_request in effect_requests]
        if self.settings.stateful or self.world.lanes[MAIN].waiting or not all(live.answered_tokens for live in lives):
            # With positional state a step may keep a checkpoint before it, and a first token has a time of its own.
            return 1
        return min(len(live.answer) - live.answered_tokens for live in lives)

    def decode(self, effect_requests: tuple[EffectRequest, ...], most: int) -> None:
        """Decode some tokens of each request as one event.

        It holds as many steps as end before the next event on the clock. The times of the steps are added one by one,
        so the result equals that of single steps.
        """
        positions = [
            effect_request.effect.position
            for effect_request in effect_requests
            if isinstance(effect_request.effect, RunDecode)
        ]
        room = self.clock.next - max(self.lane.free, self.clock.now)
        took = self.costs.decode_ns(positions)
        steps = 1
        while steps < most:
            more = self.costs.decode_ns([position + steps for position in positions])
            if took + more > room:
                break
            took = took + more
            steps = steps + 1
        self.run_after(
            took,
            partial(
                self.on_decoded, [effect_request.request for effect_request in effect_requests], steps, took // steps
            ),
        )

    def run_after(self, ns: int, action: Callable[[], None]) -> None:
        self.clock.at(self.lane.enter(ns), action)

    @property
    def state_copy_ns(self) -> int:
        """Nanoseconds to copy a recurrent state."""
        return self.costs.state_tokens * self.costs.copy

    def answer(self, request: RequestId, outcome: Outcome) -> None:
        self.feed(request, outcome)

    def on_prefilled(self, request: RequestId, chunk: RunPrefill, took: int) -> None:
        if chunk.checkpoint:
            self.checkpoint(request, round_down_to_block(self.settings, chunk.stop))
        self.feed(request, PrefillAdvanced(chunk.stop, took))

    def checkpoint(self, request: RequestId, at: int) -> None:
        left = get_remainder(self.get_held_state(request))
        self.keeping.keep_checkpoint((left.prompt.tokens + left.answer)[:at], left.prompt.job.salt)

    def get_held_state(self, request: RequestId) -> StateWithSlot:
        state = self.world.requests[request]
        assert isinstance(state, StateWithSlot), state
        return state

    def on_decoded(self, requests: list[RequestId], steps: int, took: int) -> None:
        """Feed the next tokens of each answer. took: nanoseconds of one step."""
        for request in requests:
            live = self.live[request]
            tokens = live.answer[live.answered_tokens : live.answered_tokens + steps]
            live.answered_tokens += steps
            self.feed(request, Decoded(tokens, ns=took, accepted=0, steps=steps))

    def open(self, request: RequestId, opening: OpenSlot) -> None:
        if opening.source != opening.slot:
            self.lane.enter(opening.keep * self.costs.copy)
        if opening.state and (opening.source != opening.slot or opening.device_checkpoint is not None):
            self.lane.enter(self.state_copy_ns)
        live = self.live[request]
        if live.first_slot:
            live.first_slot = False
            live.count.device = live.count.found = opening.state if self.settings.stateful else opening.keep

    def save(self, request: RequestId, saving: SaveSnapshot) -> None:
        """Copy out the blocks that no tier has, in virtual time. Then they are kept, and wait to be written."""
        tokens = saving.tokens
        salt = get_remainder(self.get_held_state(request)).prompt.job.salt
        runs = self.keeping.find_missing_runs(tokens, salt)
        copied = sum(run.length for run in runs) + self.costs.state_tokens * saving.checkpoint

        def finish_save() -> None:
            saved = self.keeping.keep_runs(runs)
            saved += self.keeping.keep_checkpoint(tokens, salt) if saving.checkpoint else 0
            self.feed(request, SnapshotSaved(len(tokens), saved))

        self.run_after(copied * self.costs.copy, finish_save)

    # --- the store ---

    def find(self, request: RequestId, effect: FindPrefix) -> None:
        outcome = self.keeping.find(effect)
        if isinstance(outcome, PrefixFound | PrefixMissed):
            count = self.live[request].count
            count.found = max(count.found, round_down_to_block(self.settings, min(outcome.length, count.prompt - 1)))
        took = len(effect.prompt) * self.costs.find
        self.clock.at(self.clock.now + took, partial(self.answer, request, outcome))

    def restore(self, request: RequestId, effect: RestoreBlocks) -> None:
        """Restore rows.

        Rows in host memory are there at once. Rows on disk wait for earlier reads. Then all of them are copied on the
        lane.
        """
        asked = self.clock.now
        read_at = self.keeping.start_load(effect)

        def copy_rows() -> None:
            state = self.state_copy_ns if self.settings.stateful else 0
            self.clock.at(self.lane.enter((effect.stop - effect.start) * self.costs.copy + state), finish_restore)

        def finish_restore() -> None:
            self.keeping.on_restored(effect)
            size = (effect.stop - effect.start) * self.costs.token_bytes + self.costs.state_bytes
            self.feed(request, BlocksRestored(effect.start, effect.stop, size, self.clock.now - asked))

        self.clock.at(read_at, copy_rows)

    def close(self, request: RequestId, closing: CloseStream) -> None:
        """Note the figures of a request whose client has its answer.

        The fold decides in the same event what is kept of it.
        """
        live = self.live.pop(request)
        report = closing.report
        assert closing.finish == "length", closing
        count = live.count
        count.restored = report.restored_tokens
        count.followed = report.followed_tokens
        count.tier = report.tier
        count.closed = self.clock.now
        count.served = report.prompt_tokens
        if report.cache.rows:
            count.selected = min(report.cache.boundary, count.prompt)
            count.needed = round_down_to_block(self.settings, min(count.selected, count.prompt - 1))
        live.on_closed()
